"""`shardfold plan`: from a model and a cluster to the best plan."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from shardfold.cli.options import checked, output_options, planning_options, size_options, taken
from shardfold.errors import PlanError


@click.command()
@click.argument("model")
@click.option("--cluster", required=True, help="Such as 8xa100, 4x8xh100 or lab.toml.")
@size_options
@planning_options
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
    save: str | None,
    save_problem: str | None,
    as_json: bool,
    everything: bool,
    **options: Any,
) -> None:
    r"""Find the best way to train MODEL on a cluster, with a lower bound on its cost.

    MODEL is a name of the zoo (see shardfold models); file.py:function or
    package.module:function, a function that returns (module, args, kwargs), an nn.Module and an
    example batch for it; or hf:config.json, a Hugging Face configuration.

    \b
    shardfold plan gpt2 --cluster 8xa100 --dtype bf16 --save plan.json
    shardfold plan train.py:make --cluster 4x8xh100 --batch 512
    shardfold plan gpt2 --cluster 2xa100 --batch 256 --micro-batches search
    """
    from shardfold.cli.model import planner_for
    from shardfold.cli.printing import emit

    for file in filter(None, (save, save_problem)):
        check_writable(Path(file))
    asked = taken(options)
    target = checked(cluster, asked)
    with planner_for(model, options, cluster=target, **asked) as planner:
        found = planner.plan(save_problem=save_problem)
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
