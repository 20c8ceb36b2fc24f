"""From a model and a cluster: `plan` finds the best plan, `estimate` prices a stated strategy.

`scale` plans a model on ever more nodes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from shardfold.cli.options import (
    checked,
    output_options,
    planning_options,
    searched_size_options,
    size_options,
    taken,
)
from shardfold.errors import InputError, PlanError


@click.command()
@click.argument("model")
@click.option("--cluster", required=True, help="Such as 8xa100, 4x8xh100 or lab.toml.")
@searched_size_options
@planning_options
@click.option(
    "--for",
    "stack",
    metavar="STACK",
    help="Write the best configuration of torchtitan, megatron, hf, accelerate, deepspeed or "
    "nanotron, as its own file or arguments.",
)
@click.option(
    "--beside/--no-beside", "beside_plan", default=True, help="With --for: find the plan, too."
)
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
    stack: str | None,
    beside_plan: bool,
    **options: Any,
) -> None:
    r"""Find the best way to train MODEL on a cluster, with a lower bound on its cost.

    MODEL is a name of the zoo (see shardfold models); file.py:function or
    package.module:function, a function that returns (module, args, kwargs), an nn.Module and an
    example batch for it; or hf:config.json, a Hugging Face configuration.

    \b
    shardfold plan gpt2 --cluster 8xa100 --precision bf16 --save plan.json
    shardfold plan train.py:make --cluster 4x8xh100 --batch 512
    shardfold plan gpt2 --cluster 2xa100 --batch 256 --micro-batches search
    shardfold plan llama3-8b --cluster 8xh100 --precision bf16 --for torchtitan
    """
    from shardfold.cli.model import planner_for
    from shardfold.cli.printing import emit

    for file in filter(None, (save, save_problem)):
        check_writable(Path(file))
    asked = taken(options)
    target = checked(cluster, asked)
    wish = searched_batch(options)
    if stack is not None:
        from shardfold.cli.stacks import plan_for

        if wish is not None:
            raise click.UsageError(f"--batch {wish} does not go with --for: give a number.")

        plan_for(model, target, stack, beside_plan, save, as_json, options, asked)
        return
    with planner_for(model, options, cluster=target, **asked) as planner:
        if wish is not None:
            passes = asked.get("micro_batches")
            given = passes if isinstance(passes, int) else 1
            planner, samples = planner.with_batch(wish)
            found = planner.plan(save_problem=save_problem, micro_batches=given)
            found = found.with_notes(f"{WISHES[wish]}: {samples} samples.")
        else:
            found = planner.plan(save_problem=save_problem)
    if save is not None:
        found.save(save)
    emit(found, as_json=as_json, everything=everything, model=model, saved=save)


@click.command()
@click.argument("model")
@click.option("--cluster", required=True, help="Such as 8xa100, 4x8xh100 or lab.toml.")
@click.option(
    "--strategy",
    required=True,
    metavar="WORDS",
    help="Degrees and words, such as 'fsdp=32 tp=8 sp recompute=full micro-batches=4'.",
)
@click.option(
    "--stack",
    default="shardfold",
    show_default=True,
    metavar="NAME",
    help="The stack that runs it, such as megatron: it says what is float32 and what overlaps.",
)
@click.option("--plan/--no-plan", "beside_plan", default=True, help="Find the best plan, too.")
@searched_size_options
@planning_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def estimate(
    model: str,
    cluster: str,
    strategy: str,
    stack: str,
    beside_plan: bool,
    as_json: bool,
    **options: Any,
) -> None:
    r"""Say how long a step of MODEL takes under a stated strategy, and whether it fits.

    The strategy is a list of words. Degrees must multiply to the devices of the cluster; dp is
    what the others leave. tp lies innermost, then fsdp, then dp.

    \b
    dp=N             replicas of the model (data parallel)
    fsdp=N           devices over which parameters are sharded; with dp=M: HSDP
    zero=0|1|2|3     sharded: nothing, optimizer state, gradients, parameters
    reshard=never    of fsdp: gathered once for forward and backward
    tp=N             tensor parallel: heads, feed-forward features, vocabulary
    sp               sequence parallel between the products of tp
    recompute=full   activation checkpointing of every block; selective: of
                     attention; products: of all but attention and every
                     second product; or none
    micro-batches=N  gradient accumulation
    pp=N             pipeline stages of equal layers
    schedule=1f1b    of the stages; or gpipe, interleaved, zbv
    virtual=N        chunks on each device, of schedule=interleaved

    \b
    shardfold estimate gpt2 --cluster 8xh100 --precision bf16 --strategy dp=8
    shardfold estimate gpt2 --cluster 4x8xh100 --strategy "fsdp=32 recompute=full"
    shardfold estimate gpt2 --cluster 8xh100 --strategy "tp=8 sp" --stack megatron
    """
    from shardfold.cli.model import planner_for
    from shardfold.report.summary_text import estimate_lines
    from shardfold.strategies.stacks import stack_named
    from shardfold.strategies.stated import parse_strategy

    asked = taken(options)
    target = checked(cluster, asked)
    parse_strategy(strategy, target.size)
    stack_named(stack)
    wish, samples = searched_batch(options), None
    with planner_for(model, options, cluster=target, **asked) as planner:
        if wish is not None:
            planner, samples = planner.with_batch(wish, strategy=strategy, stack=stack)
        found = planner.estimate(strategy, stack=stack, beside_plan=beside_plan)
    if as_json:
        batch = {} if samples is None else {"batch": samples}
        click.echo(json.dumps({"model": model, **batch, **found.as_plain()}, indent=2))
    else:
        if wish is not None:
            click.echo(f"{WISHES[wish]}: {samples} samples.")
        click.echo("\n".join(estimate_lines(found, model)))


WISHES = {"max": "The largest batch that fits", "best": "The batch with the best rate"}


def searched_batch(sizes: dict[str, Any]) -> Any:
    """The word for how the batch is found, taken out of the sizes; None where it is a number."""
    if sizes.get("batch") not in WISHES:
        return None
    wish, sizes["batch"] = sizes["batch"], None
    return wish


def check_writable(target: Path) -> None:
    """Refuse a file that could not be written after the work is done."""
    folder = target.parent
    if not folder.is_dir():
        raise PlanError(f"Cannot write {target}: the folder {folder} does not exist.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PlanError(f"Cannot write {target}: no permission to write in {folder}.")
    if target.is_dir():
        raise PlanError(f"Cannot write {target}: it is a folder.")


@click.command()
@click.argument("model")
@click.option("--cluster", required=True, help="Hardware such as h100 or 4xa100, or lab.toml.")
@click.option("--nodes", default="1,2,4,8,16", show_default=True, help="Numbers of nodes.")
@click.option("--per-node", is_flag=True, help="The batch is for one node, and grows with them.")
@click.option(
    "--for",
    "stack",
    metavar="STACK",
    help="The best configuration of this stack, such as torchtitan, in place of the plan.",
)
@click.option("--price", type=click.FloatRange(min=0), help="What an hour of one device costs.")
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
    r"""Plan MODEL for more and more nodes: step, throughput, efficiency, memory, cost.

    The batch stays the same whole batch, or with --per-node grows with the nodes.

    \b
    shardfold scale gpt2 --cluster h100 --nodes 1,2,4 --precision bf16 --batch 512
    shardfold scale llama3-8b --cluster h100 --for torchtitan --save scale.svg
    """
    from shardfold.cli.model import planner_for
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
