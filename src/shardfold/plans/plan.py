"""A plan: every decision, what it costs, and where it came from. Plain values, ready for JSON."""

from __future__ import annotations

import math
from collections.abc import Sized
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar

import msgspec

from shardfold.planner.options import MOST_MICRO_BATCHES, Request
from shardfold.simulate import Schedule, Simulation

if TYPE_CHECKING:
    from pathlib import Path

    from shardfold.graph import Graph
    from shardfold.plans.batch import Sampler

Batch = TypeVar("Batch")

VERSION = 2
RENAMED = {"cuts": "micro_batch_dims", "noted": "with_notes"}  # what plans had before

# What a file may say. A stranger's file with absurd figures is refused as it is read.
Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Count = Annotated[int, msgspec.Meta(ge=1, le=2**40)]
AxisSize = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Dim = Annotated[int, msgspec.Meta(ge=0, le=1000)]
Share = Annotated[int, msgspec.Meta(ge=1, le=MOST_MICRO_BATCHES)]
MOST_AXES = 8  # of a mesh: configurations grow exponentially with them


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the plan's parts: immutable, strict about what a file may contain."""


class AxisEntry(Value, frozen=True):
    """One axis of the mesh, and the cluster level whose links it uses."""

    name: str
    size: AxisSize
    level: str


class CollectiveEntry(Value, frozen=True):
    """A collective of one operator's part of the step, with the bytes of its larger side."""

    phase: str
    kind: str
    axes: tuple[str, ...]
    bytes: float
    count: int
    seconds: float


class OperatorEntry(Value, frozen=True):
    """One operator: the factor that each axis splits, in the rule's own names and in words.

    `seconds` is the operator's work, its collectives, the reshards of what it reads, and the
    update of the parameters that it reads first.
    """

    name: str
    kind: str
    module: str
    source: str
    config: tuple[str, ...]
    split: dict[str, int]
    seconds: float
    collectives: tuple[CollectiveEntry, ...] = ()


class TensorEntry(Value, frozen=True):
    """The layout of a tensor that several operators read: a state per axis."""

    name: str
    layout: tuple[str, ...]


class ParameterEntry(Value, frozen=True):
    """How a parameter is stored: a state per axis, and whether it is gathered again in backward."""

    names: tuple[str, ...]
    shape: tuple[Size, ...]
    layout: tuple[str, ...]
    regather: bool


class InputEntry(Value, frozen=True, omit_defaults=True):
    """A tensor of the batch, and the part of it that a device reads: a state per axis.

    Where a step takes several micro-batches, `shape` is what one of them has, `cut` the dim along
    which the whole is cut, and `place` where it lies in the batch: `0`, `input_ids`, `batch.image`.
    """

    name: str
    shape: tuple[Size, ...]
    layout: tuple[str, ...]
    cut: Dim | None = None
    place: str = ""
    dtype: str = ""

    def whole(self, passes: int) -> tuple[int, ...]:
        """The shape that the whole batch has."""
        return tuple(n * passes if dim == self.cut else n for dim, n in enumerate(self.shape))


class StageEntry(Value, frozen=True):
    """One part of the cluster in a pipeline: the layers that it has, and what it does.

    Seconds of a pass are those of a micro-batch through all chunks that the part has; `in_flight`
    are the most micro-batches between forward and backward.
    """

    layers: str
    forward_seconds: float
    backward_seconds: float
    busy_seconds: float
    in_flight: int
    peak_bytes: float


class StageSeconds(Value, frozen=True):
    """What one stage takes, of a micro-batch where nothing else is said (`StageTimes`)."""

    forward: float
    backward: float
    weight: float
    send_forward: float
    send_backward: float
    first: float
    last: float
    reduce: float
    update: float


class TiedSum(Value, frozen=True):
    """Parts of the cluster that sum the gradient of a shared parameter, and what that takes."""

    parts: tuple[Size, ...]
    seconds: float


class Storage(Value, frozen=True):
    """How a parameter is stored, where that is not as the plan itself says."""

    layout: tuple[str, ...]
    regather: bool


class Choice(Value, frozen=True):
    """Splits of the whole model on a mesh of their own, which some parts of a pipeline follow.

    The entries are in the order of the plan's own, and None where they are the plan's own: those of
    the stages that follow this choice. The others say how such a stage takes what others write,
    makes again what depends on no parameter, and stores what is tied.
    """

    mesh: Annotated[tuple[AxisEntry, ...], msgspec.Meta(max_length=MOST_AXES)]
    operators: tuple[tuple[str, ...] | None, ...]
    tensors: tuple[tuple[str, ...] | None, ...]
    parameters: tuple[Storage | None, ...]
    inputs: tuple[tuple[str, ...], ...]


