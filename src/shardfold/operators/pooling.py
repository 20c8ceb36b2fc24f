"""Pooling: batch and channels split freely, space where windows align with parts.

`b c h w -> b c h w`, h and w being the output's; a window wider than its stride exchanges a halo.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from shardfold.operators.call import Call
from shardfold.operators.notation import Rule
from shardfold.operators.windows import SPATIAL, each, halos, windows


def _lead(call: Call, rank: int) -> list[str]:
    return ["b", "c"][rank + 2 - len(call.inputs[0].shape) :]


def _pool(call: Call, rank: int, *, space: bool, **properties: Any) -> Rule:
    """A pool with windows over the last `rank` dims; `space` says whether they may split."""
    before = call.inputs[0].shape
    kernel = each(call.attribute("kernel_size"), rank)
    dims = windows(call, before, kernel)
    lead = _lead(call, rank)
    sizes = dict(zip(lead, before, strict=False)) | {d.factor: d.after for d in dims}
    split = [dim for dim in dims if space and dim.aligned]
    ins = [dim.factor if dim in split else "." for dim in dims]
    return call.rule(
        {call.op.operands[0].name: " ".join([*lead, *ins])},
        " ".join([*lead, *(dim.factor for dim in dims)]),
        sizes=sizes,
        flops=float(math.prod(kernel)),
        whole=frozenset(dim.factor for dim in dims if dim not in split),
        exchanges=halos(dims, lead, sizes, call.inputs[0].item_bytes) if space else (),
        least={dim.factor: dim.least for dim in dims},
        saves=(call.op.operands[0].name,),
        backward=1.0,
        **properties,
    )


def _max(rank: int) -> Callable[[Call], Rule]:
    # Autograd keeps where each maximum was; positions count in the whole plane, so an operator
    # that returns them does not split space.
    return lambda call: _pool(call, rank, space=len(call.results) == 1, saves_results=True)


def _average(rank: int) -> Callable[[Call], Rule]:
    return lambda call: _pool(call, rank, space=True, linear=(0,))


def _adaptive(call: Call, rank: int, *, mean: bool) -> Rule:
    """To size 1 it is a mean over the dim; to a divisor of the size, windows without overlap."""
    before, after = call.inputs[0].shape, call.results[0].shape
    lead = _lead(call, rank)
    sizes = dict(zip(lead, before, strict=False))
    ins, outs, whole, flops = list(lead), list(lead), set(), 1.0
    for factor, n, m in zip(SPATIAL[-rank:], before[-rank:], after[-rank:], strict=True):
        sizes[factor] = n if m == 1 else m
        ins.append(factor if n % m == 0 else ".")
        outs.append("." if m == 1 else factor)
        flops *= 1.0 if m == 1 else n / m
        if not mean or n % m:
            whole.add(factor)
    return call.rule(
        {call.op.operands[0].name: " ".join(ins)},
        " ".join(outs),
        sizes=sizes,
        flops=flops,
        whole=frozenset(whole),
        linear=(0,) if mean else (),
        saves=() if mean and set(after[-rank:]) == {1} else (call.op.operands[0].name,),
        saves_results=not mean,
        backward=1.0,
    )


def _adaptive_pool(rank: int, *, mean: bool) -> Callable[[Call], Rule]:
    return lambda call: _adaptive(call, rank, mean=mean)


TABLE: Mapping[str, Callable[[Call], Rule]] = {
    **{f"aten.max_pool{k}d": _max(k) for k in (1, 2, 3)},
    **{f"aten.max_pool{k}d_with_indices": _max(k) for k in (1, 2, 3)},
    **{f"aten.avg_pool{k}d": _average(k) for k in (1, 2, 3)},
    **{f"aten.adaptive_avg_pool{k}d": _adaptive_pool(k, mean=True) for k in (1, 2, 3)},
    **{f"aten.adaptive_max_pool{k}d": _adaptive_pool(k, mean=False) for k in (1, 2, 3)},
}
