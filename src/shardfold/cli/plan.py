"""`shardfold plan`: from a model and a cluster to the best plan."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardfold.cli.options import (
    DTYPES,
    micro_batches,
    output_options,
    pin_option,
    profile_option,
    size_in_bytes,
    size_options,
)
from shardfold.errors import PlanError

if TYPE_CHECKING:
    from shardfold.planner.mesh_search import Recompute
    from shardfold.planner.micro_batches import MicroBatches


@click.command()
@click.argument("model")
@click.option("--cluster", required=True, help="Such as 8xa100, 4x8xh100 or lab.toml.")
@size_options
@click.option("--dtype", type=click.Choice(DTYPES), help="Of weights and activations.")
@click.option("--optimizer", default="adamw", show_default=True, help="sgd, momentum, adam, adamw.")
@click.option("--mesh", help="Such as 8x4. Every mesh is tried if left out.")
@click.option("--cost", default="roofline", show_default=True, help="roofline or paper.")
@profile_option
@click.option(
    "--memory-limit",
    type=size_in_bytes,
    metavar="SIZE",
    help="Per device, such as 60GiB. The device's memory less a tenth if left out.",
)
@click.option(
    "--recompute",
    type=click.Choice(("auto", "never", "always")),
    default="auto",
    show_default=True,
    help="Make activations of repeated blocks again in backward: where it pays, never, always.",
)
@click.option(
    "--micro-batches",
    default="auto",
    show_default=True,
    metavar="auto|search|N",
    callback=micro_batches,
    help="Equal parts in which a step takes its batch: more than one only where nothing fits "
    "otherwise (auto), the fastest number where memory binds (search), or N.",
)
@pin_option
@click.option("--fold/--no-fold", default=True, help="Trace repeated blocks once, or each.")
@click.option("--save", type=click.Path(dir_okay=False), help="Write the plan to this file.")
@click.option(
    "--save-problem",
    type=click.Path(dir_okay=False),
    metavar="FILE.npz",
    help="Write the search problem, for shardfold solve.",
)
@output_options
def plan(
    model: str,
    cluster: str,
    dtype: str | None,
    optimizer: str,
    mesh: str | None,
    cost: str,
    profile: str | None,
    memory_limit: float | None,
    recompute: Recompute,
    micro_batches: MicroBatches,
    pins: tuple[str, ...],
    fold: bool,
    save: str | None,
    save_problem: str | None,
    as_json: bool,
    everything: bool,
    **sizes: int | None,
) -> None:
    r"""Find the best way to train MODEL on a cluster, and prove that it is.

    MODEL is a name of the zoo (see shardfold models); file.py:function or
    package.module:function, a function that returns (module, args, kwargs), an nn.Module and an
    example batch for it; or hf:config.json, a Hugging Face configuration.

    \b
    shardfold plan gpt2 --cluster 8xa100 --dtype bf16 --save plan.json
    shardfold plan train.py:make --cluster 4x8xh100 --batch 512
    shardfold plan gpt2 --cluster 2xa100 --batch 256 --micro-batches search
    """
    from shardfold.api import plan as find_plan
    from shardfold.cli.model import load_model
    from shardfold.cli.printing import emit, progress, quiet
    from shardfold.cluster import mesh_from_text, parse
    from shardfold.costs import optimizer_named, pricing_named
    from shardfold.costs.profile.profile import load as load_profile
    from shardfold.strategies.pins import parse_pins

    # What is cheap to check is checked before the work begins.
    for file in filter(None, (save, save_problem)):
        check_writable(Path(file))
    target = parse(cluster)
    fixed = None if mesh is None else mesh_from_text(mesh, target)
    pricing_named(cost)
    measured = None if profile is None else load_profile(profile)
    optimizer_named(optimizer)
    parse_pins(pins)
    with progress() as watch:
        with quiet():
            example = load_model(model, sizes)
        with quiet(mute=True):
            found = find_plan(
                example.module,
                example.args,
                example.kwargs,
                cluster=target,
                dtype=dtype,
                optimizer=optimizer,
                mesh=fixed,
                cost=cost,
                profile=measured,
                memory_limit=memory_limit,
                recompute=recompute,
                micro_batches=micro_batches,
                pins=pins,
                rules=example.rules,
                fold=fold,
                save_problem=save_problem,
                watch=watch,
            )
    if save is not None:
        found.save(save)
    emit(found, as_json=as_json, everything=everything, model=model, saved=save)


def check_writable(target: Path) -> None:
    """Refuse a file that could not be written after the work is done."""
    folder = target.parent
    if not folder.is_dir():
        raise PlanError(f"Cannot write {target}: the folder {folder} does not exist.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PlanError(f"Cannot write {target}: no permission to write in {folder}.")
    if target.is_dir():
        raise PlanError(f"Cannot write {target}: it is a folder.")
