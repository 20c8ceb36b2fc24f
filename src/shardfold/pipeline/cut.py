"""Where a model is cut into stages, at the layers that it repeats, and the cluster with it.

A layer is a numbered member of a list of modules, such as `layers.3`. What stands before the first
goes with the first stage, what follows the last with the last; what stands between two goes with
the one before. People cut in two ways:

    equal     as many layers in each stage (Megatron-LM); where that does not go, the embedding and
              the head count as a layer each, and earlier stages take what is left (torchtitan)
    balanced  a stage ends with the layer that takes it past its share of the products with weights
              (nanotron); a large head may leave nothing but the loss for the last

A graph may hold only a few periods of a run of layers. A stage inside such a run is described by
as many of them, with a count. A cluster is cut along its outermost links first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from shardfold.cluster import Cluster, Mesh
from shardfold.cluster.mesh import Axis
from shardfold.errors import ClusterError, InputError
from shardfold.graph import Graph, Operand, Repeat
from shardfold.graph.graph import shared_prefix, without
from shardfold.graph.repeats import places
from shardfold.simulate.parts import Part
from shardfold.simulate.tasks import block_of

FEWEST_OPERATORS = 4  # a shorter member of a list is no layer


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of a model, and where each begins in its graph."""

    graph: Graph
    paths: tuple[str, ...]  # of every layer of the model
    starts: tuple[int, ...]  # of every layer: the operator that it begins with, or its model does
    end: int  # the operator after the last layer

    @classmethod
    def of(cls, graph: Graph) -> Layers:
        """Find them in a graph."""
        starts, end = _starts(graph)
        places: list[int] = []
        paths: list[str] = []
        runs = {repeat.start: repeat for repeat in graph.repeats}
        for start in starts:
            inside = next((r for r in graph.repeats if r.start <= start < r.end), None)
            if inside is None:
                places.append(start)
                paths.append(block_of(graph.ops[start].origin.module))
            elif start in runs:  # the whole run
                for period, _ in inside.order():
                    places.append(inside.ops(period).start)
                paths += [each[0] for each in inside.paths]
        return cls(graph, tuple(paths), tuple(places), end)

    def __len__(self) -> int:
        return len(self.paths)

    def parts(self, counts: Sequence[int], after_head: int = 0) -> list[Part]:
        """The operators of stages with so many layers each, some of them after the head's."""
        spans = list(pairwise([0, *accumulate(counts)]))
        tail = self._after_head(after_head)
        last = len(counts) - 1 - after_head
        starts = [0, *(self._start(*each) for each in spans[1 : last + 1]), *tail]
        stops = [*(self._stop(*each) for each in spans[:last]), *tail, len(self.graph.ops)]
        return [
            Part(range(start, stop), tuple(self._periods(r, *each) for r in self.graph.repeats))
            for start, stop, each in zip(starts, stops, spans, strict=True)
        ]

    def begins(self, counts: Sequence[int]) -> list[int]:
        """The operator of the model that each stage begins with, where no run is cut short."""
        place, found = places(self.graph), [0]
        for layer in list(accumulate(counts))[:-1]:
            run = self._run(layer) if layer < len(self) else None
            start = self.end if layer == len(self) else self.starts[layer]
            if run is not None:
                repeat, at = run
                found.append(place[repeat.start] + (layer - at) * repeat.length)
            else:
                found.append(place[start])
        return found

    def sums(self, each: Sequence[float]) -> tuple[float, list[float], float]:
        """Of something that every operator has: before the first layer, in each, after the last."""
        if not self.starts:
            return sum(each), [], 0.0
        stops = [*self.starts[1:], self.end]
        lengths = {r.ops(k).start: r.length for r in self.graph.repeats for k in range(r.traced)}
        inside = [
            sum(each[start : start + lengths[start] if start in lengths else stop])
            for start, stop in zip(self.starts, stops, strict=True)
        ]
        return sum(each[: self.starts[0]]), inside, sum(each[self.end :])

    def _after_head(self, stages: int) -> list[int]:
        """Where stages begin that have nothing but what follows the head: casts, and the loss."""
        tensors, ops = self.graph.tensors, self.graph.ops
        if not stages:
            return []
        reads = ([tensors[t].role for t in op.inputs] for op in ops)
        weighted = [k for k, roles in enumerate(reads) if "parameter" in roles]
        found = [weighted[-1] + 1, len(ops) - 1][:stages]
        if len(found) < stages or found != sorted(set(found)) or found[-1:] == [len(ops)]:
            raise InputError(
                f"The head is so much of the work that {stages} stages come after it, and some "
                "have nothing to do. Try fewer stages."
            )
        return found

    def _run(self, layer: int) -> tuple[Repeat, int] | None:
        """The run that a layer is in, and the run's first layer."""
        for repeat in self.graph.repeats:
            at = self.starts.index(repeat.start)
            if at <= layer < at + repeat.count:
                return repeat, at
        return None

    def _periods(self, repeat: Repeat, first: int, stop: int) -> int:
        at = self.starts.index(repeat.start)
        return max(0, min(stop, at + repeat.count) - max(first, at))

    def _start(self, first: int, stop: int) -> int:
        if first == len(self):
            return self.end
        found = self._run(first)
        if found is None:
            return self.starts[first]
        repeat, at = found
        inside = self._periods(repeat, first, stop)
        short = stop >= at + repeat.count and inside < repeat.traced
        return repeat.ops(repeat.traced - inside).start if short else repeat.start

    def _stop(self, first: int, stop: int) -> int:
        if stop == len(self):
            return self.end
        found = self._run(stop)
        if found is None or stop == found[1]:
            return self.starts[stop]
        repeat = found[0]
        inside = min(self._periods(repeat, first, stop), repeat.traced)
        return repeat.start + inside * repeat.length


