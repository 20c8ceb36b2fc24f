"""The tasks of every operator under one choice: steps in order, with the memory that they take.

From a solved model to the schedule of one device's step, for the simulator.

The tasks are the steps that the cost model prices and the runner runs. A parameter's gather may
run ahead and the reduction of its gradient behind; what moves activations is waited for. Layers
that are described alike are one segment with a count.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from msgspec import structs

from shardfold.cluster import Cluster
from shardfold.costs.decision_graph import Edge
from shardfold.costs.memory_format import access_of
from shardfold.costs.model import is_beside, runs_beside
from shardfold.costs.steps import Collective, Compute, Step, is_deferred
from shardfold.costs.unroll import UnrolledProblem
from shardfold.graph import Graph
from shardfold.graph.repeats import MODEL
from shardfold.sharding import Subdims
from shardfold.simulate import Again, Operator, Schedule, Segment, Task
from shardfold.simulate.decoded import DecodedChoice, UnrolledChoice
from shardfold.simulate.memory import (
    Bytes,
    Footprint,
    GatheredParameter,
    MemoryFacts,
    PhaseMemory,
    scratch,
)
from shardfold.simulate.parts import Part
from shardfold.simulate.schedule import Mode


class Surroundings:
    """What tasks of a part depend on besides the choice, and the operators that were made of it.

    An operator depends on the choices around it and on the memory that it takes and gives: choices
    that agree there share it, and so do operators that are alike, but for their names.
    """

    def __init__(self, decoded: DecodedChoice, part: Part) -> None:
        self.tables, self.graph = decoded.tables, decoded.graph
        self.made: dict[object, tuple[Operator, Bytes]] = {}
        self.ends: dict[int, list[int]] = defaultdict(list)  # what runs before which backward
        for region in self.tables.regions.regions:
            self.ends[region.end] += region.visited
        self.first: dict[int, int] = {}  # parameter: the operator that answers for it
        for index in part.ops:
            for tensor in self.graph.ops[index].inputs:
                self.first.setdefault(tensor, index)
        self.leaving: dict[int, list[int]] = defaultdict(list)  # edges from each vertex
        if self.tables.micro_batches > 1:
            for number, edge in enumerate(self.tables.edges):
                self.leaving[edge.source].append(number)
        self.named: dict[object, Operator] = {}
        count = len(self.graph.ops)
        self.edges = [list(self._edges(op)) for op in range(count)]
        self.near = [self._near(op) for op in range(count)]
        numbers: dict[object, int] = {}
        kinds = (self._kind(op, decoded.subdims) for op in range(count))
        self.kind = [numbers.setdefault(kind, len(numbers)) for kind in kinds]

    def _edges(self, op: int) -> Iterator[int | None]:
        """The edges that an operator's steps depend on, always in this order."""
        wiring, edges = self.tables.wiring, self.tables.edges
        for each in (op, *self.ends.get(op, ())):
            own = [*wiring.operand_edge[each]]
            own += [wiring.shared_edge.get(tensor) for tensor in self.graph.ops[each].results]
            yield from own
            for e in own:
                yield from () if e is None else self.leaving.get(edges[e].source, ())

    def _near(self, op: int) -> tuple[int, ...]:
        """The vertices whose choices these edges depend on, and those of what runs again."""
        found = [v for e in self.edges[op] if e is not None for v in _ends(self.tables.edges[e])]
        return (op, *self.ends.get(op, ()), *found)

    def _kind(self, op: int, subdims: Subdims) -> object:
        """What operators with the same tasks under the same choices have in common."""
        graph, problem = self.graph, self.tables.problem
        if self.ends.get(op):  # what runs again has names of its own
            return op
        inputs = graph.ops[op].inputs
        operands = tuple(
            (at.role, at.type, at.requires_grad, graph.kept_type(t), self.first.get(t) == op)
            for t, at in zip(inputs, map(graph.tensors.__getitem__, inputs), strict=True)
        )
        again = tuple(map(inputs.index, inputs))  # which operands are one tensor
        edges = [None if e is None else (e, self.tables.edges[e]) for e in self.edges[op]]
        tables = tuple(
            e and (id(problem.edge_costs[e[0]]), id(problem.costs[e[1].source]), e[1].reduces_sum)
            for e in edges
        )
        rule = id(subdims.rules[op].rule)
        return id(problem.costs[op]), rule, operands, again, tables, graph.has_gradient(op)


