"""Options that several commands take."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

Function = TypeVar("Function", bound=Callable[..., Any])
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
DTYPES = ("fp32", "bf16", "fp16", "fp64")


def size_options(command: Function) -> Function:
    """Add the options that resize a model."""
    for name, what in reversed(
        (
            ("batch", "Samples in the whole batch, over all devices."),
            ("seq", "Tokens in a sample."),
            ("layers", "Layers (zoo stacks and hf: configurations)."),
            ("hidden", "Width of the layers (zoo stacks)."),
        )
    ):
        command = click.option(f"--{name}", type=click.IntRange(min=1), help=what)(command)
    return command


def pin_option(command: Function) -> Function:
    """Add the option that fixes splits."""
    return click.option(
        "--pin",
        "pins",
        multiple=True,
        metavar="PATTERN=SPLIT",
        help="Fix a split, such as 'layers.*.mlp.up_proj=out/8'. May be repeated.",
    )(command)


def profile_option(command: Function) -> Function:
    """Add the option that prices by measurement."""
    return click.option(
        "--profile",
        type=click.Path(dir_okay=False),
        metavar="FILE.json",
        help="Price by what shardfold calibrate measured.",
    )(command)


def output_options(command: Function) -> Function:
    """Add the options that say what is printed."""
    command = click.option("--all", "everything", is_flag=True, help="Show the small rows too.")(
        command
    )
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")(command)


def micro_batches(context: Any, option: Any, text: str) -> int | str:
    """A number of micro-batches, or a word for how it is found."""
    if text in ("auto", "search"):
        return text
    if not text.isdecimal() or int(text) < 1:
        raise click.BadParameter(
            f"{text!r} is no number of micro-batches; write auto, search or 4."
        )
    return int(text)


def size_in_bytes(text: str) -> float:
    """A size as the user writes it.

    >>> size_in_bytes("1500"), size_in_bytes("64MiB"), size_in_bytes("2.5G")
    (1500.0, 67108864.0, 2684354560.0)
    """
    spelled = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = spelled[-1:] if spelled[-1:] in "KMGT" else ""
    try:
        found = float(spelled.removesuffix(unit)) * UNITS[unit]
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not a size; write 1500, 64MiB or 2.5G.") from error
    if not 0 < found < math.inf:
        raise click.BadParameter(f"A size must be positive and finite, got {text!r}.")
    return found