def _starts(graph: Graph) -> tuple[list[int], int]:
    """The operators that layers of the graph begin with, and the one after the last layer."""
    members: list[tuple[int, int, int]] = []  # first and last operator, and how many
    path = ""
    for index, op in enumerate(graph.ops):
        block = block_of(op.origin.module)
        if block and block != path:
            path = block
            members.append((index, index, 1))
        elif block:
            first, _, count = members[-1]
            members[-1] = (first, index, count + 1)
    found = [each for each in members if each[2] >= FEWEST_OPERATORS]
    return [first for first, _, _ in found], found[-1][1] + 1 if found else len(graph.ops)


def leaves_out_layers(graph: Graph) -> bool:
    """Whether a graph leaves out what is not one layer each, between which it cannot be cut.

    Periods may be several layers, or parts of one: blocks within the stages of a ConvNeXt.
    """
    starts, _ = _starts(graph)
    return any(
        len(paths) > 1 or repeat.start not in starts
        for repeat in graph.repeats
        for paths in repeat.paths[:1]
    )


def equal(layers: int, stages: int) -> list[int]:
    """How many layers each stage has.

    >>> equal(8, 4), equal(70, 12)
    ([2, 2, 2, 2], [5, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 5])
    """
    if layers % stages == 0:
        return [layers // stages] * stages
    each, left = divmod(layers + 2, stages)
    found = [each + (stage < left) for stage in range(stages)]
    found[0] -= 1
    found[-1] -= 1
    return found


def balanced(products: Sequence[float], stages: int) -> tuple[list[int], int]:
    """As `equal`, by the work of the products with weights: of every layer, and of the head last.

    A head that is more than a stage's share leaves stages after it, which have but the loss: how
    many is the second result.

    >>> balanced([1.0] * 16 + [4.0], 4), balanced([1.0] * 16 + [4.0], 8)
    (([6, 5, 5, 0], 0), ([3, 3, 2, 3, 2, 3, 0, 0], 1))
    """
    total = sum(products)
    found, stage = [0] * stages, 0
    for done in list(accumulate(products))[:-1]:
        found[stage] += 1
        if done > total * (stage + 1) / stages:
            stage += 1
    return found, stages - 1 - stage


def check_layers(layers: Layers, devices: int, chunks: int) -> None:
    """Refuse more stages than layers."""
    stages, count = devices * chunks, len(layers)
    if count >= stages:
        return
    stated = f"pp={devices}" + (f" x virtual={chunks}" if chunks > 1 else "")
    if count < 2:
        raise InputError(f"{stated}: the model has no list of layers to cut. Leave pp out.")
    fewer = count // devices
    smallest = f"virtual={fewer}" if chunks > 1 and fewer else f"pp={count // chunks or 1}"
    raise InputError(
        f"{stated} makes {stages} stages, and the model has {count} layers ({layers.paths[0]} to "
        f"{layers.paths[-1]}). Try {smallest}."
    )


def in_words(layers: Layers, counts: Sequence[int], stages: Sequence[int]) -> str:
    """The layers of some stages as text: `all before, layers.0 to 3, 16 to 19`."""
    ends, found, known = [0, *accumulate(counts)], [], ""
    shared = shared_prefix(layers.paths)
    for stage in stages:
        here = [without(path, shared) for path in layers.paths[ends[stage] : ends[stage + 1]]]
        if not here:
            continue
        (first, begin), (last, end) = (path.rsplit(".", 1) for path in (here[0], here[-1]))
        text = begin if first == known else here[0]
        if len(here) > 1:
            text += f" to {end if last == first else here[-1]}"
        found.append(text)
        known = last
    before = ["all before"] if 0 in stages else []
    after = ["all after"] if len(counts) - 1 in stages else []
    return ", ".join([*before, *found, *after]) or "no layer"


@dataclass(frozen=True, slots=True)
class Untied:
    """A graph in which every stage has its own copy of the parameters that it reads."""

    graph: Graph
    tied: tuple[tuple[int, ...], ...]  # copies of one parameter, by stage
    stages: tuple[tuple[int, ...], ...]  # and which stages these are


def untie(graph: Graph, parts: Sequence[Part]) -> Untied:
    """Give each stage its own copy; gradients of the copies are to be summed."""
    tensors, ops = list(graph.tensors), list(graph.ops)
    tied, stages = [], []
    for tensor, readers in graph.readers().items():
        if graph.tensors[tensor].role != "parameter" or len(readers) < 2:
            continue
        homes = [_homes(graph, parts, op) for op, _ in readers]
        if len({period for _, period in homes}) == 1 and homes[0][1] is not None:
            continue  # of one layer of a run
        if len({stage for places, _ in homes for stage in places}) == 1:
            continue
        layers = [
            places
            for (op, _), (places, _) in zip(readers, homes, strict=True)
            if block_of(graph.ops[op].origin.module)
        ]
        if len({stage for places in layers for stage in places}) > 1:
            raise InputError(
                f"The parameter {graph.tensors[tensor].name} is read by layers of several stages: "
                "a block that is used again and again cannot be cut. Leave pp out."
            )
        copies: dict[int, int] = {}
        for (op, position), (of_op, _) in zip(readers, homes, strict=True):
            (stage,) = of_op
            if stage not in copies:
                copies[stage] = len(tensors) if copies else tensor
                if copies[stage] == len(tensors):
                    tensors.append(graph.tensors[tensor])
            operands = list(ops[op].operands)
            operands[position] = Operand(operands[position].name, copies[stage])
            ops[op] = replace(ops[op], operands=tuple(operands))
        tied.append(tuple(copies.values()))
        stages.append(tuple(copies))
    found = replace(graph, tensors=tuple(tensors), ops=tuple(ops)) if tied else graph
    return Untied(found, tuple(tied), tuple(stages))


def _homes(
    graph: Graph, parts: Sequence[Part], op: int
) -> tuple[tuple[int, ...], tuple[int, int] | None]:
    """The stages that run an operator or what it stands for, and the period of a run it is in."""
    stages = tuple(number for number, part in enumerate(parts) if op in part.ops)
    for number, repeat in enumerate(graph.repeats):
        period = repeat.period_of(op)
        if period is not None:
            return stages, (number, period)
    return stages, None


@dataclass(frozen=True, slots=True)
class StageLinks:
    """The part of the cluster that each stage has, and a mesh of the links between them."""

    clusters: tuple[Cluster, ...]  # by part
    between: Mesh
    groups: tuple[int, ...]  # devices in one group of each level of the whole cluster

    @property
    def stage(self) -> Cluster:
        """The first part: where all are equal, any."""
        return self.clusters[0]

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many devices each part has."""
        return tuple(cluster.size for cluster in self.clusters)

    def hop(self, first: int, second: int) -> int:
        """The axis that a message between two stages crosses: the outermost that differs."""
        ends = list(accumulate(self.sizes, initial=0))
        low, high = min(first, second), max(first, second)
        begin, end = ends[low], ends[high + 1] - 1
        for number, axis in enumerate(self.between.axes):
            group = self.groups[axis.level]
            if begin // group != end // group:
                return number
        raise AssertionError(f"{first} and {second} are one stage.")

    def sends_parts(self, hop: int, axes: Sequence[Axis], part: int = 0) -> bool:
        """Whether devices along some axes of a part share out a message that all of them have.

        Each takes a part of it over the links between stages, and they gather it, where their own
        links are faster: further in.
        """
        level = self.between.axes[hop].level
        outer = len(self.groups) - len(self.clusters[part].levels)
        return bool(axes) and min(axis.level for axis in axes) + outer > level


def cut_cluster(cluster: Cluster, stages: int) -> StageLinks:
    """Equal parts of a cluster, for so many stages."""
    left, axes, levels = stages, list[Axis](), []
    for number, level in enumerate(cluster.levels):
        size = math.gcd(left, level.size)
        if size not in (left, level.size):
            break
        left //= size
        levels.append(replace(level, size=level.size // size))
        if size > 1:
            axes.append(Axis(level.name, size, number))
    if left > 1:
        raise ClusterError(
            f"pp={stages} does not lie along the cluster {cluster.name}: stages take whole groups "
            f"of its levels ({' x '.join(f'{each.size} {each.name}' for each in cluster.levels)}), "
            f"the outermost first. Try pp={_nearest(cluster, stages)}."
        )
    stage = replace(cluster, levels=tuple(levels))
    return StageLinks((stage,) * stages, Mesh(tuple(axes)), _groups(cluster))


def cut_unequally(cluster: Cluster, sizes: Sequence[int]) -> StageLinks:
    """Parts of a cluster of so many devices each, in the order of its devices."""
    if sum(sizes) != cluster.size or min(sizes) < 1:
        stated = "+".join(map(str, sizes))
        raise ClusterError(f"Parts of {stated} devices are not all {cluster.size} of the cluster.")
    if len(set(sizes)) == 1:
        return cut_cluster(cluster, len(sizes))
    firsts = accumulate(sizes, initial=0)
    parts = tuple(_part(cluster, *each) for each in zip(firsts, sizes, strict=False))
    axes = [Axis(level.name, level.size, n) for n, level in enumerate(cluster.levels)]
    return StageLinks(parts, Mesh(tuple(axes)), _groups(cluster))


def _part(cluster: Cluster, first: int, size: int) -> Cluster:
    """Some devices in a row: several whole groups of a level, within one group of the next."""
    for number, (level, group) in enumerate(zip(cluster.levels, _groups(cluster), strict=True)):
        if size < group:
            continue
        around = group * level.size
        if size % group or first % group or first // around != (first + size - 1) // around:
            break
        own = replace(level, size=size // group)
        return replace(cluster, levels=(own, *cluster.levels[number + 1 :]))
    raise ClusterError(
        f"A part of {size} devices from number {first} on does not lie along the cluster "
        f"{cluster.name}: take whole groups of its levels "
        f"({' x '.join(f'{each.size} {each.name}' for each in cluster.levels)}), or devices of "
        "one group."
    )


def _groups(cluster: Cluster) -> tuple[int, ...]:
    """How many devices are in one group of each level."""
    sizes = [level.size for level in cluster.levels]
    return tuple(math.prod(sizes[number + 1 :]) for number in range(len(sizes)))


def _nearest(cluster: Cluster, stages: int) -> int:
    """The nearest number of stages that the levels allow."""
    found, outside = {1}, 1
    for level in cluster.levels:
        found |= {outside * n for n in range(1, level.size + 1) if level.size % n == 0}
        outside *= level.size
    return min(found, key=lambda number: (abs(number - stages), number))
