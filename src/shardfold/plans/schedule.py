"""From a solved model to the schedule of one device's step, for the simulator.

The tasks are the steps that the cost model prices and the runner runs. A parameter's gather may
run ahead and the reduction of its gradient behind; what moves activations is waited for. Layers
that are described alike are one segment with a count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from shardfold.cluster import Cluster
from shardfold.costs.unfold import Unfolded
from shardfold.graph import Graph
from shardfold.plans.assemble import Assembly
from shardfold.plans.described import Described
from shardfold.plans.lying import Facts, Wiring
from shardfold.plans.replicas import Whole
from shardfold.plans.turns import Bytes
from shardfold.simulate import Operator, Schedule, Segment
from shardfold.spaces import Atoms


@dataclass(frozen=True)
class Scheduler:
    """Makes schedules of choices for one model and cluster; what they share is made once."""

    graph: Graph
    atoms: Atoms
    cluster: Cluster
    wirings: dict[int, Wiring] = field(default_factory=dict)
    flops: dict[object, float] = field(default_factory=dict)
    shared: list[Facts] = field(default_factory=list)

    def schedule(self, whole: Whole) -> Schedule:
        """The schedule of a whole model under a choice."""
        return _Builder(self, whole).run()

    def alone(self, assembly: Assembly) -> Schedule:
        """The schedule of a graph that holds every period."""
        unfolded = Unfolded(assembly.tabulated.problem)
        return self.schedule(Whole(assembly, unfolded, np.array(assembly.choice)))

    @property
    def facts(self) -> Facts:
        """What memory depends on besides choices."""
        if not self.shared:
            self.shared.append(Facts(self.graph, self.atoms))
        return self.shared[0]

    def wiring(self, assembly: Assembly) -> Wiring:
        """Which edge brings which operand, on the tables of an assembly."""
        key = id(assembly.tabulated)
        if key not in self.wirings:
            self.wirings[key] = Wiring(self.graph, assembly.tabulated)
        return self.wirings[key]

    def useful_flops(self, index: int) -> float:
        """FLOP of an operator's products, forward and backward, over all devices once."""
        rule = self.atoms.rules[index]
        grads = tuple(self.graph.tensors[t].requires_grad for t in self.graph.ops[index].inputs)
        flows = any(self.graph.tensors[t].requires_grad for t in self.graph.ops[index].results)
        key = (id(rule), grads, flows)
        if key not in self.flops:
            times = rule.rule.backward if rule.rule.backward is not None else float(sum(grads))
            work = rule.rule.flops * rule.rule.points if rule.rule.engine == "matrix" else 0.0
            self.flops[key] = work * (1.0 + (times if flows else 0.0))
        return self.flops[key]


class _Builder:
    def __init__(self, scheduler: Scheduler, whole: Whole) -> None:
        self.scheduler, self.whole = scheduler, whole
        self.described: dict[tuple[int, ...], Described] = {}
        self.resident: Bytes = {"parameters": 0.0, "optimizer": 0.0}

    def run(self) -> Schedule:
        graph, cluster = self.scheduler.graph, self.scheduler.cluster
        own = self._of(self.whole.assembly)
        segments: list[Segment] = []
        at = 0
        for run in self.whole.runs:
            segments += self._plain(own, range(at, run.repeat.start))
            turns = [run.described(order) for order in range(run.repeat.count)]
            keys = [(a.choice, period) for a, period in turns]
            order = 0
            for (_, period), group in groupby(keys):
                count = len(list(group))
                who = self._of(turns[order][0])
                names = tuple(_block(p) for p in run.repeat.paths[order : order + count])
                ops = run.repeat.ops(period)
                segments.append(self._segment(who, ops, count, names))
                order += count
            at = run.repeat.end
        segments += self._plain(own, range(at, len(graph.ops)))
        self._unread()
        return Schedule(
            levels=tuple(level.name for level in cluster.levels),
            segments=tuple(s for s in segments if s.operators),
            resident={kind: size for kind, size in self.resident.items() if size},
            peak_flops=cluster.device.peak(self._dtype()),
            passes=self.whole.assembly.passes,
        )

    def _of(self, assembly: Assembly) -> Described:
        if assembly.choice not in self.described:
            self.described[assembly.choice] = Described(
                assembly,
                self.scheduler.facts,
                self.scheduler.wiring(assembly),
                self.scheduler.useful_flops,
            )
        return self.described[assembly.choice]

    def _plain(self, who: Described, ops: range) -> list[Segment]:
        """Operators outside a run, by the block that they are in."""
        blocks = groupby(ops, lambda i: _block_of(self.scheduler.graph.ops[i].origin.module))
        return [self._segment(who, list(each), 1, (name,)) for name, each in blocks]

    def _segment(
        self, who: Described, ops: Sequence[int], count: int, names: tuple[str, ...]
    ) -> Segment:
        for op in ops:
            for kind, size in who.resident(op).items():
                self.resident[kind] = self.resident.get(kind, 0.0) + count * size
        operators = tuple(o for o in map(who.operator, ops) if _matters(o))
        first = names[0] if count == 1 else f"{names[0]} to {names[-1].rpartition('.')[2]}"
        return Segment(first, operators, count, names if count > 1 else ())

    def _unread(self) -> None:
        """Inputs and buffers are whole everywhere; so are parameters that no operator reads."""
        graph = self.scheduler.graph
        read = {t for op in graph.ops for t in op.inputs}
        for index, tensor in enumerate(graph.tensors):
            if tensor.role in ("input", "buffer"):
                times = self.whole.assembly.passes if tensor.role == "input" else 1
                size = times * tensor.type.bytes
                self.resident["buffers"] = self.resident.get("buffers", 0.0) + size
            elif tensor.role == "parameter" and index not in read:
                self.resident["parameters"] += tensor.type.bytes

    def _dtype(self) -> str:
        """The dtype of most products."""
        flops: dict[str, float] = {}
        graph = self.scheduler.graph
        for index, op in enumerate(graph.ops):
            if self.scheduler.atoms.rules[index].rule.engine == "matrix":
                dtype = graph.tensors[op.results[0]].type.dtype
                flops[dtype] = flops.get(dtype, 0.0) + self.scheduler.useful_flops(index)
        return max(flops, key=flops.__getitem__, default="float32")


def _matters(operator: Operator) -> bool:
    return bool(operator.forward or operator.backward or operator.update or operator.again)


def _block(paths: Sequence[str]) -> str:
    return paths[0] if paths else ""


def _block_of(module: str) -> str:
    """The outermost numbered module on a path, or its first name."""
    parts = module.split(".")
    for at, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: at + 1])
    return ""