class PipelineEntry(Value, frozen=True, omit_defaults=True):
    """Pipeline stages: parts of the cluster in a row.

    `layers` says how many of the model's layers each stage has, in the order of the model. With
    several `chunks`, a part of the cluster has as many stages. All parts are on the plan's mesh and
    follow its splits, unless `follows` says for each which of the `choices` it follows: then an
    operator, tensor or parameter of the plan is laid out on the mesh of the part that it belongs
    to, and the plan's own mesh is that of the first part.
    """

    schedule: str
    parts: AxisSize
    chunks: Share
    layers: tuple[Size, ...]
    bubble: float = 0.0
    stages: tuple[StageEntry, ...] = ()  # by part of the cluster
    seconds: tuple[StageSeconds, ...] = ()  # by stage, in the order of the model
    tied: tuple[TiedSum, ...] = ()
    choices: tuple[Choice, ...] = ()
    follows: tuple[Size, ...] = ()  # by part of the cluster


class UnsplitEntry(Value, frozen=True):
    """Operators of one kind that every device computes in full, and what that costs."""

    kind: str
    count: int
    seconds: float
    share: float
    reason: str


class ExperimentEntry(Value, frozen=True):
    """Operators of one kind whose splits were found by running one in parts."""

    kind: str
    count: int
    splits: str  # as a rule is written


class MeshEntry(Value, frozen=True):
    """A mesh that was tried: the fastest step that fits on it, and the best sum of costs."""

    mesh: str
    step_seconds: float | None  # None: nothing that was simulated on it fits
    additive_seconds: float
    additive_lower_bound_seconds: float
    recomputes: bool = False


class FinalistEntry(Value, frozen=True):
    """A choice that was simulated: who proposed it, its step, its sum of costs, its peak."""

    name: str
    mesh: str
    step_seconds: float
    additive_seconds: float
    exposed_seconds: float
    peak_bytes: float
    mfu: float
    recomputes: bool = False
    source: str = ""  # what proposed it: "search", "baseline", "refined", ...

    @property
    def is_baseline(self) -> bool:
        """Whether it is a strategy that has a name."""
        return self.source == "baseline"


class Estimate(Value, frozen=True):
    """How long a step takes, what it needs, and how sure the search is that nothing is better.

    Steps are simulated: communication of parameters runs beside work. Where the cost model knows
    no overlap, a step is the additive cost. That is what the search minimises: compute,
    communication and update one after the other, nothing hidden; the additive bound and `optimal`
    are about it. `step_lower_bound_seconds` is about the simulated step, of every plan for the same
    meshes, pins and number of micro-batches, without pipeline stages;
    `pipeline_lower_bound_seconds` of every pipeline of the numbers of stages and micro-batches that
    are searched. A baseline's seconds and bytes are those of one simulation.
    """

    step_seconds: float
    additive_seconds: float
    additive_lower_bound_seconds: float
    optimal: bool
    compute_seconds: float
    communication_seconds: float
    update_seconds: float
    data_parallel_seconds: float
    data_parallel_bytes: float
    fully_sharded_seconds: float
    fully_sharded_bytes: float
    peak_bytes: float
    device_bytes: int
    limit_bytes: float
    data_parallel_recomputes: bool = False
    fully_sharded_recomputes: bool = False
    min_feasible_bytes: float | None = None  # what the smallest plan needs, where none fits
    step_lower_bound_seconds: float | None = None  # no simulated step is shorter, if proven
    pipeline_lower_bound_seconds: float | None = None  # nor any pipeline's, where they are searched
    gib_price_seconds: float = 0.0  # what a GiB more would save, where something is recomputed


class PinEntry(Value, frozen=True):
    """A split that the user fixed: for which operators, in words, and how many they are."""

    pattern: str
    split: str
    operators: int


class Pinned(Value, frozen=True):
    """The pins of a plan, and the best without them: its step, and the best sum of costs."""

    pins: tuple[PinEntry, ...]
    free_seconds: float
    free_additive_seconds: float


class Side(Value, frozen=True):
    """A tensor of an operator: its name among the operands, and how it lies, a state per axis."""

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    layout: tuple[str, ...]


class Face(Value, frozen=True):
    """How an operator looks from outside: its rule, its factors (word and size), its tensors."""

    rule: str
    factors: tuple[tuple[str, str, int], ...]  # the rule's own name, in words, the size
    operands: tuple[Side, ...]
    results: tuple[Side, ...]


class Move(Value, frozen=True):
    """A collective that moves an operand (or the result -1 - k) to another layout."""

    operand: int
    phase: str
    kind: str
    axes: tuple[str, ...]
    bytes: float


class Row(Value, frozen=True):
    """An operator as it is drawn: its face, what it reads, what is moved for it, its own work.

    `reads` says for each operand how many operators back it was written; -1 - k is operator k of
    the model, and 0 is no operator at all. `work` has the seconds of local work by phase.
    """

    face: int
    reads: tuple[int, ...]
    moves: tuple[Move, ...]
    work: tuple[tuple[str, float], ...]


