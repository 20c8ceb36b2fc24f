"""Options that several commands take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Function = TypeVar("Function", bound=Callable[..., Any])
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


def output_options(command: Function) -> Function:
    """Add the options that say what is printed."""
    command = click.option("--all", "everything", is_flag=True, help="Show the small rows too.")(
        command
    )
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")(command)
