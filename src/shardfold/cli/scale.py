"""`shardfold scale`: a model on ever more nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from shardfold.cli.options import planning_options, size_options, taken
from shardfold.errors import InputError


@click.command()
@click.argument("model")
@click.option("--cluster", required=True, help="Hardware such as h100 or 4xa100, or lab.toml.")
@click.option("--nodes", default="1,2,4,8,16", show_default=True, help="Numbers of nodes.")
@click.option("--per-node", is_flag=True, help="The batch is of one node, and grows with them.")
@click.option("--for", "stack", metavar="STACK", help="As this stack runs it, such as torchtitan.")
@click.option("--price", type=click.FloatRange(min=0), help="Of an hour of one device.")
@size_options
@planning_options
@click.option("--save", type=click.Path(dir_okay=False), help="Draw it: FILE.svg or FILE.html.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def scale(
    model: str,
    cluster: str,
    nodes: str,
    per_node: bool,
    stack: str | None,
    price: float | None,
    save: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    r"""Say how MODEL trains on ever more nodes: step, rate, efficiency, memory, cost.

    The batch stays the same whole batch, or with --per-node grows with the nodes.

    \b
    shardfold scale gpt2 --cluster h100 --nodes 1,2,4 --dtype bf16 --batch 512
    shardfold scale llama3-8b --cluster h100 --for torchtitan --save scale.svg
    """
    from shardfold.cli.model import planner_for
    from shardfold.cli.plan import check_writable
    from shardfold.cli.stacks import check_free, show, write_whole
    from shardfold.export.targets import target_named
    from shardfold.planner.scaling import of_nodes
    from shardfold.report.scaling import scaling_figure, scaling_lines, scaling_page

    if save is not None:
        check_writable(Path(save))
        if Path(save).suffix not in (".svg", ".html"):
            raise InputError(f"Cannot draw {save}: its name must end in .svg or .html.")
    asked = taken(options)
    if stack is not None:
        check_free(asked)
        target_named(stack)
    clusters = of_nodes(cluster, _counts(nodes))
    with planner_for(model, options, **asked) as planner:
        found = planner.scale(clusters, _counts(nodes), stack=stack, per_node=per_node)
    found = found.priced_at(price)
    if save is not None:
        title = f"{model} on {found.cluster}"
        is_page = Path(save).suffix == ".html"
        write_whole(
            Path(save), scaling_page(found, model) if is_page else scaling_figure(found, title)
        )
    if as_json:
        click.echo(json.dumps({"model": model, **found.as_plain(), "saved": save}, indent=2))
        return
    show([*scaling_lines(found, model), *([f"Drawn to {save}"] if save else [])], "")


def _counts(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise InputError(f"{text!r} is no list of numbers of nodes; write 1,2,4.")
    return [int(word) for word in words]
