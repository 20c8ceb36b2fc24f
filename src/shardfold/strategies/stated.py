"""A strategy as people state it: degrees and words, such as `fsdp=32 tp=8 sp recompute=full`.

    dp=N             replicas of the model; left out, whatever devices the others leave
    fsdp=N           devices over which parameters, gradients and optimizer state are sharded
    zero=0|1|2|3     what is sharded: nothing, optimizer state, gradients too, parameters too
    reshard=never    of fsdp: parameters are gathered once for forward and backward; or always
    tp=N             tensor parallel: heads, feed-forward features and vocabulary, innermost
    sp               sequence parallel between the products (with tp)
    ep=N             expert parallel: of the devices that split the batch, the innermost N send
                     their rows to each other's experts
    cp=N             context parallel: N devices split the sequence between them
    attention=ulysses  of cp: its heads are split by all-to-all; gather: keys are gathered, as
                     Llama 3 does it; ring: keys go round
    recompute=full   activation checkpointing of every block; selective: of attention, as
                     Megatron-LM does it; products: of all but attention and every second
                     product, as torchtitan does it; or none
    micro-batches=N  gradient accumulation
    pp=N             pipeline stages of equal layers
    schedule=1f1b    of the stages: gpipe, 1f1b, interleaved or zbv
    virtual=N        chunks of the model on each device, of schedule=interleaved

Degrees lie on the cluster as in torchtitan and Megatron-LM: tp innermost, then cp, fsdp, dp, pp.
Devices along cp share parameters as those along fsdp do, or along dp, where nothing is sharded.
`zero=N` without `fsdp` shards over all replicas, as `dp=8 zero=1` says elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardfold.cluster import Cluster, Mesh
from shardfold.cluster.mesh import mesh_of
from shardfold.costs import Vertex
from shardfold.errors import ClusterError, InputError, nearest
from shardfold.pipeline import SCHEDULES, Pipeline
from shardfold.strategies.baselines import Axes, Choice, Setting, all_split, complete, is_split
from shardfold.strategies.split_preferences import (
    CONTEXTS,
    Classes,
    Roles,
    Way,
    Ways,
    choose_ways,
    parts_over,
)

DEGREES = ("pp", "dp", "fsdp", "cp", "tp")
NUMBERS = (*DEGREES, "ep", "zero", "micro-batches", "virtual")
CHOICES = {
    "recompute": ("none", "selective", "products", "full"),
    "schedule": tuple(SCHEDULES),
    "reshard": ("always", "never"),
    "attention": CONTEXTS,
}
WORDS = (*NUMBERS, "sp", *CHOICES)
ZERO = {0: "nothing", 1: "optimizer state", 2: "gradients and optimizer state", 3: "parameters"}


@dataclass(frozen=True, slots=True)
class Stated:
    """Degrees that multiply to the devices, and what goes with them."""

    replicas: int  # that do not share a parameter's parts
    shards: int
    tensor: int
    zero: int  # the stage; 0 where there is one shard
    sequence: bool = False
    recompute: str = "none"
    micro_batches: int = 1
    stages: int = 1  # parts of the cluster, in a row
    schedule: str = "1f1b"
    chunks: int = 1  # of the model on each part
    reshards: bool = True  # parameters in parts are dropped after forward, and gathered again
    experts: int = 1  # devices that rows are sent between, of those that split the batch
    context: int = 1  # innermost of the shards, or of the replicas: they split the sequence
    attention: str = "ulysses"  # how it is split where the sequence is

    def __str__(self) -> str:
        is_zero = self.zero in (1, 2)
        names = {"fsdp": "dp"} if is_zero and self.replicas == 1 else {}
        words = [
            *([f"pp={self.stages}"] if self.stages > 1 else ()),
            *(f"{names.get(name, name)}={n}" for name, n in self._stated_degrees() if n > 1),
            *([f"zero={self.zero}"] if is_zero else ()),
            *([] if self.reshards else ["reshard=never"]),
            *(["sp"] if self.sequence else ()),
            *([f"attention={self.attention}"] if self.attention != "ulysses" else ()),
            *([f"ep={self.experts}"] if self.experts > 1 else ()),
            *([f"recompute={self.recompute}"] if self.recompute != "none" else ()),
            *([f"micro-batches={self.micro_batches}"] if self.micro_batches > 1 else ()),
            *([f"schedule={self.schedule}"] if self.stages > 1 else ()),
            *([f"virtual={self.chunks}"] if self.chunks > 1 and self.schedule != "zbv" else ()),
        ]
        return " ".join(words) or "one device"

    @property
    def degrees(self) -> tuple[tuple[str, int], ...]:
        """Of each stage, by the words that state them, outermost first."""
        return (("dp", self.replicas), ("fsdp", self.shards), ("tp", self.tensor))

    def _stated_degrees(self) -> list[tuple[str, int]]:
        """As they were stated: the devices along cp by themselves."""
        owner = "fsdp" if self.shards > 1 else "dp"
        found = [(n, d // self.context if n == owner else d) for n, d in self.degrees]
        return [*found[:-1], ("cp", self.context), found[-1]]

    @property
    def data(self) -> int:
        """The devices that share parameters: they split the batch, and along cp the sequence."""
        return self.replicas * self.shards

    @property
    def batch_parts(self) -> int:
        """The parts of the batch."""
        return self.data // self.context


def parse_strategy(text: str, devices: int) -> Stated:
    """The strategy that a text states for so many devices.

    >>> parse_strategy("fsdp=4 tp=8 sp", 64)
    Stated(replicas=2, shards=4, tensor=8, zero=3, sequence=True, recompute='none', \
micro_batches=1, stages=1, schedule='1f1b', chunks=1, reshards=True, experts=1, context=1, \
attention='ulysses')
    """
    numbers, chosen, sequence = dict[str, int](), dict[str, str](), False
    for word in text.replace(",", " ").split():
        name, _, value = word.partition("=")
        if name in numbers or name in chosen or (name == "sp" and sequence):
            raise InputError(f"The strategy states {name} twice: {text!r}.")
        if name in NUMBERS:
            numbers[name] = _number(name, value)
        elif name == "sp":
            sequence = _switch(word, value)
        elif name in CHOICES:
            if value not in CHOICES[name]:
                raise InputError(f"Unknown {word}. {nearest(value, CHOICES[name])}")
            chosen[name] = value
        else:
            raise InputError(
                f"Unknown word {name!r} in the strategy {text!r}. {nearest(name, WORDS)}"
            )
    filled = _filled(numbers, chosen.get("recompute", "none"), sequence, devices)
    reshards = chosen.get("reshard") != "never"
    if not reshards and filled.zero != 3:
        raise InputError("reshard=never goes with fsdp=2 or more: nothing else is gathered.")
    if "attention" in chosen and filled.context == 1:
        raise InputError(f"attention={chosen['attention']} goes with cp=2 or more.")
    filled = replace(filled, attention=chosen.get("attention", "ulysses"))
    return replace(filled, reshards=reshards, **_pipeline(numbers, chosen.get("schedule")))


def _pipeline(numbers: dict[str, int], schedule: str | None) -> dict[str, Any]:
    """The stages, their schedule and chunks; checked, as far as no model is needed for it."""
    stages, chunks = numbers.get("pp", 1), numbers.get("virtual", 2 if schedule == "zbv" else 1)
    if stages == 1:
        for name, given in (("schedule", schedule), ("virtual", numbers.get("virtual"))):
            if given is not None:
                raise InputError(f"{name}={given} goes with pp=2 or more stages.")
        return {}
    name = schedule or ("interleaved" if chunks > 1 else "1f1b")
    Pipeline(name, stages, numbers.get("micro-batches", 1), chunks)
    return {"stages": stages, "schedule": name, "chunks": chunks}


def _filled(numbers: dict[str, int], recompute: str, sequence: bool, devices: int) -> Stated:
    tensor, zero = numbers.get("tp", 1), numbers.get("zero")
    given = {name: numbers[name] for name in DEGREES if name in numbers}
    product = math.prod(given.values())
    left = devices // product if devices % product == 0 else 0
    if left == 0 or (left > 1 and "dp" in given):
        stated = " x ".join(f"{name}={n}" for name, n in given.items())
        raise InputError(
            f"{stated} makes {product} devices, and the cluster has {devices}. The degrees must "
            "multiply to the number of devices."
        )
    replicas, shards = given.get("dp", left), given.get("fsdp", 1)
    if zero == 0 and shards > 1:
        raise InputError(f"fsdp={shards} shards, and zero=0 does not: leave one of them out.")
    if zero is not None and zero > 0 and "fsdp" not in given:
        replicas, shards = 1, replicas
    context = given.get("cp", 1)
    if shards > 1 or zero:
        shards *= context
    else:
        replicas *= context
    if sequence and tensor == 1:
        raise InputError("sp goes with tp=2 or more: it splits what stands between the products.")
    stage = (3 if zero is None else zero) if shards > 1 else 0
    passes, experts = numbers.get("micro-batches", 1), numbers.get("ep", 1)
    _check_experts(experts, replicas, shards)
    if experts > 1 and context > 1:
        raise InputError(f"ep={experts} with cp={context} is not described yet: state one of them.")
    found = Stated(replicas, shards, tensor, stage, sequence, recompute, passes)
    return replace(found, experts=experts, context=context)


def _check_experts(experts: int, replicas: int, shards: int) -> None:
    """Refuse a group of experts that does not lie along the devices that split the batch."""
    outside = experts // shards if experts % shards == 0 else 1
    if experts > 1 and shards % experts and (experts % shards or replicas % outside):
        raise InputError(
            f"ep={experts} is a part of the devices that split the batch, dp x fsdp = {replicas} x "
            f"{shards}: it must divide fsdp, or be a multiple of it that divides both."
        )


def _number(name: str, value: str) -> int:
    least = 0 if name == "zero" else 1
    if not value.isdecimal() or int(value) < least or (name == "zero" and int(value) > 3):
        allowed = "0, 1, 2 or 3" if name == "zero" else "1 or more"
        raise InputError(f"{name}={value} is no degree: write a whole number, {allowed}.")
    return int(value)


def _switch(word: str, value: str) -> bool:
    if value not in ("", "on", "off", "1", "0"):
        raise InputError(f"{word!r} is neither sp nor sp=off.")
    return value not in ("off", "0")


@dataclass(frozen=True, slots=True)
class Placed:
    """The mesh of a strategy, and which of its axes each degree has."""

    mesh: Mesh
    replicas: Axes
    shards: Axes
    tensor: Axes
    experts: Axes = ()  # of the data's
    context: Axes = ()

    @property
    def data(self) -> Axes:
        """The axes along which parameters are shared: of the batch, and of the sequence."""
        return (*self.replicas, *self.shards)

    @property
    def batch(self) -> Axes:
        """The axes of the batch."""
        return tuple(axis for axis in self.data if axis not in self.context)


def place(stated: Stated, cluster: Cluster) -> Placed:
    """Lay the degrees of a stage on its cluster's levels: tp innermost, then fsdp, then dp."""
    owners: list[list[tuple[str, int]]] = [[] for _ in cluster.levels]  # innermost first
    level, free = len(cluster.levels) - 1, [each.size for each in cluster.levels]
    for name, degree in _cut(stated):
        rest = degree
        while rest > 1:
            if free[level] == 1:
                level -= 1
                continue
            size = math.gcd(rest, free[level])
            if size == 1 or size not in (rest, free[level]):
                here = cluster.levels[level]
                raise ClusterError(
                    f"{name.split()[-1]}={degree} does not lie along the cluster: {rest} of it "
                    f"meet {free[level]} places of the level {here.name} ({here.size} in all). "
                    "Choose degrees that divide the levels, or multiples of them."
                )
            owners[level].append((name, size))
            rest, free[level] = rest // size, free[level] // size
    outer_first = [list(reversed(each)) for each in owners]
    mesh = mesh_of(cluster.levels, [[size for _, size in each] for each in outer_first])
    names = [name.split() for each in outer_first for name, _ in each]
    replicas, shards, tensor, experts, context = (
        tuple(a for a, words in enumerate(names) if wanted in words)
        for wanted in ("dp", "fsdp", "tp", "ep", "cp")
    )
    return Placed(mesh, replicas, shards, tensor, experts, context)


