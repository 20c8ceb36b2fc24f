"""Slices of a batch: the micro-batches of a step.

A plan names the inputs that are cut and the dim of each, by their places in the batch: `0` is the
first argument, `input_ids` an argument by name, `batch.image` what lies within one. All else is
whole in every part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardfold.errors import InputError, PlanError

Batch = tuple[tuple[Any, ...], dict[str, Any]]
Cuts = Mapping[str, int]  # the place of each input that is cut, and the dim


def cut(args: Sequence[Any], kwargs: Mapping[str, Any], cuts: Cuts, parts: int) -> list[Batch]:
    """The parts of a batch, in the order in which the passes take them."""
    return [_part(args, kwargs, cuts, parts, number) for number in range(parts)]


def first_part(args: Sequence[Any], kwargs: Mapping[str, Any], cuts: Cuts, parts: int) -> Batch:
    """The first of the parts: an example of all."""
    return _part(args, kwargs, cuts, parts, 0)


def _part(
    args: Sequence[Any], kwargs: Mapping[str, Any], cuts: Cuts, parts: int, number: int
) -> Batch:
    def piece(place: str, value: Any) -> Any:
        return _slice(place, value, cuts[place], parts, number) if place in cuts else value

    if parts == 1:
        return tuple(args), dict(kwargs)
    positional = tuple(mapped(value, piece, str(k)) for k, value in enumerate(args))
    return positional, {name: mapped(value, piece, name) for name, value in kwargs.items()}


def mapped(value: Any, change: Callable[[str, Any], Any], place: str = "") -> Any:
    """The same structure with every leaf changed, given its place."""
    before = f"{place}." if place else ""
    if isinstance(value, Mapping):
        return {key: mapped(item, change, f"{before}{key}") for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [mapped(item, change, f"{before}{k}") for k, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return change(place, value)


def scaled(batch: Any, factor: float) -> Any:
    """An example batch with the leading dim of its first tensor scaled, in all that have it."""
    sizes = list[int]()
    mapped(batch, lambda _, leaf: sizes.extend(_shape(leaf)[:1]))
    if factor == 1.0 or not sizes:
        return batch
    size, wanted = sizes[0], sizes[0] * factor
    if wanted != int(wanted):
        raise PlanError(f"A batch of {size} cannot be scaled by {factor:g}.")

    def resized(_: str, leaf: Any) -> Any:
        shape = _shape(leaf)
        return leaf.new_empty((int(wanted), *shape[1:])) if shape[:1] == (size,) else leaf

    return mapped(batch, resized)


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(leaf.shape) if hasattr(leaf, "new_empty") else ()


def _slice(place: str, value: Any, dim: int, parts: int, number: int) -> Any:
    shape = tuple(getattr(value, "shape", ()))
    if dim >= len(shape):
        raise InputError(f"The input {place} has shape {shape}: it has no dim {dim} to cut.")
    if shape[dim] % parts:
        raise InputError(
            f"The input {place} has {shape[dim]} samples (dim {dim} of {shape}), which cannot be "
            f"cut into {parts} equal micro-batches. Try a number that divides {shape[dim]}."
        )
    size = shape[dim] // parts
    return value[(slice(None),) * dim + (slice(number * size, (number + 1) * size),)]
