"""Operators whose local form is the very same call on local tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardfold.operators import elementwise
from shardfold.runtime.ops.local_op import Local, Site

# Random elementwise operators need positions, and `copy` and `fill` are never split by capture.
ELEMENTWISE = [
    kind
    for kind in elementwise.TABLE
    if not any(word in kind for word in ("dropout", "bernoulli", "rand"))
]
ALONG = (
    "transpose swapaxes t movedim permute detach slice narrow diff roll flip select unbind cat "
    "concat stack tril triu"
).split()
WHOLE_DIM = (
    "amax amin aminmax prod any all argmax argmin median nanmedian mode var std var_mean std_mean "
    "norm linalg_vector_norm linalg_norm frobenius_norm max min cumsum cumprod cummax cummin "
    "logcumsumexp sum nansum count_nonzero topk sort argsort one_hot bucketize searchsorted histc"
).split()
LIKE = "zeros_like ones_like full_like empty_like".split()
PRODUCTS = "mm mv dot outer bmm matmul einsum _grouped_mm".split()


def plain(site: Site) -> Local:
    """The same call; refused where the rule asks for an exchange of a factor that is split."""
    for exchange in site.rule.rule.exchanges:
        if exchange.factor in site.split:
            raise site.unsupported(f"{exchange.factor} needs a {exchange.kind} inside the operator")
    return site.invoke


TABLE: Mapping[str, Callable[[Site], Local]] = {
    **dict.fromkeys(ELEMENTWISE, plain),
    **{f"aten.{name}": plain for name in (*ALONG, *WHOLE_DIM, *LIKE, *PRODUCTS)},
}
