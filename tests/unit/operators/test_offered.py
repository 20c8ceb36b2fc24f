"""What the planner offers is what the runtime has: every configuration of every rule is lowered.

Each case is lowered on its own, and once more among views that cut its dims into pieces, as the
heads of an attention cut the features of a projection.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from shardfold.cluster import Mesh
from shardfold.cluster.mesh import Axis
from shardfold.errors import RunError
from shardfold.graph import Graph, Op, Operand, Tensor, TensorType
from shardfold.operators import REGISTRY, Rules, rules_of
from shardfold.operators.operator import factors
from shardfold.runtime.ops import FORMS, localise
from shardfold.runtime.ops.counter_rng import UNREPEATABLE
from shardfold.runtime.ops.local_op import Site
from shardfold.runtime.shards import Extent, Place, Row, extent
from shardfold.sharding import Space, Subdims, find_subdims, space_of
from shardfold.sharding.layouts import forward_states

from .cases import case, ints, normal
from .oracle import Case, captured
from .test_rules import CASES

SHAPES = ((2,), (3,), (4,), (2, 2), (2, 2, 2))


def options() -> list[Case]:
    """Arguments under which a split that other calls have cannot be run."""
    image, weight = normal(4, 4, 8, 8), normal(8, 4, 3, 3)
    pool = {"self": image, "kernel_size": [3, 3], "stride": [1, 1], "padding": [1, 1]}
    logits = {"self": normal(8, 8), "target": ints(8, 8)}
    table = {"weight": normal(8, 8), "indices": ints(8, 8)}
    full = {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "output_padding": [0, 0]}
    return [
        case("conv2d.padding", {"input": image, "weight": weight, "padding": "same"}, label="same"),
        case(
            "convolution",
            {
                "input": image,
                "weight": normal(4, 4, 3, 3),
                "bias": None,
                "groups": 2,
                **full,
                "transposed": True,
            },
            label="transposed groups",
        ),
        case("conv2d", {"input": image, "weight": normal(4, 1, 3, 3), "groups": 4}, label="deep"),
        case("avg_pool2d", {**pool, "count_include_pad": False}, label="without padding"),
        case("avg_pool2d", {**pool, "divisor_override": 2}, label="divisor"),
        case("max_pool2d", {**pool, "ceil_mode": True}, label="rounded up"),
        case("embedding", {**table, "scale_grad_by_freq": True}, label="scaled"),
        case("embedding", {**table, "padding_idx": 3}, label="padding"),
        case(
            "cross_entropy_loss",
            {**logits, "weight": normal(8).abs(), "label_smoothing": 0.1},
            label="smoothed weights",
        ),
        case("nll_loss", {**logits, "weight": normal(8).abs()}, label="weights"),
        case("logsumexp", {"self": normal(4, 4, 4), "dim": [0, 1]}, label="two dims"),
        case("constant_pad_nd", {"self": normal(4, 8), "pad": [1, 1], "value": 2.0}, label="value"),
        case("group_norm", {"input": normal(4, 8, 4), "num_groups": 4}, label="four groups"),
        case(
            "scaled_dot_product_attention",
            {name: normal(2, 4, 8, 8) for name in ("query", "key", "value")}
            | {"is_causal": True, "dropout_p": 0.1},
            label="causal dropout",
        ),
        case(
            "instance_norm",
            {
                "input": normal(4, 4, 8),
                "weight": None,
                "bias": None,
                "momentum": 0.1,
                "running_mean": normal(4),
                "running_var": normal(4).abs(),
                "eps": 1e-5,
                "use_input_stats": True,
                "cudnn_enabled": False,
            },
            label="running",
        ),
    ]


EVERY = [*CASES, *options()]
MADE: dict[int, Any] = {}


def captured_once(given: Case) -> Any:
    if id(given) not in MADE:
        MADE[id(given)] = captured(given)
    return MADE[id(given)]


def graph_of(given: Case, *, in_pieces: bool) -> tuple[Graph, Any]:
    """A graph of the one call; or of views of its tensors, too, with every even dim halved."""
    call, invocation = captured_once(given)
    kinds = [*call.inputs, *call.results]
    tensors = [
        Tensor((f"t{k}",), kind, "input" if k < len(call.inputs) else "activation", True)
        for k, kind in enumerate(kinds)
    ]
    operands = tuple(Operand(o.name, k) for k, o in enumerate(call.op.operands))
    results = tuple(range(len(call.inputs), len(kinds)))
    ops = [Op("call", call.op.kind, operands, results, call.op.attributes)]
    for k, kind in enumerate(kinds if in_pieces else ()):
        halved = [
            n for size in kind.shape for n in ((2, size // 2) if size in (4, 6, 8) else (size,))
        ]
        tensors.append(
            Tensor((f"v{k}",), TensorType(tuple(halved), kind.dtype), "activation", True)
        )
        ops.append(Op(f"v{k}", "aten.view", (Operand("self", k),), (len(tensors) - 1,)))
    return Graph(tuple(tensors), tuple(ops), results[0]), invocation


class Sites:
    """The call of a graph as each rank of a mesh would run it under each configuration."""

    def __init__(self, graph: Graph, subdims: Subdims, space: Space) -> None:
        self.graph, self.subdims, self.space = graph, subdims, space
        self.known: dict[object, Extent] = {}
        op = graph.ops[0]
        inputs = [space.operand_layouts(k) for k in range(len(op.inputs))]
        results = [space.result_layouts(k) for k in range(len(op.results))]
        self.rows = [forward_states(layouts).tolist() for layouts in (*inputs, *results)]

    def at(self, row: int, place: Place, invocation: Any) -> Site:
        op = self.graph.ops[0]
        tensors = (*op.inputs, *op.results)
        parts = [
            self._part(t, tuple(r[row]), place) for t, r in zip(tensors, self.rows, strict=True)
        ]
        config = tuple(self.space.configs[row].tolist())
        sides = (tuple(parts[: len(op.inputs)]), tuple(parts[len(op.inputs) :]))
        return Site(0, op, invocation, self.space.rule, config, place, *sides)

    def _part(self, tensor: int, state: Row, place: Place) -> Extent:
        key = (tensor, state, place)
        if key not in self.known:
            rank = len(self.graph.tensors[tensor].type.shape)
            pieces = self.subdims.tensors[tensor], self.subdims.dims[tensor]
            self.known[key] = extent(*pieces, rank, state, place)
        return self.known[key]


def refused(
    given: Case, shape: tuple[int, ...], *, in_pieces: bool, own: Rules | None = None
) -> Iterator[str]:
    """Every offered configuration that some rank cannot lower."""
    graph, invocation = graph_of(given, in_pieces=in_pieces)
    subdims = find_subdims(graph, rules_of(graph, own))
    mesh = Mesh(tuple(Axis(f"a{k}", size, 0) for k, size in enumerate(shape)))
    sites = Sites(graph, subdims, space_of(subdims.rules[0], mesh))
    places = [Place.of_rank(rank, shape) for rank in range(mesh.size)]
    for row in range(len(sites.space.configs)):
        for place in places:
            try:
                localise(sites.at(row, place, invocation))
            except RunError as error:
                yield f"{given} on {shape} at {place.at}: {error}"
                break


@pytest.mark.parametrize("in_pieces", [False, True], ids=["alone", "in pieces"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_offered_configuration_is_lowered_on_every_rank(
    shape: tuple[int, ...], in_pieces: bool
) -> None:
    found = [
        message
        for given in EVERY
        if given.kind not in UNREPEATABLE
        for message in refused(given, shape, in_pieces=in_pieces)
    ]
    assert found == []


def test_random_numbers_are_refused_by_name() -> None:
    for kind in sorted(UNREPEATABLE & {given.kind for given in EVERY}):
        given = next(given for given in EVERY if given.kind == kind)
        assert all("draws random numbers" in why for why in refused(given, (2,), in_pieces=False))


def test_a_description_says_which_operators_have_a_form_of_their_own() -> None:
    described = {kind for kind, operator in REGISTRY.items() if operator.local == "own form"}
    assert described == set(FORMS)


@pytest.mark.parametrize("given", options(), ids=str)
def test_a_split_that_the_runtime_lacks_is_caught(given: Case) -> None:
    """Without what its description holds back or wants in one range, a call is refused."""
    known = REGISTRY[given.kind]
    own = {given.kind: replace(known, unsupported=factors(), ranges=factors())}
    graph, _ = graph_of(given, in_pieces=True)
    before, after = rules_of(graph, own)[0], rules_of(graph)[0]
    held = (after.whole - before.whole) | (after.ranges - after.whole)
    assert bool(held) == bool(list(refused(given, (2, 2), in_pieces=True, own=own)))


def test_what_others_use_is_whole_for_who_writes_to_it() -> None:
    """Parts of one norm that are not parts of another would miss its update, and so would a sum."""

    def channels_are_whole(norms: int, *more: Op) -> list[bool]:
        row, image = TensorType((8,), "float32"), TensorType((4, 8), "float32")
        buffers = [Tensor((name,), row, "buffer") for name in ("mean", "variance")]
        given = Tensor(("x",), image, "input")
        made = [Tensor((f"h{k}",), image, "activation") for k in range(norms)]
        made.append(Tensor(("read",), row, "activation"))
        running = Operand("running_mean", 0), Operand("running_var", 1)
        options = {"training": True}
        ops = [
            Op(
                f"norm{k}",
                "aten.batch_norm",
                (Operand("input", 2 + k), *running),
                (3 + k,),
                options,
            )
            for k in range(norms)
        ]
        graph = Graph((*buffers, given, *made), (*ops, *more), 2 + norms)
        return ["c" in rule.whole for rule in rules_of(graph)[:norms]]

    assert channels_are_whole(1) == [False]
    assert channels_are_whole(2) == [True, True]
    assert channels_are_whole(1, Op("read", "aten.relu", (Operand("self", 0),), (4,))) == [True]