def _ends(edge: Edge) -> tuple[int, int]:
    return edge.source, edge.target


class OperatorTasks:
    """The tasks of every operator of a part under one choice, made as they are asked for."""

    def __init__(
        self,
        decoded: DecodedChoice,
        facts: MemoryFacts,
        useful_flops: Callable[[int], float],
        part: Part,
    ) -> None:
        self.decoded, self.useful_flops = decoded, useful_flops
        self.graph, self.mesh = decoded.graph, decoded.tables.mesh
        self.wiring = decoded.tables.wiring
        self.footprint = Footprint(decoded, facts, part)
        known = decoded.surroundings
        if (facts, part) not in known:
            known[facts, part] = Surroundings(decoded, part)
        self.around: Surroundings = known[facts, part]

    def made(self, op: int) -> tuple[Operator, Bytes]:
        """All tasks of one operator, and the bytes that it answers for all the time."""
        key = self._key(op)
        if key not in self.around.made:
            self.around.made[key] = self.operator(op), self.resident(op)
        made, resident = self.around.made[key]
        name = self.graph.ops[op].name
        if made.name != name:
            if (key, op) not in self.around.named:
                self.around.named[key, op] = structs.replace(made, name=name)
            made = self.around.named[key, op]
        return made, resident

    def _key(self, op: int) -> object:
        """What tells an operator's tasks under one choice from those under another."""
        choice, at = self.decoded.choice, self.footprint
        again = [at.again[each].key() for each in self.around.ends.get(op, ())]
        memory = at.forward[op].key(), at.backward[op].key(), *again
        gathered = [None if g is None else g.key() for g in at.gathered[op]]
        chosen = [choice[v] for v in self.around.near[op]]
        known = self.around.kind[op], self._is_fused(op)
        return known, tuple(chosen), memory, tuple(gathered)

    def resident(self, op: int) -> Bytes:
        """Parameters, optimizer state and sums of gradients that an operator answers for."""
        found: Bytes = {}
        for tensor, vertex in self._answers_for(op):
            size = self.footprint.layouts.stored_bytes(vertex)
            found["parameters"] = found.get("parameters", 0.0) + size
            if self.graph.tensors[tensor].requires_grad:
                state = size * self.decoded.optimizer.states
                found["optimizer"] = found.get("optimizer", 0.0) + state
                if self.decoded.micro_batches > 1:
                    sums = self._gradient_bytes(vertex)
                    found["gradients"] = found.get("gradients", 0.0) + sums
        return found

    def _gradient_bytes(self, vertex: int) -> float:
        """Bytes of a parameter's gradient; of several passes, each that is held back has a sum."""
        size = self.footprint.layouts.stored_bytes(vertex)
        if self.decoded.micro_batches == 1:
            return size
        edges = self.decoded.tables.edges
        waiting = [
            is_deferred([s.kind for s in self.decoded.moves(k)[1] if isinstance(s, Collective)])
            and not edges[k].reduces_sum
            for k in self.around.leaving[vertex]
        ]
        return size * (sum(waiting) + (not all(waiting)))

    def _answers_for(self, op: int) -> Iterable[tuple[int, int]]:
        """The parameters that an operator reads first, with their vertices."""
        seen = set()
        for position, tensor in enumerate(self.graph.ops[op].inputs):
            edge = self.wiring.operand_edge[op][position]
            is_parameter = self.graph.tensors[tensor].role == "parameter"
            if (
                is_parameter
                and edge is not None
                and self.around.first[tensor] == op
                and tensor not in seen
            ):
                seen.add(tensor)
                yield tensor, self.decoded.tables.edges[edge].source

    def operator(self, op: int) -> Operator:
        """All tasks of one operator."""
        again = tuple(filter(None, map(self._again, self.around.ends.get(op, ()))))
        devices = math.prod(self.mesh.shape)
        return Operator(
            self.graph.ops[op].name,
            tuple(self._values(op, "forward", self.footprint.forward[op])),
            tuple(self._gradients(op)),
            tuple(self._update(op)),
            again,
            self.useful_flops(op) / devices,
        )

    def _again(self, op: int) -> Again | None:
        tasks = tuple(self._values(op, "recompute", self.footprint.again[op]))
        return Again(self.graph.ops[op].name, tasks) if tasks else None

    def _values(self, op: int, phase: str, memory: PhaseMemory) -> list[Task]:
        """Forward, or forward once more: gathers, operands moved, work, results moved."""
        tasks = self._brought(op, phase)
        moved = [s for s in self._moved(op, gradient=False) if s.phase == phase]
        work = [s for s in self.decoded.work(op) if s.phase == phase]
        shared = [s for s in self._shared_steps(op, gradient=False) if s.phase == phase]
        steps = [*moved, *work, *shared]
        return tasks + self._in_order(steps, phase, memory, in_place=self._is_fused(op))

    def _gradients(self, op: int) -> list[Task]:
        """Backward: results' gradients moved, parameters gathered again, work, operands'."""
        tasks = self._brought(op, "backward")
        shared = self._shared_steps(op, gradient=True)
        work = [s for s in self.decoded.work(op) if s.phase == "backward"]
        moved = self._moved(op, gradient=True)
        memory = self.footprint.backward[op]
        steps = [*shared, *work, *moved]
        tasks += self._in_order(steps, "backward", memory, in_place=self._is_fused(op))
        return [*tasks, *self._reductions(op)]

    def _is_fused(self, op: int) -> bool:
        """Whether an operator is a part of a compiled kernel."""
        fusion = self.footprint.layouts.facts.fusion
        return fusion is not None and fusion.ops[op] is not None

    def _update(self, op: int) -> list[Task]:
        found = []
        for tensor, vertex in self._answers_for(op):
            gradient = self._gradient_bytes(vertex)
            gives = {"gradients": gradient} if self.graph.tensors[tensor].requires_grad else {}
            for step in self.decoded.update(vertex):
                assert isinstance(step, Compute)
                found.append(_with(self._work("update", step), gives=gives))
        return found

    # Steps

    def _brought(self, op: int, phase: str) -> list[Task]:
        """Parameters on their way to an operator: cast, and gathered."""
        return [*self._casts(op, phase)] + [
            self._gather(op, position, step)
            for position, step in self._parameter_steps(op)
            if step.phase == phase
        ]

    def _casts(self, op: int, phase: str) -> Iterator[Task]:
        """A parameter that is not gathered is there from its cast on."""
        for position, edge in self._edges(op, parameters=True):
            steps = [step for step in self.decoded.moves(edge)[0] if step.phase == phase]
            found = self.footprint.gathered[op][position]
            is_sent = any(map(_is_sent, steps))
            used = found.used if found is not None and not is_sent else 0.0
            for step in steps:
                if isinstance(step, Compute):
                    takes: Bytes = {"buffers": used} if used else {}
                    yield _with(self._work(phase, step), takes=takes)

    def _parameter_steps(self, op: int) -> list[tuple[int, Step]]:
        """The gathers of parameters, with the operands' positions."""
        return [
            (position, step)
            for position, edge in self._edges(op, parameters=True)
            for step in self.decoded.moves(edge)[0]
            if _is_sent(step)
        ]

    def _edges(self, op: int, *, parameters: bool) -> list[tuple[int, int]]:
        tensors = self.graph.tensors
        return [
            (position, edge)
            for position, edge in enumerate(self.wiring.operand_edge[op])
            if edge is not None
            and (tensors[self.graph.ops[op].inputs[position]].role == "parameter") == parameters
        ]

    def _moved(self, op: int, *, gradient: bool) -> list[Step]:
        return [
            step
            for _, edge in self._edges(op, parameters=False)
            for step in self.decoded.moves(edge)[gradient]
        ]

    def _shared_steps(self, op: int, *, gradient: bool) -> list[Step]:
        """Of results that go to the layout that several readers share."""
        edges = (self.wiring.shared_edge.get(tensor) for tensor in self.graph.ops[op].results)
        return [s for e in edges if e is not None for s in self.decoded.moves(e)[gradient]]

    # Tasks

    def _in_order(
        self, steps: Sequence[Step], phase: str, memory: PhaseMemory, *, in_place: bool
    ) -> list[Task]:
        """Work and collectives one after the other; memory comes first and goes last."""
        model = self.decoded.model
        beside = [s for s in steps if isinstance(s, Collective) and runs_beside(model, s)]
        tasks: list[Task] = []
        for step in steps:
            if isinstance(step, Compute):
                tasks += self._pieces(self._work(phase, step), beside if step.work else [])
            elif _is_sent(step) and not runs_beside(model, step):
                tasks.append(self._sent(step, "wait"))
        if not tasks and not (memory.moved or memory.takes or memory.gives):
            return []
        if not any(task.mode == "work" for task in tasks):
            tasks.append(Task(phase, 0.0))
        at = next(k for k, task in enumerate(tasks) if task.mode == "work")
        if in_place:  # what it reads for the last time is where it writes
            first, memory = _reused(memory)
            tasks, at = [Task(phase, 0.0, gives=first), *tasks], at + 1
        tasks[0] = _with(tasks[0], takes=memory.moved)
        tasks[at] = _with(tasks[at], takes=memory.takes)
        tasks[-1] = _with(tasks[-1], gives=memory.gives)
        return tasks

    def _pieces(self, work: Task, beside: Sequence[Collective]) -> list[Task]:
        """An operator's work with what runs beside all but the last piece of it."""
        if not beside:
            return [work]
        sent = [self._sent(step, "beside") for step in beside]
        last = 1.0 / beside[0].pieces
        return [*sent, *(_share(work, part) for part in (1.0 - last, last))]

    def _work(self, kind: str, step: Compute) -> Task:
        device, host = self.decoded.worked(step)
        turn = "every" if step.phase == "update" else step.turn
        return Task(kind, device, turn=turn, host_seconds=host)

    def _sent(self, step: Collective, mode: Mode, takes: Bytes | None = None) -> Task:
        extra = scratch(step)
        buffers: Bytes = {"buffers": extra} if extra else {}
        return Task(
            step.kind,
            self.decoded.seconds(step),
            mode,
            tuple(sorted({self.mesh.axes[a].level for a in step.axes})),
            float(step.bytes[0]),
            _sum(buffers, takes or {}),
            buffers,
            step.turn,
        )

    def _gather(self, op: int, position: int, step: Step) -> Task:
        """The gathered parameter is there from its gather on; of several steps, from the first."""
        assert isinstance(step, Collective)
        found = self.footprint.gathered[op][position]
        first = next(
            s for p, s in self._parameter_steps(op) if p == position and s.phase == step.phase
        )
        used = found.used if found is not None and first is step else 0.0
        return self._sent(
            step, self._unless_waited(step, "ahead"), {"buffers": used} if used else None
        )

    def _unless_waited(self, step: Collective, mode: Mode) -> Mode:
        """Ahead or behind, unless sending takes the very processor that computes."""
        return mode if is_beside(self.decoded.model, step) else "wait"

    def _behind(self, steps: Sequence[Step]) -> list[Task]:
        sent = [step for step in steps if isinstance(step, Collective)]
        return [self._sent(step, self._unless_waited(step, "behind")) for step in sent]

    def _reductions(self, op: int) -> list[Task]:
        """Gradients of parameters: the part that stays comes, what was reduced goes."""
        if self.decoded.micro_batches > 1:
            return self._summed(op)
        tasks: list[Task] = []
        for position, edge in self._edges(op, parameters=True):
            steps = [s for s in self.decoded.moves(edge)[1] if _is_sent(s)]
            found = self.footprint.gathered[op][position]
            if found is None or not found.gradient:
                continue
            stays: Bytes = {"gradients": found.reduced} if found.reduced else {}
            goes: Bytes = {"buffers": found.sent if steps else found.gradient}
            tasks += self._cast_gradient(edge, found, is_sent=bool(steps))
            if not steps:  # each device takes its part
                tasks.append(Task("backward", 0.0, takes=stays, gives=goes))
                continue
            each = self._behind(steps)
            each[0] = _with(each[0], takes=stays)
            each[-1] = _with(each[-1], gives=goes)
            tasks += each
        return tasks

    def _cast_gradient(self, edge: int, found: GatheredParameter, *, is_sent: bool) -> list[Task]:
        """A gradient in the dtype in which it is reduced, and then kept."""
        casts = [s for s in self.decoded.moves(edge)[1] if isinstance(s, Compute)]
        tasks = [self._work("backward", step) for step in casts]
        if tasks and is_sent and found.sent != found.gradient:
            comes: Bytes = {"buffers": found.sent}
            tasks[0] = _with(tasks[0], takes=comes, gives={"buffers": found.gradient})
        return tasks

    def _summed(self, op: int) -> list[Task]:
        """Gradients of one of several passes: each goes when it is added to those before.

        What is held back is added first, and reduced in the last pass; else it is the other way
        round.
        """
        tasks = [
            self._work("backward", step)
            for _, vertex in self._answers_for(op)
            for step in self.decoded.summed_up(vertex)
            if isinstance(step, Compute)
        ]
        for position, edge in self._edges(op, parameters=True):
            found = self.footprint.gathered[op][position]
            if found is None:
                continue
            steps = [s for s in self.decoded.moves(edge)[1] if _is_sent(s)]
            each = self._behind(steps)
            tasks += self._cast_gradient(edge, found, is_sent=bool(each))
            fresh = (found.sent if each else found.gradient) or found.reduced
            if not each or each[0].turn == "last":
                gone = [Task("backward", 0.0, gives={"buffers": fresh})] if fresh else []
                tasks += [*gone, *each]
                continue
            part: Bytes = {"buffers": found.reduced} if found.reduced else {}
            each[0] = _with(each[0], takes=part)
            end = max(k for k, task in enumerate(each) if task.turn == "every")
            each[end] = _with(each[end], gives=_sum(part, {"buffers": fresh}))
            tasks += each
        return tasks