def _cut(stated: Stated) -> list[tuple[str, int]]:
    """The degrees, innermost first, each of the data's in what experts share and the rest."""
    if stated.context > 1:
        owner, other = ("fsdp", "dp") if stated.shards > 1 else ("dp", "fsdp")
        sizes = dict(stated.degrees)
        return [
            ("tp", stated.tensor),
            *((f"{owner} cp", stated.context), (owner, sizes[owner] // stated.context)),
            (other, sizes[other]),
        ]
    inside = math.gcd(stated.experts, stated.shards)
    outside = stated.experts // inside
    return [
        ("tp", stated.tensor),
        *(("fsdp ep", inside), ("fsdp", stated.shards // inside)),
        *(("dp ep", outside), ("dp", stated.replicas // outside)),
    ]


def choose_stated(setting: Setting, stated: Stated, placed: Placed) -> Choice:
    """The choice that a strategy states for a model; an error where a size does not allow it."""
    roles = setting.roles
    tried = (roles.tensor_parallel, roles.seq) if stated.sequence else (roles.tensor_parallel,)
    ways = _ways(placed, roles.batch, roles.seq, tried)
    if stated.tensor > 1 and not roles.heads:
        raise InputError(f"tp={stated.tensor}: the model has no attention heads to split.")
    if stated.sequence and not roles.seq:
        raise InputError("sp: the model has no sequence of tokens.")
    by_expert = _by_expert(setting, stated, placed, tried)
    own = {**by_expert, **_by_context(roles, stated, placed)}
    choice = choose_ways(setting.tables, setting.subdims, lambda op: own.get(op, ways))
    if not all_split(setting, choice, placed.experts, by_expert):
        raise InputError(f"ep={stated.experts}: the model's experts cannot be split into as many.")
    if not all_split(setting, choice, placed.context, roles.attention):
        what = "heads" if stated.attention == "ulysses" else "positions"
        raise InputError(f"cp={stated.context}: attention's {what} cannot be split into as many.")
    if stated.tensor > 1 and not is_split(setting, choice, placed.tensor, roles):
        raise InputError(
            f"tp={stated.tensor}: the model's heads or feed-forward features do not divide by it."
        )
    for _ in _unsplit(setting, choice, placed.batch):
        raise InputError(f"The batch cannot be split into dp x fsdp = {stated.batch_parts} parts.")
    for where in _unsplit(setting, choice, placed.context):
        raise InputError(
            f"cp={stated.context}: {where} has no sequence that can be split into as many parts."
        )
    return _stored(setting, choice, stated, placed)


def _ways(placed: Placed, batch: Classes, seq: Classes, tried: tuple[Classes, ...]) -> Ways:
    """How most operators are split."""
    split = (Way(placed.batch, (batch,)), Way(placed.tensor, tried))
    return (*split, Way(placed.context, (seq,))) if placed.context else split


def _by_context(roles: Roles, stated: Stated, placed: Placed) -> dict[int, Ways]:
    """How attention is split where the sequence is, along the same devices."""
    if stated.context == 1:
        return {}
    attended = roles.attended(stated.attention)
    if not roles.seq or not roles.attention or not attended:
        raise InputError(f"cp={stated.context}: the model has no attention over a sequence.")
    by_head = Way(placed.tensor, (roles.heads,))
    ways = (Way(placed.batch, (roles.batch,)), Way(placed.context, (attended,)), by_head)
    return dict.fromkeys(roles.attention, ways)


def _by_expert(
    setting: Setting, stated: Stated, placed: Placed, tried: tuple[Classes, ...]
) -> dict[int, Ways]:
    """How the blocks of experts are split, where rows are sent to them."""
    roles = setting.roles
    if stated.experts == 1:
        return {}
    if not roles.dispatch:
        seen = next(_for_all_rows(setting), "")
        raise InputError(
            f"ep={stated.experts}: the model has no experts that rows can be sent to{seen}."
        )
    rest = tuple(a for a in placed.data if a not in placed.experts)
    ways = (
        Way(placed.experts, (roles.dispatch,)),
        Way(rest, (roles.batch,)),
        Way(placed.tensor, tried),
    )
    return dict.fromkeys(roles.routed, ways)


def _for_all_rows(setting: Setting) -> Iterator[str]:
    """What is said of products with the matrices of all experts, each of which meets all rows."""
    graph = setting.graph
    for op, rule in zip(graph.ops, setting.subdims.rules, strict=True):
        kinds = [graph.tensors[t].role for t in op.inputs]
        if rule.rule.engine == "matrix" and kinds == ["activation", "parameter"]:
            sides = (*rule.rule.operands, rule.rule.results[0])
            rows, weight, made = ({f for dim in each for f in dim} for each in sides)
            if rows & weight & made:
                yield f": {op.origin} is a product of all rows with every matrix ({op.kind})"


def _unsplit(setting: Setting, choice: Choice, axes: Axes) -> Iterator[str]:
    """Products and convolutions of the batch that split nothing over one of the axes."""
    rules, ops = setting.subdims.rules, setting.graph.ops
    for v, vertex in enumerate(setting.tables.vertices):
        is_product = vertex.space is not None and rules[vertex.index].rule.engine == "matrix"
        if not is_product or setting.batch[vertex.index] is None or vertex.space is None:
            continue
        if not parts_over(vertex.space, choice[v], axes):
            yield str(ops[vertex.index].origin)


def _stored(setting: Setting, choice: Choice, stated: Stated, placed: Placed) -> Choice:
    """The same splits, with every parameter split over the shards as far as its sizes allow.

    Over the axes of `tp`, and experts over those of `ep`, a parameter is kept as it is used, which
    costs nothing.
    """
    is_sharded = stated.zero == 3  # less of it leaves the parameters whole
    whole, parted = (placed.replicas, placed.shards) if is_sharded else (placed.data, ())
    ops = setting.graph.ops
    routed = {t for op in setting.roles.routed for t in ops[op].inputs} if placed.experts else set()

    def allowed(vertex: Vertex) -> NDArray[np.bool_] | None:
        if vertex.storage is None:
            return None
        split = vertex.storage.layouts >= 0
        sent = placed.experts if vertex.index in routed else ()
        copied = [a for a in whole if a not in sent]
        shards = split[:, list({*parted, *sent})].sum(axis=1)
        shards[split[:, copied].any(axis=1)] = -1
        mask: NDArray[np.bool_] = np.equal(shards, shards.max())
        again = vertex.storage.regathers == (is_sharded and stated.reshards)
        return mask & again if (mask & again).any() else mask

    vertices = enumerate(setting.tables.vertices)
    fixed = {v: choice[v] for v, vertex in vertices if vertex.storage is None}
    return complete(setting.tables, fixed, allowed)
