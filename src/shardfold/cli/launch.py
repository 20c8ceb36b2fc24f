"""`shardfold launch`: the exact torchrun command of a plan for every node, or a file for sbatch.

Ranks follow the plan's mesh, outermost axis first, so that a node's devices have consecutive
ranks. Hence every node gets its rank; a rendezvous would number nodes as they arrive.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardfold.errors import RunError

if TYPE_CHECKING:
    from shardfold.plans import Plan

HEAD = '"$HEAD"'  # a shell variable, for the address that only the user or Slurm knows
SCRIPT = "TRAIN.py"  # stands for what was not given

SBATCH = """#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{more}set -euo pipefail
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
export HEAD
srun --kill-on-bad-exit=1 bash -c {command}
"""


@dataclass(frozen=True, slots=True)
class Launch:
    """How many processes on how many nodes, where the first one listens, and what they run."""

    nodes: int
    each: int
    head: str  # as the shell is to read it
    port: int
    program: tuple[str, ...]

    def command(self, node: str) -> str:
        """The command of one node, which is given as the shell is to read it."""
        program = shlex.join(self.program)
        if self.nodes == 1:
            return f"torchrun --standalone --nproc-per-node {self.each} {program}"
        return (
            f"torchrun --nnodes {self.nodes} --node-rank {node} --nproc-per-node {self.each} "
            f"--master-addr {self.head} --master-port {self.port} {program}"
        )


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("file", metavar="PLAN.json")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="[-- SCRIPT ARGS...]")
@click.option("--nodes", type=click.IntRange(min=1), help="As in the plan's cluster if left out.")
@click.option("--hosts", help="The nodes' names, with commas between; the first one is the head.")
@click.option("--port", type=click.IntRange(1, 65535), default=29500, show_default=True)
@click.option("--model", help="Run shardfold train on this MODEL, in place of a script.")
@click.option("--sbatch", metavar="FILE", help="Write a file for Slurm's sbatch, too.")
@click.option("--time", "limit", metavar="HH:MM:SS", help="Of the sbatch file: its time limit.")
@click.option("--partition", help="Of the sbatch file.")
@click.option("--account", help="Of the sbatch file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def launch(
    file: str,
    program: tuple[str, ...],
    nodes: int | None,
    hosts: str | None,
    port: int,
    model: str | None,
    sbatch: str | None,
    limit: str | None,
    partition: str | None,
    account: str | None,
    as_json: bool,
) -> None:
    r"""Print the torchrun command that starts a plan's processes, a line for each node.

    A script is given after --, with its arguments; it loads the plan and calls sf.parallelize.
    With --model, shardfold train is run instead.

    \b
    shardfold launch plan.json --nodes 4 -- train.py --lr 3e-4
    shardfold launch plan.json --hosts a1,a2 --model gpt2
    shardfold launch plan.json --nodes 4 --model gpt2 --sbatch job.sh
    """
    from shardfold.plans import load

    if model is not None and program:
        raise click.UsageError("Give a script after --, or --model, not both.")
    slurm = {"time": limit, "partition": partition, "account": account}
    given = [name for name, value in slurm.items() if value is not None]
    if given and sbatch is None:
        raise click.UsageError(f"--{given[0]} goes with --sbatch.")
    plan = load(file)
    names = [] if hosts is None else hosts.split(",")
    made = _launch(plan, nodes, names, port, _program(file, program, model))
    if sbatch is not None:
        _write(Path(sbatch), _sbatch(made, plan, Path(file).stem, slurm))
    commands = [made.command(str(node)) for node in range(made.nodes)]
    if as_json:
        found = {
            "nodes": made.nodes,
            "processes_per_node": made.each,
            "commands": commands,
            "sbatch": sbatch,
        }
        click.echo(json.dumps(found, indent=2))
        return
    if made.head == HEAD and made.nodes > 1:
        click.echo("HEAD=...  # the address of node 0, as the others reach it")
    for node, command in enumerate(commands):
        if made.nodes > 1:
            click.echo(f"# on node {node}{f', {names[node]}' if names else ''}")
        click.echo(command)
    if sbatch is not None:
        click.echo(f"Written to {sbatch}: sbatch {shlex.quote(sbatch)}", err=True)
    if SCRIPT in made.program:
        click.echo(f"{SCRIPT} stands for your script: give it after --, or --model.", err=True)


def _program(file: str, program: Sequence[str], model: str | None) -> tuple[str, ...]:
    if model is not None:
        return ("-m", "shardfold", "train", model, "--plan", file)
    return tuple(program) or (SCRIPT,)


def _launch(
    plan: Plan, nodes: int | None, hosts: Sequence[str], port: int, program: tuple[str, ...]
) -> Launch:
    """Share the plan's processes out over the nodes."""
    size = plan.processes
    if nodes is None:
        nodes = len(hosts) or _nodes(plan)
    if hosts and len(hosts) != nodes:
        raise RunError(f"{nodes} nodes need {nodes} names, --hosts has {len(hosts)}.")
    if size % nodes:
        raise RunError(
            f"The plan is for {size} processes, which {nodes} nodes cannot share evenly. "
            f"Its cluster {plan.cluster} has {_nodes(plan)}."
        )
    planned = _nodes(plan)
    if nodes != planned:
        click.echo(
            f"The plan was priced for {planned} nodes of {size // planned}, not for {nodes} of "
            f"{size // nodes}: its collectives will cross other links.",
            err=True,
        )
    head = shlex.quote(hosts[0]) if hosts else HEAD
    return Launch(nodes, size // nodes, head, port, program)


def _nodes(plan: Plan) -> int:
    """The nodes of the plan's cluster: all levels but the innermost, if there are several."""
    levels = plan.provenance.cluster.get("levels", [])
    assert isinstance(levels, list)
    outer = [level["size"] for level in levels[:-1]]
    return prod(outer) if outer else 1


def _sbatch(made: Launch, plan: Plan, name: str, slurm: dict[str, str | None]) -> str:
    """The file for sbatch: one task for each node, which starts the node's processes."""
    device = plan.provenance.cluster.get("device", {})
    assert isinstance(device, dict)
    options = {**slurm}
    if "cpu" not in str(device.get("name", "")).lower():
        options["gpus-per-node"] = str(made.each)
    for option, value in options.items():
        if value is not None and not re.fullmatch(r"[\w.:@/-]+", value):
            raise RunError(f"--{option} {value!r} cannot stand in an sbatch file.")
    inner = Launch(made.nodes, made.each, HEAD, made.port, made.program)
    return SBATCH.format(
        name=re.sub(r"[^\w.-]+", "-", name) or "shardfold",
        nodes=made.nodes,
        more="".join(f"#SBATCH --{key}={value}\n" for key, value in options.items() if value),
        command=shlex.quote(f"exec {inner.command(chr(34) + '$SLURM_NODEID' + chr(34))}"),
    )


def _write(path: Path, text: str) -> None:
    from shardfold.cli.plan import check_writable

    check_writable(path)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
