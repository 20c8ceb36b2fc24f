"""Options that several commands take."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

if TYPE_CHECKING:
    from shardfold.cluster import Cluster
    from shardfold.planner.options import Options

Function = TypeVar("Function", bound=Callable[..., Any])


def batch_size(context: Any, option: Any, text: str | None) -> int | str | None:
    """A number of samples, or a word for how it is found."""
    if text is None or text in ("max", "best"):
        return text
    if not text.isdecimal() or int(text) < 1:
        raise click.BadParameter(f"{text!r} is no batch; write a whole number, max or best.")
    return int(text)


def searched_size_options(command: Function) -> Function:
    """As `size_options`, with a batch that may be searched."""
    what = "Samples in the whole batch; max: the most that fit; best: those with the best rate."
    for option in reversed(_sizes(("seq", "layers", "hidden"))):
        command = option(command)
    return click.option("--batch", metavar="N|max|best", callback=batch_size, help=what)(command)


def size_options(command: Function) -> Function:
    """Add the options that resize a model."""
    for option in reversed(_sizes(tuple(SIZES))):
        command = option(command)
    return command


SIZES = {
    "batch": "Samples in the whole batch, over all devices.",
    "seq": "Tokens in a sample.",
    "layers": "Layers (zoo stacks and hf: configurations).",
    "hidden": "Width of the layers (zoo stacks).",
}


def _sizes(names: tuple[str, ...]) -> list[Callable[[Function], Function]]:
    return [
        click.option(f"--{name}", type=click.IntRange(min=1), help=SIZES[name]) for name in names
    ]


def planning_options(command: Function) -> Function:
    """Add the options of planning, as `Options` has them; what is not given is None."""
    for option in reversed(PLANNING.values()):
        command = option(command)
    return command


def profile_option(command: Function) -> Function:
    """Add the option that prices by measurement."""
    return click.option(
        "--profile",
        type=click.Path(dir_okay=False),
        metavar="FILE.json",
        help="Price by what shardfold calibrate measured.",
    )(command)


def taken(options: dict[str, Any]) -> Options:
    """The options of planning that were given, taken out of a command's."""
    found = {name: options.pop(name) for name in PLANNING}
    given = {name: value for name, value in found.items() if value not in (None, ())}
    return cast("Options", given)


def checked(cluster: str, options: Options) -> Cluster:
    """The cluster that was named: what is cheap to check is checked before the work begins."""
    from shardfold.cluster import mesh_from_text, parse
    from shardfold.planner.options import Request

    target, request = parse(cluster), Request().changed(options)
    if request.mesh is not None:
        mesh_from_text(request.mesh, target)
    return target


def output_options(command: Function) -> Function:
    """Add the options that say what is printed."""
    command = click.option("--all", "everything", is_flag=True, help="Show the small rows too.")(
        command
    )
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")(command)


def micro_batches(context: Any, option: Any, text: str | None) -> int | str | None:
    """A number of micro-batches, or a word for how it is found."""
    if text is None or text in ("auto", "search"):
        return text
    if not text.isdecimal() or int(text) < 1:
        raise click.BadParameter(
            f"{text!r} is no number of micro-batches; write auto, search or 4."
        )
    return int(text)


def pipeline_stages(context: Any, option: Any, text: str | None) -> int | str | None:
    """A number of pipeline stages, the devices of each, or a word for how it is found."""
    if text is None or text in ("auto", "off"):
        return text
    parts = text.split("+")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise click.BadParameter(f"{text!r} is no number of stages; write auto, off, 4 or 1+3.")
    return text if len(parts) > 1 else int(text)


def known_precision(context: Any, option: Any, text: str | None) -> str | None:
    """A precision that is known; the same words as in Python."""
    from shardfold.errors import InputError
    from shardfold.graph.precision import precision_named

    try:
        return None if text is None else precision_named(text).name
    except InputError as error:
        raise click.BadParameter(str(error)) from error


def size_in_bytes(text: str) -> float:
    """A size as the user writes it; the same texts as in Python."""
    from shardfold.errors import InputError
    from shardfold.planner.options import bytes_in

    try:
        return bytes_in(text)
    except InputError as error:
        raise click.BadParameter(str(error)) from error


PLANNING: dict[str, Callable[[Any], Any]] = {
    "precision": click.option(
        "--precision",
        "--dtype",
        "precision",
        metavar="bf16-mixed|bf16|tf32|fp32|...",
        callback=known_precision,
        help="bf16-mixed: float32 master weights and moments, computes in bf16, reduces in float32 "
        "(bf16-mixed/bf16: in bf16); fp8-mixed: with linear layers in float8, priced and not run; "
        "bf16, fp16, fp32, fp64: all in one; tf32: products in TF32.",
    ),
    "compile": click.option(
        "--compile/--eager",
        "compile",
        default=None,
        help="Price the step under torch.compile, and run it compiled.  [default: eager]",
    ),
    "optimizer": click.option(
        "--optimizer", help="sgd, momentum, adam or adamw.  [default: adamw]"
    ),
    "mesh": click.option("--mesh", help="Such as 8x4. Every mesh is tried if left out."),
    "cost": click.option("--cost", help="kernels, roofline or paper.  [default: kernels]"),
    "profile": profile_option,
    "host_pace": click.option(
        "--host-pace",
        type=float,
        metavar="TIMES",
        help="How many times slower than usual the host is that launches the kernels; shardfold "
        "calibrate --host measures it.  [default: 1]",
    ),
    "memory_limit": click.option(
        "--memory-limit",
        type=size_in_bytes,
        metavar="SIZE",
        help="Per device, such as 60GiB. The device's memory less a tenth if left out.",
    ),
    "recompute": click.option(
        "--recompute",
        type=click.Choice(("auto", "never", "always", "attention", "products")),
        help="Activation checkpointing in repeated blocks: of as few operators as the limit asks "
        "for (auto), never, of everything (always), of attention's core as Megatron-LM does it, "
        "or of all but attention and every second product as torchtitan does it (products).",
    ),
    "micro_batches": click.option(
        "--micro-batches",
        metavar="auto|search|N",
        callback=micro_batches,
        help="Equal parts of the batch whose gradients are added up: more than one only where "
        "nothing fits otherwise (auto), the fastest number where memory binds (search), or N.",
    ),
    "pipeline": click.option(
        "--pipeline",
        metavar="auto|off|N|A+B",
        callback=pipeline_stages,
        help="Pipeline stages: where they take 5% off the step or nothing fits without (auto, the "
        "default), none (off), N, or stages of A, B, ... devices.",
    ),
    "prefer": click.option(
        "--prefer",
        type=click.Choice(("simple", "speed", "memory")),
        help="Among steps within 0.5% of the best: fewer kinds of splits, then less memory "
        "(simple, the default), the fastest, or the least memory.",
    ),
    "pins": click.option(
        "--pin",
        "pins",
        multiple=True,
        metavar="PATTERN=SPLIT",
        help="Fix a split, such as 'layers.*.mlp.up_proj=out/8'. May be repeated.",
    ),
    "imbalance": click.option(
        "--imbalance",
        type=float,
        metavar="TIMES",
        help="Of split experts: how many times the even share of rows the fullest device gets.  "
        "[default: 1]",
    ),
    "fold": click.option(
        "--fold/--no-fold",
        default=None,
        help="Trace repeated blocks once (the default), or each of them.",
    ),
}
