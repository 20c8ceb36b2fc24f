"""What a mask selects, followed to where its number no longer matters.

`x[mask]` has as many items as the mask has ones: no fixed shape. But most of what follows gives the
same on the whole tensor, if the rest is left out in the end: `x[mask].square().mean()` is the sum
of the selected squares by their number. So the whole goes along with what was selected, through
operators that treat each item for itself, and a mean, a sum or a loss is taken of it, or it is put
back where it came from (`y[mask] = f(x[mask])`). What reads the selection otherwise finds a size
that depends on values, and is refused as such.

In the whole, what is not selected is one half, a number that nearly all functions accept: it is
left out by `torch.where`, forward and backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils import _pytree as pytree

UNREAD = 0.5
NAMES = (
    "abs add clamp cos div erf exp expm1 eq float double ge gt le lt log log1p log2 logical_not "
    "maximum minimum mul ne neg nan_to_num ones_like pow reciprocal relu rsqrt sigmoid sign sin "
    "sqrt square sub tanh to type_as where xlogy zeros_like"
)
OPERATORS = (
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __rpow__ "
    "__neg__ __gt__ __lt__ __ge__ __le__ __eq__ __ne__ __and__ __or__ __invert__"
)
EACH = {  # functions of single items
    function
    for owner in (Tensor, torch)
    for name in (*NAMES.split(), *OPERATORS.split())
    if callable(function := getattr(owner, name, None))
} | {F.relu, F.gelu, F.silu, F.softplus, F.logsigmoid, F.elu, F.leaky_relu, F.hardtanh}
ROWS = {F.linear, F.layer_norm, F.rms_norm}  # and of rows of them
LAST = {F.softmax, F.log_softmax, torch.softmax, torch.log_softmax, Tensor.softmax}
LAST |= {Tensor.log_softmax, torch.logsumexp, Tensor.logsumexp, F.cosine_similarity}  # of one dim
SUMS = {torch.sum, Tensor.sum, torch.mean, Tensor.mean}
MEANS = {torch.mean, Tensor.mean}
LOSSES = {
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy),
    *(F.binary_cross_entropy_with_logits, F.soft_margin_loss, F.kl_div),
}
CLASSES = {F.cross_entropy, F.nll_loss}
PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm}
NORMS = {torch.norm, Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm}
SPREADS = {torch.var, Tensor.var, torch.std, Tensor.std}
DEVIATIONS = {torch.std, Tensor.std}
IN_PLACE = {
    getattr(Tensor, name): getattr(torch, made)
    for made in ("add", "sub", "mul", "div")
    for name in (f"{made}_", f"__i{'truediv' if made == 'div' else made}__")
}
PUTS = {Tensor.__setitem__}


@dataclass(frozen=True, slots=True)
class Selected:
    """What was selected, as traced; the whole; and the mask, of its first dims."""

    traced: Tensor
    whole: Tensor
    mask: Tensor
    version: int

    @property
    def inner(self) -> int:
        """The dims of an item."""
        return int(self.whole.dim() - self.mask.dim())

    def shaped(self) -> Tensor:
        """The mask, for every number of the whole."""
        return self.mask.reshape(*self.mask.shape, *[1] * self.inner)


class Selections:
    """All that masks have selected, by identity."""

    def __init__(self) -> None:
        self.found: dict[int, Selected] = {}

    def of(self, tensor: Any) -> Selected | None:
        """What is known of a tensor, if it and its mask are still as they were."""
        known = self.found.get(id(tensor))
        if known is None or tensor._version or known.mask._version != known.version:
            return None
        return known

    def select(self, source: Any, mask: Any, found: Tensor) -> Tensor:
        """Remember what a mask of the first dims has selected."""
        fits = isinstance(source, Tensor) and mask.shape == source.shape[: mask.dim()]
        if not fits or mask.dim() == 0 or not isinstance(found, Tensor):
            return found
        whole = source
        if source.is_floating_point():
            shaped = mask.reshape(*mask.shape, *[1] * (source.dim() - mask.dim()))
            whole = torch.where(shaped, source, UNREAD)
        self.found[id(found)] = Selected(found, whole, mask, mask._version)
        return found

    def call(self, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
        """Whether a function of what was selected can be followed, and what it gives."""
        if not self.found:
            return False, None
        given = [self.of(leaf) for leaf in pytree.tree_leaves((args, kwargs))]
        own = [each for each in given if each is not None]
        if not own or any(each.mask is not own[0].mask for each in own):
            return False, None
        rule = next((rule for functions, rule in RULES if func in functions), None)
        if func in PUTS:
            return self.put(own[0], *args), None
        made = None if rule is None else rule(self, own[0], func, args, kwargs)
        return made is not None, made

    # -- each gives None where it cannot say

    def _wholes(self, tree: Any) -> Any:
        def whole(leaf: Any) -> Any:
            known = self.of(leaf)
            return leaf if known is None else known.whole

        return pytree.tree_map(whole, tree)

    def _fits(self, first: Selected, tree: Any) -> bool:
        """Whether other tensors have no dims but those of an item."""
        others = [t for t in pytree.tree_leaves(tree) if isinstance(t, Tensor)]
        return all(t.dim() <= first.inner for t in others if self.of(t) is None)

    def _again(self, first: Selected, whole: Tensor) -> Tensor:
        """The selection of a whole that was computed."""
        found = whole[first.mask]
        self.found[id(found)] = Selected(found, whole, first.mask, first.version)
        return found

    def each(self, first: Selected, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """A function of single items."""
        if not self._fits(first, (args, kwargs)):
            return None
        args, kwargs = self._wholes((args, kwargs))
        return self._again(first, func(*args, **kwargs))

    def rows(self, first: Selected, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """A function of the last dim, and of weights."""
        if not first.inner or self.of(args[0]) is None:
            return None
        if any(self.of(leaf) for leaf in pytree.tree_leaves((args[1:], kwargs))):
            return None
        args, kwargs = self._wholes((args, kwargs))
        return self._again(first, func(*args, **kwargs))

    def last(self, first: Selected, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """A function of a dim that is named from behind."""
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        is_inside = isinstance(dim, int) and -first.inner <= dim < 0
        return self.each(first, func, args, kwargs) if is_inside else None

    def sums(self, first: Selected, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """A sum or mean: of all, of all items, or inside of each."""
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if isinstance(dim, int) and dim < 0:
            return self.last(first, func, args, kwargs)
        if set(kwargs) - {"dim", "keepdim"} or len(args) > 2 or dim not in (None, 0):
            return None
        found = _reduced(first, func in MEANS, dim)
        return found[None] if kwargs.get("keepdim") and dim == 0 else found

    def products(self, first: Selected, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """Rows by a matrix."""
        if first.inner != 1 or args[1].dim() != 2:
            return None
        return self.rows(first, torch.matmul, args, kwargs)

    def norms(self, first: Selected, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """The Euclidean norm of all."""
        plain = {"p": ("fro", 2, None), "dim": (None,), "keepdim": (False,), "dtype": (None,)}
        if len(args) > 1 or any(value not in plain.get(key, ()) for key, value in kwargs.items()):
            return None
        found: Tensor = func(_kept(first))
        return found

    def spreads(self, first: Selected, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """The variance of all, or its root."""
        if len(args) > 1 or set(kwargs) - {"unbiased", "correction"}:
            return None
        less = kwargs.get("correction", int(kwargs.get("unbiased", True)))
        apart = (first.whole - _reduced(first, True, None)).square()
        total = torch.where(first.shaped(), apart, apart.new_zeros(())).sum()
        found = total / (_items(first) - less)
        if func not in DEVIATIONS:
            return found
        is_rooted = found > 0  # of numbers that are all alike, torch's gradient is zero
        return torch.where(is_rooted, torch.where(is_rooted, found, 1).sqrt(), found)

    def in_place(self, first: Selected, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """`x[mask] += 1`: what was selected goes along with another whole from now on."""
        target: Tensor = args[0]
        is_unseen = target.requires_grad and not torch.is_grad_enabled()  # by autograd
        if self.of(target) is None or is_unseen:
            return None
        made = self.each(first, IN_PLACE[func], args, kwargs)
        if made is None:
            return None
        found = self.found[id(made)]
        self.found[id(target)] = replace(found, traced=target, whole=found.whole.to(target.dtype))
        return target

    def losses(self, first: Selected, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """A loss of single items."""
        given = signature(func).bind(*args, **kwargs)
        given.apply_defaults()
        how, given.arguments["reduction"] = given.arguments["reduction"], "none"
        if how == "batchmean":
            return None
        found = self.each(first, func, given.args, given.kwargs)
        if found is None or how == "none":
            return found
        return _reduced(self.found[id(found)], how == "mean", None)

    def classes(self, first: Selected, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """A loss of rows of classes: those that are not selected are ignored."""
        given = signature(func).bind(*args, **kwargs)
        given.apply_defaults()
        scores, targets = (self.of(given.arguments[name]) for name in ("input", "target"))
        if scores is None or targets is None or (scores.inner, targets.inner) != (1, 0):
            return None
        last = scores.mask.dim() - 1
        ignored = given.arguments["ignore_index"]
        wanted = torch.where(targets.mask, targets.whole, ignored)
        given.arguments["input"] = scores.whole.flatten(0, last)
        given.arguments["target"] = wanted.flatten()
        found: Tensor = func(*given.args, **given.kwargs)
        if given.arguments["reduction"] != "none":
            return found
        return self._again(first, found.unflatten(0, first.mask.shape))

    def put(self, selected: Selected, into: Tensor, index: Any, value: Any) -> bool:
        """Whether what was selected can be put where its mask says: in a tensor like the whole."""
        is_back = index is selected.mask and self.of(value) is selected
        if not is_back or into.shape != selected.whole.shape:
            return False
        wanted = selected.whole.to(into.dtype)
        into.copy_(torch.where(selected.shaped(), wanted, into))
        return True


def _kept(selected: Selected) -> Tensor:
    """The whole, without what was not selected."""
    return torch.where(selected.shaped(), selected.whole, selected.whole.new_zeros(()))


def _items(selected: Selected) -> Tensor:
    """How many numbers were selected."""
    rows: Tensor = selected.mask.sum()
    return rows * math.prod(selected.whole.shape[selected.mask.dim() :])


def _reduced(selected: Selected, is_mean: bool, dim: int | None) -> Tensor:
    kept, mask = _kept(selected), selected.mask
    total = kept.sum() if dim is None else kept.sum(tuple(range(mask.dim())))
    if not is_mean:
        return total
    return total / (_items(selected) if dim is None else mask.sum())


Rule = Callable[[Selections, Selected, Any, Any, Any], Tensor | None]
RULES: tuple[tuple[Any, Rule], ...] = (
    (EACH, Selections.each),
    (ROWS, Selections.rows),
    (LAST, Selections.last),
    (SUMS, Selections.sums),
    (LOSSES, Selections.losses),
    (CLASSES, Selections.classes),
    (PRODUCTS, Selections.products),
    (NORMS, Selections.norms),
    (SPREADS, Selections.spreads),
    (set(IN_PLACE), Selections.in_place),
)