def _reused(memory: PhaseMemory) -> tuple[Bytes, PhaseMemory]:
    """What is given back before anything is taken, as far as that is as large; and the rest."""
    taken, given = sum(memory.takes.values()), sum(memory.gives.values())
    share = min(taken, given) / given if given else 0.0
    first = {kind: size * share for kind, size in memory.gives.items()}
    last = {kind: size * (1 - share) for kind, size in memory.gives.items()}
    return first, PhaseMemory(memory.moved, memory.takes, last)


def _is_sent(step: Step) -> bool:
    return isinstance(step, Collective) and step.kind != "slice"


def _with(task: Task, takes: Bytes | None = None, gives: Bytes | None = None) -> Task:
    return Task(
        task.kind,
        task.seconds,
        task.mode,
        task.levels,
        task.bytes,
        _sum(task.takes, takes or {}),
        _sum(task.gives, gives or {}),
        task.turn,
        task.host_seconds,
    )


def _sum(first: Bytes, second: Bytes) -> Bytes:
    return {k: first.get(k, 0.0) + second.get(k, 0.0) for k in {**first, **second}}


@dataclass(frozen=True)
class Scheduler:
    """Makes schedules of choices for one model and cluster; what they share is made once."""

    graph: Graph
    subdims: Subdims
    cluster: Cluster
    flops: dict[object, float] = field(default_factory=dict)
    shared: list[MemoryFacts] = field(default_factory=list)
    regathers: bool = False  # activations that were gathered, for backward once more

    def schedule(self, whole: UnrolledChoice) -> Schedule:
        """The schedule of a whole model under a choice."""
        return _Builder(self, whole, Part.whole(self.graph), self.workspace_bytes).run()

    def schedule_part(
        self, whole: UnrolledChoice, part: Part, *, is_first: bool = True
    ) -> Schedule:
        """The schedule of a part, under a choice in which all periods of a run choose alike.

        Of several on one device, the first bears the workspace of products.
        """
        return _Builder(self, whole, part, self.workspace_bytes if is_first else 0).run_part()

    def alone(self, decoded: DecodedChoice) -> Schedule:
        """The schedule of a graph that holds every period."""
        unrolled = UnrolledProblem(decoded.tables.problem)
        return self.schedule(UnrolledChoice(decoded, unrolled, np.array(decoded.choice)))

    @property
    def facts(self) -> MemoryFacts:
        """What memory depends on besides choices."""
        if not self.shared:
            self.shared.append(MemoryFacts(self.graph, self.subdims, regathers=self.regathers))
        return self.shared[0]

    @property
    def workspace_bytes(self) -> int:
        """What products keep on the device, whatever is chosen."""
        is_needed = any(rule.rule.engine == "matrix" for rule in self.subdims.rules)
        return self.cluster.device.workspace_bytes if is_needed else 0

    def useful_flops(self, index: int) -> float:
        """FLOP of an operator's products, forward and backward, over all devices once."""
        rule = self.subdims.rules[index]
        grads = tuple(self.graph.tensors[t].requires_grad for t in self.graph.ops[index].inputs)
        flows = self.graph.has_gradient(index)
        key = (id(rule), grads, flows)
        if key not in self.flops:
            times = rule.rule.backward_passes(grads)
            work = rule.rule.flops * rule.rule.points if rule.rule.engine == "matrix" else 0.0
            self.flops[key] = work * (1.0 + (times if flows else 0.0))
        return self.flops[key]