class Sketch(Value, frozen=True):
    """What a drawing needs of every operator; pieces are rows in order, and how many times."""

    faces: tuple[Face, ...]
    rows: tuple[Row, ...]
    pieces: tuple[tuple[tuple[int, ...], Count], ...]


class Provenance(Value, frozen=True):
    """What the plan was made from: the model's fingerprint, the cluster, all options."""

    graph: str
    operators: int
    parameters: int
    cluster: dict[str, object]
    request: Request
    versions: dict[str, str]
    capture_seconds: float
    search_seconds: float
    notes: tuple[str, ...] = ()
    model: str = ""  # as the user calls it: a name of the zoo, a class


class Plan(Value, frozen=True, omit_defaults=True):
    """How to split the training of one model over one cluster.

    With several micro-batches, operators and inputs are those of one pass; seconds and counts of
    collectives are those of a whole step.
    """

    format: str
    version: int
    cluster: str
    mesh: Annotated[tuple[AxisEntry, ...], msgspec.Meta(max_length=MOST_AXES)]
    estimate: Estimate
    meshes: tuple[MeshEntry, ...]
    unsplit: tuple[UnsplitEntry, ...]
    operators: tuple[OperatorEntry, ...]
    tensors: tuple[TensorEntry, ...]
    parameters: tuple[ParameterEntry, ...]
    provenance: Provenance
    pinned: Pinned | None = None
    recompute: tuple[tuple[Size, Size], ...] = ()  # operators (first, end) to run again in backward
    sketch: Sketch | None = None
    inputs: tuple[InputEntry, ...] = ()
    simulation: Simulation | None = None  # of the step, with overlap and memory over time
    finalists: tuple[FinalistEntry, ...] = ()  # all that were simulated, the fastest first
    schedule: Schedule | None = None  # what `shardfold simulate` reads
    micro_batches: Share = 1  # passes of a step, each over an equal part of the batch
    experiments: tuple[ExperimentEntry, ...] = ()
    pipeline: PipelineEntry | None = None

    @property
    def processes(self) -> int:
        """How many run it: one for each device."""
        return sum(math.prod(axis.size for axis in mesh) for mesh in self.meshes_of_parts)

    @property
    def meshes_of_parts(self) -> tuple[tuple[AxisEntry, ...], ...]:
        """The mesh of every part of the cluster: without stages, there is but one."""
        found = self.pipeline
        if found is None:
            return (self.mesh,)
        if not found.follows:
            return (self.mesh,) * found.parts
        return tuple(found.choices[number].mesh for number in found.follows)

    @property
    def fits(self) -> bool:
        """Whether the predicted peak is within the memory limit."""
        return self.estimate.peak_bytes <= self.estimate.limit_bytes

    @property
    def micro_batch_dims(self) -> dict[str, int]:
        """The place of each input that is cut into micro-batches, and the dim along which it is."""
        return {entry.place: entry.cut for entry in self.inputs if entry.cut is not None}

    def with_notes(self, *notes: str) -> Plan:
        """The plan with further notes on how it was made."""
        made = msgspec.structs.replace(
            self.provenance, notes=tuple(dict.fromkeys((*self.provenance.notes, *notes)))
        )
        return msgspec.structs.replace(self, provenance=made)

    if not TYPE_CHECKING:  # a type checker knows the names

        def __getattr__(self, name: str) -> NoReturn:
            new = RENAMED.get(name)
            known = f": it is called {new} now" if new else ""
            raise AttributeError(f"A plan has no attribute {name!r}{known}.")

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; an existing file is replaced only by a complete one."""
        from shardfold.plans.files import save

        save(self, path)

    @classmethod
    def load(cls, path: str | Path, graph: Graph | None = None) -> Plan:
        """Read a plan; with the graph of a model, check that the plan is for that model."""
        from shardfold.plans.files import load

        return load(path, graph)

    def to_html(self, title: str | None = None) -> str:
        """A report of the plan as the text of one HTML file that needs nothing else."""
        from shardfold.report import to_html

        return to_html(self, title=title)

    def _repr_html_(self) -> str:
        from shardfold.report import notebook_html

        return notebook_html(self)

    def local_batch(self, batch: Batch, *, rank: int | None = None) -> Batch:
        """The part of a batch that is this process's: of every tensor, the samples that it reads.

        `batch` is a tensor, or tuples, lists and dicts of them. A parallel module takes the whole
        batch or this part of it.
        """
        from shardfold.plans.batch import local_batch

        found: Batch = local_batch(self, batch, rank)
        return found

    def sampler(
        self,
        dataset: Sized | int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
    ) -> Sampler:
        """The samples that this process loads: a `batch_sampler` for torch's DataLoader."""
        from shardfold.plans.batch import Sampler

        count = dataset if isinstance(dataset, int) else len(dataset)
        return Sampler(self, count, shuffle=shuffle, seed=seed, rank=rank)

    def __str__(self) -> str:
        from shardfold.report import as_text

        return as_text(self)
