"""What a mask selects, followed to where its number no longer matters.

`x[mask]` has as many items as the mask has ones: no fixed shape. But most of what follows gives the
same on the whole tensor, if the rest is left out in the end: `x[mask].square().mean()` is the sum
of the selected squares by their number. So the whole goes along with what was selected, through
operators that treat each item for itself, and a mean, a sum or a loss is taken of it, or it is put
back where it came from (`y[mask] = f(x[mask])`). What reads the selection otherwise finds a size
that depends on values, and is refused as such.

A mask may also be given by the positions of its ones, as in loops over experts:

    token, choice = torch.where(experts == 3)               places of one mask, dim by dim
    rows = x[token] * weights[token, choice, None]          what the mask selects, of x spread out
    found.index_add_(0, token, rows)                        sums over the other dims of the mask

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

from shardfold.capture.user_code import PLAIN

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
} | {F.relu, F.gelu, F.silu, F.softplus, F.logsigmoid, F.elu, F.leaky_relu, F.hardtanh, F.dropout}
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
LOCATES = {torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere}
SHAPES = {torch.reshape, Tensor.reshape, Tensor.view}
FLAT = SHAPES | {torch.flatten, Tensor.flatten}
SQUEEZES = {torch.squeeze, Tensor.squeeze}
UNBINDS = {torch.unbind, Tensor.unbind}
ADDS = {torch.index_add, Tensor.index_add, Tensor.index_add_}
PICKS = {torch.index_select, Tensor.index_select}
INSIDE = {torch.unsqueeze, Tensor.unsqueeze, torch.chunk, Tensor.chunk, torch.split, Tensor.split}
INSIDE |= {torch.unflatten, Tensor.unflatten}


COMPARES = ("eq", "ne", "lt", "le", "gt", "ge")
LOGICAL = ("and", "or", "xor", "invert")
SAME = {  # functions that give the same for the same, of which masks are made
    *(getattr(owner, name) for owner in (Tensor, torch) for name in COMPARES),
    *(getattr(Tensor, f"__{name}__") for name in (*COMPARES, *LOGICAL)),
    *(torch.logical_and, torch.logical_or, torch.logical_not, torch.isnan, torch.isfinite),
    *(torch.arange, torch.unsqueeze, Tensor.unsqueeze, Tensor.bool, Tensor.__getitem__),
}


@dataclass(frozen=True, slots=True)
class Selected:
    """What was selected, as traced; the whole; and the mask, of its first dims.

    Of `x[:, mask]` the dims that lead in x come after the mask's in the whole.
    """

    traced: Tensor
    whole: Tensor
    mask: Tensor
    version: int
    lead: int = 0

    @property
    def inner(self) -> int:
        """The dims of an item."""
        return int(self.whole.dim() - self.mask.dim() - self.lead)

    def shaped(self) -> Tensor:
        """The mask, for every number of the whole."""
        return _over(self.mask, self.whole)


@dataclass(frozen=True, slots=True)
class Places:
    """Where a mask has its ones: in one of its dims, or in all of them (a row for each one)."""

    traced: Tensor
    mask: Tensor
    dim: int | None
    version: int


class Selections:
    """All that masks have selected, and the places of their ones, by identity."""

    def __init__(self) -> None:
        self.found: dict[int, Selected] = {}
        self.places: dict[int, Places] = {}
        self.lifted: dict[int, tuple[Tensor, Tensor]] = {}  # with one more dim: it, the rows
        self.made: dict[
            Any, tuple[Tensor, int, Any]
        ] = {}  # by what made it: it, version, arguments
        self.twins: dict[int, tuple[Tensor, int, Tensor, int]] = {}  # made again: it, the first
        self.gate: Tensor | None = None  # whether what runs now runs at all
        self.gated: list[Tensor] = []  # the masks that are nothing where it does not

    def note(self, func: Any, args: Any, kwargs: Any, found: Any) -> None:
        """Remember that something is what was made before (`x[y != 0]`, then `z[y != 0]`)."""
        if func not in SAME or not isinstance(found, Tensor):
            return
        key = func, self._key((args, tuple(kwargs.items())))
        first, version, _ = self.made.setdefault(key, (found, found._version, args))
        if first is not found:
            self.twins[id(found)] = found, found._version, first, version

    def first(self, mask: Tensor) -> Tensor:
        """What was made first of all that are the same, if both are still as they were."""
        own, version, first, before = self.twins.get(id(mask), (None, 0, mask, 0))
        is_as_it_was = own is mask and (mask._version, first._version) == (version, before)
        return first if is_as_it_was else mask

    def _key(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            first = self.first(value)
            return id(first), first._version
        if isinstance(value, tuple | list):
            return tuple(map(self._key, value))
        if isinstance(value, slice):
            return "slice", self._key((value.start, value.stop, value.step))
        is_plain = isinstance(value, PLAIN) or value is Ellipsis
        return (type(value), value) if is_plain else object()  # which is nothing else

    def of(self, tensor: Any) -> Selected | None:
        """What is known of a tensor, if it and its mask are still as they were."""
        known = self.found.get(id(tensor))
        if known is None or tensor._version or known.mask._version != known.version:
            return None
        return known

    def select(self, source: Any, mask: Any, found: Tensor, lead: int = 0) -> Tensor:
        """Remember what a mask has selected, of the first dims or of those after some others."""
        fits = isinstance(source, Tensor) and mask.shape == source.shape[lead : lead + mask.dim()]
        if not fits or mask.dim() == 0 or not isinstance(found, Tensor):
            return found
        mask, whole = self.first(mask), _mask_first(source, mask, lead)
        if source.is_floating_point():
            whole = torch.where(_over(mask, whole), whole, UNREAD)
        self.found[id(found)] = Selected(found, whole, mask, mask._version, lead)
        return found

    def locate(self, mask: Any, found: Any) -> None:
        """Remember the places that `nonzero` or `where` has found."""
        if not isinstance(mask, Tensor) or not mask.dim():
            return
        mask = self.first(mask) if mask.dtype == torch.bool else mask != 0
        if self.gate is not None:
            mask = mask & self.gate
            self.gated.append(mask)
        if isinstance(found, Tensor):
            self._placed(found, mask, None)
        for dim, each in enumerate(found if isinstance(found, tuple) else ()):
            self._placed(each, mask, dim)

    def _placed(self, traced: Tensor, mask: Tensor, dim: int | None) -> Tensor:
        self.places[id(traced)] = Places(traced, mask, dim, mask._version)
        return traced

    def at(self, tensor: Any) -> Places | None:
        """Of which mask a tensor is the places, if it and the mask are still as they were."""
        known = self.places.get(id(tensor))
        if known is None or tensor._version or known.mask._version != known.version:
            return None
        return known

    def mask_of_size(self, symbol: Any) -> Tensor | None:
        """The mask whose ones a size counts."""
        held: list[Places | Selected] = [*self.places.values(), *self.found.values()]
        with torch._C.DisableTorchFunction():  # forward itself reads none of them here
            for each in held:
                size = each.traced.shape[0] if each.traced.dim() else None
                if isinstance(size, torch.SymInt) and size.node.expr == symbol:
                    return each.mask
        return None

    def mask_of_put(self, func: Any, args: Any) -> Tensor | None:
        """The mask by which a function adds to a tensor, or writes to it."""
        if func not in ADDS | PUTS:
            return None
        index = args[2] if func in ADDS and len(args) > 2 else args[1]
        first = index[0] if isinstance(index, tuple) else index
        places = self.at(first)
        if places is not None:
            return places.mask
        is_mask = isinstance(first, Tensor) and first.dtype == torch.bool
        return self.first(first) if is_mask else None

    def call(self, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
        """Whether a function of what was selected can be followed, and what it gives."""
        leaves = pytree.tree_leaves((args, kwargs)) if self.places else ()
        if any(self.at(leaf) is not None for leaf in leaves):
            made = self.by_places(func, args, kwargs)
            return made is not None, None if made is NOTHING else made
        if self.lifted and (rows := self.lowered(func, args, kwargs)) is not None:
            return True, rows
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

    def by_places(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A function that is given places: what it reads, writes or adds there."""
        first = self.at(args[0])
        if first is not None:
            return self._dims_of(first, func, args, kwargs)
        if func is Tensor.__getitem__:
            return self.read(*args)
        if func is Tensor.__setitem__:
            return self.write(*args)
        if func in PICKS and not kwargs and args[1] == 0:
            return self.read(args[0], args[2])
        return self.add(func, *args, **kwargs) if func in ADDS else None

    def _dims_of(self, places: Places, func: Any, args: Any, kwargs: Any) -> Any:
        """Of places with a row for each, those in one dim."""
        mask, given = places.mask, (*args[1:], *kwargs.values())
        if func in FLAT:
            is_flat = given == ((-1,) if func in SHAPES else ()) and mask.dim() == 1
            return self._placed(func(*args, **kwargs), mask, 0) if is_flat else None
        if places.dim is not None:
            return None
        if func in SQUEEZES and mask.dim() == 1 and given in ((1,), (-1,)):
            return self._placed(func(*args, **kwargs), mask, 0)
        if func in UNBINDS and given in ((1,), (-1,)):
            columns = enumerate(func(*args, **kwargs))
            return tuple(self._placed(each, mask, dim) for dim, each in columns)
        index = given[0] if func is Tensor.__getitem__ else None
        if isinstance(index, tuple) and len(index) == 2:
            rows, dim = index
            if isinstance(rows, slice) and rows == slice(None) and isinstance(dim, int):
                return self._placed(func(*args), mask, dim % mask.dim())
        return None

    def _indices(self, index: Any) -> tuple[Tensor, list[int], tuple[Any, ...]] | None:
        """The mask of an index by places, its dims in their order, and what the index adds."""
        items = index if isinstance(index, tuple) else (index,)
        places = [self.at(each) for each in items]
        count = next((k for k, each in enumerate(places) if each is None), len(items))
        own = [each for each in places[:count] if each is not None]
        dims = [each.dim for each in own if each.dim is not None]
        is_known = bool(own) and len({*dims}) == count and all(e.mask is own[0].mask for e in own)
        if not is_known or any(isinstance(each, Tensor) for each in items[count:]):
            return None
        return own[0].mask, dims, items[count:]

    def read(self, source: Any, index: Any) -> Tensor | None:
        """`x[places]`: of a mask of several dims, x is spread over those that it lacks."""
        is_lifted = isinstance(index, tuple) and len(index) == 2 and index[0] is None
        found = self._indices(index[1] if is_lifted else index)
        if found is None or self.of(source) is not None:
            return None
        mask, dims, rest = found
        if any(n < mask.shape[d] for n, d in zip(source.shape, dims, strict=False)):
            return None
        whole = _spread(source, mask, dims)[(slice(None),) * mask.dim() + rest]
        if source.is_floating_point():
            whole = torch.where(_over(mask, whole), whole, UNREAD)
        made = self._selected(whole, mask)
        if not is_lifted:
            return made
        lifted = made[None]  # x[None, places], to be reshaped to rows again
        self.lifted[id(lifted)] = lifted, made
        return lifted

    def lowered(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """The rows of what was read with one more dim before them."""
        known = self.lifted.get(id(args[0])) if args else None
        if known is None or known[0]._version or kwargs:
            return None
        sizes = args[1:]
        is_rows = (func in SHAPES and sizes == (-1, *known[1].shape[1:])) or (
            func in SQUEEZES and sizes == (0,)
        )
        return known[1] if is_rows else None

    def _selected(self, whole: Tensor, mask: Tensor) -> Tensor:
        found = whole[mask]
        self.found[id(found)] = Selected(found, whole, mask, mask._version)
        return found

    def write(self, into: Tensor, index: Any, value: Any) -> Any:
        """`y[places] = ...`: of two in one row, the last is left, as torch leaves it."""
        found = self._indices(index)
        if found is None or found[2] or self.of(into) is not None:
            return None
        mask, dims, _ = found
        shape = (*(mask.shape[d] for d in dims), *into.shape[len(dims) :])
        whole = self._as_whole(value, mask, into.shape[len(dims) :])
        if whole is None or tuple(into.shape) != shape or dims != sorted(dims):
            return None
        made, over = into, _over(mask, whole)
        left = [d for d in range(mask.dim()) if d not in dims]
        for turn in _turns(mask, left):
            made = torch.where(over[turn], whole[turn].to(into.dtype), made)
        into.copy_(made)
        return NOTHING

    def _as_whole(self, value: Any, mask: Tensor, inner: Any) -> Tensor | None:
        """What is written, for every place of a mask."""
        known = self.of(value)
        if known is not None:
            is_alike = known.mask is mask and known.whole.shape[mask.dim() :] == inner
            return known.whole if is_alike else None
        if isinstance(value, Tensor) and value.dim() > len(inner):
            return None
        made = value if isinstance(value, Tensor) else torch.tensor(value, device=mask.device)
        return made.expand(*mask.shape, *inner)

    def add(
        self, func: Any, into: Tensor, dim: int, index: Any, source: Any, *, alpha: Any = 1
    ) -> Tensor | None:
        """`index_add`: what has one place in a dim is summed up."""
        places, known = self.at(index), self.of(source)
        if places is None or known is None or known.mask is not places.mask or dim != 0:
            return None
        inner, size = known.whole.shape[known.mask.dim() :], known.mask.shape[places.dim or 0]
        if places.dim is None or into.shape[1:] != inner or into.shape[0] < size:
            return None
        total = _kept(known)
        others = [d for d in range(known.mask.dim()) if d != places.dim]
        total = total.sum(others) if others else total
        more = into.shape[0] - size
        total = F.pad(total, (*[0, 0] * len(inner), 0, more)) if more else total
        return into.add_(total, alpha=alpha) if func is Tensor.index_add_ else into + alpha * total

    def inside(self, first: Selected, func: Any, args: Any, kwargs: Any) -> Any:
        """A view of each item, by a dim that is named from behind."""
        if first.lead:
            return None
        is_new = func in (torch.unsqueeze, Tensor.unsqueeze)
        dim = kwargs.get("dim", args[1 if is_new or len(args) < 3 else 2])
        is_inside = isinstance(dim, int) and -first.inner - is_new <= dim < 0
        if not is_inside or self.of(args[0]) is None:
            return None
        found = func(first.whole, *args[1:], **kwargs)
        if isinstance(found, Tensor):
            return self._again(first, found)
        return tuple(self._again(first, each) for each in found)

    def items(self, first: Selected, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """`rows[:, None]`, `rows[..., :3]`: within each item."""
        source, index = args
        items = index if isinstance(index, tuple) else (index,)
        behind = items[1:]
        is_plain = all(each is None or isinstance(each, int | slice) for each in behind)
        reads = sum(each is not None for each in behind)
        if self.of(source) is not first or not is_plain or reads > first.inner or first.lead:
            return None
        if items[0] is Ellipsis:
            return self._again(first, first.whole[index])
        if not isinstance(items[0], slice) or items[0] != slice(None):
            return None
        return self._again(first, first.whole[(slice(None),) * first.mask.dim() + behind])

    def _wholes(self, tree: Any) -> Any:
        def whole(leaf: Any) -> Any:
            known = self.of(leaf)
            return leaf if known is None else known.whole

        return pytree.tree_map(whole, tree)

    def _fits(self, first: Selected, tree: Any) -> bool:
        """Whether items have as many dims, and other tensors no dims but those of an item."""
        leaves = [t for t in pytree.tree_leaves(tree) if isinstance(t, Tensor)]
        items = {(known.inner, known.lead) for t in leaves if (known := self.of(t)) is not None}
        return len(items) == 1 and all(t.dim() <= first.inner for t in leaves if self.of(t) is None)

    def _again(self, first: Selected, whole: Tensor) -> Tensor:
        """The selection of a whole that was computed."""
        found = whole[first.mask]
        found = found.movedim(0, first.lead) if first.lead else found
        self.found[id(found)] = Selected(found, whole, first.mask, first.version, first.lead)
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
        is_all = dim is None
        if not is_all and dim not in (first.lead, -1 - first.inner):
            return self.last(first, func, args, kwargs)
        if set(kwargs) - {"dim", "keepdim"} or len(args) > 2:
            return None
        found = _reduced(first, func in MEANS, is_all)
        return found if is_all or not kwargs.get("keepdim") else found.unsqueeze(first.lead)

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
        apart = (first.whole - _reduced(first, True, True)).square()
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
        return _reduced(self.found[id(found)], how == "mean", True)

    def classes(self, first: Selected, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """A loss of rows of classes: those that are not selected are ignored."""
        given = signature(func).bind(*args, **kwargs)
        given.apply_defaults()
        scores, targets = (self.of(given.arguments[name]) for name in ("input", "target"))
        if scores is None or targets is None or (scores.inner, targets.inner) != (1, 0):
            return None
        if scores.lead or targets.lead:
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
        at = (index, 0) if isinstance(index, Tensor) else masked_dims(into, index)
        if at is None or self.of(value) is not selected:
            return False
        mask, lead = self.first(at[0]), at[1]
        if mask is not selected.mask or lead != selected.lead:
            return False
        into = _mask_first(into, mask, lead)
        if into.shape != selected.whole.shape:
            return False
        into.copy_(torch.where(selected.shaped(), selected.whole.to(into.dtype), into))
        return True


def masked_dims(source: Any, index: Any) -> tuple[Tensor, int] | None:
    """The mask of `x[:, mask]`, and how many whole dims lead."""
    if not isinstance(index, tuple) or not isinstance(source, Tensor):
        return None
    masks = [k for k, each in enumerate(index) if isinstance(each, Tensor)]
    others = [each for each in index if not isinstance(each, Tensor)]
    hides = [k for k, each in enumerate(index) if each is Ellipsis]
    slices = [each for each in others if isinstance(each, slice) and each == slice(None)]
    if len(masks) != 1 or len(hides) > 1 or len(slices) + len(hides) != len(others):
        return None
    (at,) = masks
    mask: Tensor = index[at]
    hidden = source.dim() - mask.dim() - len(others)  # dims of the ellipsis, but one
    lead = at + (hidden if hides and hides[0] < at else 0)
    return (mask, lead) if mask.dtype == torch.bool else None


def _mask_first(source: Tensor, mask: Tensor, lead: int) -> Tensor:
    """A tensor with the dims of a mask before those that lead."""
    if not lead:
        return source
    return source.movedim(tuple(range(lead, lead + mask.dim())), tuple(range(mask.dim())))


def _kept(selected: Selected) -> Tensor:
    """The whole, without what was not selected."""
    return torch.where(selected.shaped(), selected.whole, selected.whole.new_zeros(()))


def _items(selected: Selected) -> Tensor:
    """How many numbers were selected."""
    rows: Tensor = selected.mask.sum()
    return rows * math.prod(selected.whole.shape[selected.mask.dim() :])


def _reduced(selected: Selected, is_mean: bool, is_all: bool) -> Tensor:
    """The sum or mean of all numbers, or of all items."""
    kept, mask = _kept(selected), selected.mask
    total = kept.sum() if is_all else kept.sum(tuple(range(mask.dim())))
    if not is_mean:
        return total
    return total / (_items(selected) if is_all else mask.sum())


NOTHING = object()  # what a write gives


def _over(mask: Tensor, whole: Tensor) -> Tensor:
    """A mask, for every number of a whole."""
    return mask.reshape(*mask.shape, *[1] * (whole.dim() - mask.dim()))


def _spread(source: Tensor, mask: Tensor, dims: list[int]) -> Tensor:
    """A tensor whose first dims are some of a mask's, over all of them."""
    for place, dim in enumerate(dims):
        if source.shape[place] != mask.shape[dim]:
            source = source.narrow(place, 0, mask.shape[dim])
    order = sorted(range(len(dims)), key=dims.__getitem__)
    source = source.permute(*order, *range(len(dims), source.dim()))
    for dim in range(mask.dim()):
        source = source if dim in dims else source.unsqueeze(dim)
    return source.expand(*mask.shape, *source.shape[mask.dim() :])


def _turns(mask: Tensor, dims: list[int]) -> list[tuple[Any, ...]]:
    """Indices of the parts of a mask in which some dims have one place."""
    found: list[tuple[Any, ...]] = [()]
    for dim in range(mask.dim()):
        own = range(mask.shape[dim]) if dim in dims else (slice(None),)
        found = [(*before, each) for before in found for each in own]
    return found


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
    (INSIDE, Selections.inside),
    ({Tensor.__getitem__}, Selections.items),
)