class _Builder:
    def __init__(
        self, scheduler: Scheduler, whole: UnrolledChoice, part: Part, workspace: int
    ) -> None:
        self.scheduler, self.whole, self.part = scheduler, whole, part
        self.tasks: dict[tuple[int, ...], OperatorTasks] = {}
        self.resident: Bytes = {"parameters": 0.0, "optimizer": 0.0, "buffers": float(workspace)}
        copies = whole.decoded.optimizer.copies if scheduler.cluster.device.is_gpu else 0
        self.copies = copies / max(1, whole.decoded.optimizer.states)  # as a part of the state

    def run(self) -> Schedule:
        graph = self.scheduler.graph
        own = self._of(self.whole.decoded)
        segments: list[Segment] = []
        at = 0
        for run in self.whole.runs:
            segments += self._plain(own, range(at, run.repeat.start))
            periods = [run.period(order) for order in range(run.repeat.count)]
            keys = [(a.choice, period) for a, period in periods]
            order = 0
            for (_, period), group in groupby(keys):
                count = len(list(group))
                who = self._of(periods[order][0])
                names = tuple(_block(p) for p in run.repeat.paths[order : order + count])
                ops = run.repeat.ops(period)
                segments.append(self._segment(who, ops, count, names))
                order += count
            at = run.repeat.end
        segments += self._plain(own, range(at, len(graph.ops)))
        return self._finished(segments)

    def run_part(self) -> Schedule:
        """As `run`, of some operators: of a run's periods, the middle one stands for the others."""
        graph, part = self.scheduler.graph, self.part
        own = self._of(self.whole.decoded)
        segments = self._plain(own, part.makes_again(graph))
        at = part.ops.start
        for repeat, count in zip(graph.repeats, part.periods, strict=True):
            starts = [k for k in range(repeat.traced) if repeat.ops(k)[0] in part.ops]
            if not count:
                continue
            segments += self._plain(own, range(at, repeat.ops(starts[0]).start))
            for k in starts:
                more = count - len(starts) if k == MODEL else 0
                names = tuple(_block(p) for p in repeat.paths[k : k + more + 1])
                segments.append(self._segment(own, repeat.ops(k), 1 + more, names))
            at = repeat.ops(starts[-1]).stop
        segments += self._plain(own, range(at, part.ops.stop))
        return self._finished(segments)

    def _finished(self, segments: Sequence[Segment]) -> Schedule:
        cluster = self.scheduler.cluster
        self._unread()
        return Schedule(
            levels=tuple(level.name for level in cluster.levels),
            segments=tuple(s for s in segments if s.operators),
            resident={kind: size for kind, size in self.resident.items() if size},
            peak_flops=cluster.device.peak(self._dtype()),
            passes=self.whole.decoded.micro_batches,
            updating=self.copies * self.resident["optimizer"],
        )

    def _of(self, decoded: DecodedChoice) -> OperatorTasks:
        if decoded.choice not in self.tasks:
            self.tasks[decoded.choice] = OperatorTasks(
                decoded,
                self.scheduler.facts,
                self.scheduler.useful_flops,
                self.part,
            )
        return self.tasks[decoded.choice]

    def _plain(self, who: OperatorTasks, ops: Sequence[int]) -> list[Segment]:
        """Operators outside a run, by the block that they are in."""
        blocks = groupby(ops, lambda i: block_of(self.scheduler.graph.ops[i].origin.module))
        return [self._segment(who, list(each), 1, (name,)) for name, each in blocks]

    def _segment(
        self, who: OperatorTasks, ops: Sequence[int], count: int, names: tuple[str, ...]
    ) -> Segment:
        made = [who.made(op) for op in ops]
        for _, resident in made:
            for kind, size in resident.items():
                self.resident[kind] = self.resident.get(kind, 0.0) + count * size
        operators = tuple(operator for operator, _ in made if _matters(operator))
        first = names[0] if count == 1 else f"{names[0]} to {names[-1].rpartition('.')[2]}"
        return Segment(first, operators, count, names if count > 1 else ())

    def _unread(self) -> None:
        """Inputs and buffers are whole everywhere; so are parameters that no operator reads.

        A part has those that it reads, and what nothing reads goes with the first.
        """
        graph, part = self.scheduler.graph, self.part
        read = {t for op in graph.ops for t in op.inputs}
        here = {t for op in [*part.makes_again(graph), *part.ops] for t in graph.ops[op].inputs}
        elsewhere = read - here
        for index, tensor in enumerate(graph.tensors):
            if index in elsewhere or (index not in read and part.ops.start):
                continue
            if tensor.role in ("input", "buffer"):
                times = self.whole.decoded.micro_batches if tensor.role == "input" else 1
                size = times * tensor.type.bytes
                self.resident["buffers"] += size
            elif tensor.role == "parameter" and index not in read:
                self.resident["parameters"] += graph.kept_type(index).bytes

    def _dtype(self) -> str:
        """The dtype of most products."""
        flops: dict[str, float] = {}
        graph = self.scheduler.graph
        for index, op in enumerate(graph.ops):
            if self.scheduler.subdims.rules[index].rule.engine == "matrix":
                dtype = graph.precision.product(graph.tensors[op.results[0]].type.dtype)
                if access_of(graph, self.scheduler.subdims, index).is_float8:
                    dtype = "float8"
                flops[dtype] = flops.get(dtype, 0.0) + self.scheduler.useful_flops(index)
        return max(flops, key=flops.__getitem__, default="float32")


def _share(task: Task, part: float) -> Task:
    """A part of some work, without its memory."""
    seconds, host = part * task.seconds, part * task.host_seconds
    return Task(task.kind, seconds, task.mode, turn=task.turn, host_seconds=host)


def _matters(operator: Operator) -> bool:
    return bool(operator.forward or operator.backward or operator.update or operator.again)


def _block(paths: Sequence[str]) -> str:
    return paths[0] if paths else ""


def block_of(module: str) -> str:
    """The outermost numbered module on a path, or its first name."""
    parts = module.split(".")
    for at, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: at + 1])
    return ""
