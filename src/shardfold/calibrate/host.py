"""Host times: how long a launch of each operator takes, on the runtime's own path.

Chains of operators on a few numbers are run as a plan for one device runs them. On so few numbers
the device is done before the host is, so the time of a chain is the host's; two lengths of a chain
tell what one more operator takes, forward and backward.

A shared host is sometimes fast and sometimes slow. So its speed (`Pace`: the time of a reference
block of operators) is measured before and after each measurement, and every time is scaled to the
median speed. With the speed at another time, the host times can be rescaled.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional

from shardfold.calibrate.collectives import SHARING, sharing_entries
from shardfold.calibrate.timers import Times, middle, per_link, rounded, times_of, wait
from shardfold.capture import capture_program
from shardfold.costs.by_kernel import EACH, HOST, SORT
from shardfold.costs.profile import HostEntry
from shardfold.operators import rules_of
from shardfold.runtime.lower import alone
from shardfold.runtime.ops.norms import BatchNorm, Shared, passes_for
from shardfold.runtime.parallelize import Settings, assemble
from shardfold.sharding import find_subdims

SHORT, LONG, ROUNDS = 8, 40, 7
SIDE = 8
MIXED = "mixed"
Link = Callable[["Chain", Tensor, int], Tensor]


class Chain(nn.Module):
    """The same operator so many times, on a tensor of 1 x 8 x 8 x 8, and the mean of the result."""

    def __init__(self, link: Link, count: int, makes: str) -> None:
        super().__init__()
        self.link, self.count = link, count
        if makes:
            self.layers = nn.ModuleList(MAKES[makes]() for _ in range(count))
        self.start = nn.Parameter(torch.randn(1, SIDE, SIDE, SIDE))
        self.register_buffer("other", torch.randn(1, SIDE, SIDE, SIDE))

    def forward(self) -> Tensor:
        """The chain's result, as a scalar."""
        x = self.start * self.other
        for number in range(self.count):
            x = self.link(self, x, number)
        return x.float().mean()


def _layer(chain: Chain, x: Tensor, number: int) -> Tensor:
    return chain.layers[number](x)


def _view(chain: Chain, x: Tensor, number: int) -> Tensor:
    return x.view(SIDE * SIDE, SIDE) if number % 2 == 0 else x.view(1, SIDE, SIDE, SIDE)


def _cast(chain: Chain, x: Tensor, number: int) -> Tensor:
    return x.to(torch.float64 if x.dtype != torch.float64 else chain.other.dtype)


def _looked_up(chain: Chain, x: Tensor, number: int) -> Tensor:
    at = torch.zeros(SIDE, dtype=torch.long, device=x.device)
    return x + functional.embedding(at, chain.layers[number].weight)


class Mixed(nn.Module):
    """A block of different operators, as models are: what follows something else takes longer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(SIDE), nn.LayerNorm(SIDE)
        self.into, self.out = nn.Linear(SIDE, 3 * SIDE), nn.Linear(SIDE, SIDE)
        self.up, self.down = nn.Linear(SIDE, 4 * SIDE), nn.Linear(4 * SIDE, SIDE)

    def forward(self, x: Tensor) -> Tensor:
        """Attention and a feed-forward network, each added to what came in."""
        query, key, value = self.into(self.norm(x)).split(SIDE, -1)
        attended = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out(attended.transpose(1, 2).contiguous().view(x.shape))
        return x + self.down(functional.gelu(self.up(self.last(x))))


# How often each kind is in a block.
IN_MIXED = {
    "aten.layer_norm": 2,
    "aten.linear": 4,
    "aten.cat": 1,  # the split
    "aten.scaled_dot_product_attention": 1,
    "aten.transpose": 1,
    "aten.mul": 1,  # the copy
    "aten.view": 1,
    "aten.add": 2,
    "aten.gelu": 1,
}
MAKES: Mapping[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(SIDE, SIDE),
    "plain": lambda: nn.Linear(SIDE, SIDE, bias=False),
    "layer_norm": lambda: nn.LayerNorm(SIDE),
    "batch_norm": lambda: nn.BatchNorm2d(SIDE),
    "conv": lambda: nn.Conv2d(SIDE, SIDE, 3, padding=1, bias=False),
    "table": lambda: nn.Embedding(SIDE, SIDE),
    MIXED: Mixed,
}
# kind of operator: how to apply it once more, and which layers it needs
LINKS: Mapping[str, tuple[Link, str]] = {
    "aten.linear": (_layer, "linear"),
    "aten.matmul": (_layer, "plain"),
    "aten.layer_norm": (_layer, "layer_norm"),
    "aten.batch_norm": (_layer, "batch_norm"),
    "aten.conv2d": (_layer, "conv"),
    "aten.embedding": (_looked_up, "table"),
    "aten.view": (_view, ""),
    "aten.transpose": (lambda c, x, n: x.transpose(1, 2), ""),
    "aten.slice": (lambda c, x, n: x[:, :, :, 0:SIDE] if n < 0 else x.narrow(3, 0, SIDE), ""),
    "aten.cat": (lambda c, x, n: torch.cat(x.split(SIDE // 2, 3), 3), ""),
    "aten.add": (lambda c, x, n: x + c.other, ""),
    "aten.mul": (lambda c, x, n: x * c.other, ""),
    "aten.pow": (lambda c, x, n: x.pow(2), ""),
    "aten.to": (_cast, ""),
    "aten.gelu": (lambda c, x, n: functional.gelu(x), ""),
    "aten.relu": (lambda c, x, n: functional.relu(x), ""),
    "aten.softmax": (lambda c, x, n: torch.softmax(x, -1), ""),
    "aten.mean": (lambda c, x, n: x - x.mean(-1, keepdim=True), ""),
    "aten.max_pool2d": (lambda c, x, n: functional.max_pool2d(x, 3, 1, 1), ""),
    "aten.scaled_dot_product_attention": (
        lambda c, x, n: functional.scaled_dot_product_attention(x, x, x),
        "",
    ),
}


def slope(kind: str, device: str, dtype: torch.dtype) -> Times:
    """The host's seconds for one more operator of a kind, or block of several."""
    short, long = (times(kind, count, device, dtype) for count in (SHORT, LONG))
    return per_link(short, long, LONG - SHORT)


def times(kind: str, count: int, device: str, dtype: torch.dtype) -> Times:
    """The host's seconds of a chain's forward, and of its backward until all is done."""
    with torch.device(device):
        model = chain(kind, count).to(dtype)
    program = capture_program(model, (), {}, fold=False)
    lowered = alone(program, find_subdims(program.graph, rules_of(program.graph)))
    module = assemble(model, program, lowered, Settings())
    return times_of(module, device, ROUNDS, partial(module.zero_grad, set_to_none=True))


def chain(kind: str, count: int) -> Chain:
    """So many operators of a kind, or blocks of several."""
    link, makes = LINKS.get(kind, (_layer, kind))
    return Chain(link, count, makes)


PACE = "pace"
PACE_ROUNDS = 7


class Pace:
    """Two chains of such blocks, as plain modules, to be timed again and again."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device = device
        with torch.device(device):
            self.chains = [chain(MIXED, count).to(dtype) for count in (SHORT, LONG)]

    def now(self) -> Times:
        """The host's seconds for a block, forward and backward."""
        short, long = (
            times_of(each, self.device, PACE_ROUNDS, partial(each.zero_grad, set_to_none=True))
            for each in self.chains
        )
        return per_link(short, long, LONG - SHORT)


def pace_of_host(dtype: torch.dtype = torch.bfloat16) -> float:
    """How many times as long as the default host this one takes to ask a GPU for kernels."""
    pace = Pace("cuda", dtype)
    pace.now()  # kernels are loaded
    return pace_by(pace.now())


def pace_by(block: Times) -> float:
    """The same, by the seconds of a block of operators, forward and backward."""
    known = [sum(n * HOST[kind][side] for kind, n in IN_MIXED.items()) for side in (0, 1)]
    return sum(block) / (sum(known) * 1e-6)


def scaled(entries: Sequence[HostEntry], times: Sequence[float]) -> list[HostEntry]:
    """As much longer, forward and backward."""
    forward, backward = times
    return [
        HostEntry(
            entry.kind,
            rounded(entry.forward_seconds * forward),
            rounded(entry.backward_seconds * backward),
        )
        for entry in entries
    ]


def at_pace(entries: Sequence[HostEntry], pace: Times) -> tuple[HostEntry, ...]:
    """What was measured at one pace of the host, when it is at another."""
    known = next((entry for entry in entries if entry.kind == PACE), None)
    if known is None:
        return tuple(entries)
    then = known.forward_seconds, known.backward_seconds
    return tuple(scaled(entries, [a / b for a, b in zip(pace, then, strict=True)]))


FEW_EXPERTS, MANY_EXPERTS, DRAWS = 2, 16, 21
EXPERTS = "shardfold.expert_linear"
EXPERTS_TIMES = (EXPERTS, EXPERTS + EACH, EXPERTS + SORT)
Take = Callable[[str, torch.dtype], tuple[HostEntry, ...]]
Takes = dict[tuple[str, ...], Take]


def host_entries(
    device: str, dtype: torch.dtype, watch: Callable[[str, int, int], None]
) -> tuple[HostEntry, ...]:
    """The host's seconds for one operator of each kind, and for what else a step asks for."""
    alone: Takes = {(kind,): _one(kind, partial(slope, kind)) for kind in (*LINKS, MIXED)}
    base: Takes = {("step",): _one("step", partial(times, "aten.add", 1))}
    wanted: Takes = {**alone, **base, **dict(_beside(device, ()))}
    pace = Pace(device, dtype)
    paces, found = [pace.now()], []
    for number, (kinds, take) in enumerate(wanted.items()):
        watch(kinds[0], number, len(wanted))
        found.append(take(device, dtype))
        paces.append(pace.now())
    typical = middle(paces)
    entries: list[HostEntry] = []
    slower = (1.0, 1.0)
    for kinds, taken, around in zip(wanted, found, pairwise(paces), strict=True):
        here = scaled(taken, [a / b for a, b in zip(typical, middle(around), strict=True)])
        entries += here if kinds in base or kinds[0] in UPDATES else scaled(here, slower)
        if kinds == (MIXED,):
            mixed = entries.pop()
            slower = _slower(entries, (mixed.forward_seconds, mixed.backward_seconds))
            entries = scaled(entries, slower)
    return (*entries, HostEntry(PACE, *map(rounded, typical)))


def added_entries(device: str, dtype: torch.dtype, known: Collection[str]) -> tuple[HostEntry, ...]:
    """Those that can be measured by themselves and are not known yet."""
    found: list[HostEntry] = []
    slower: tuple[float, float] | None = None  # how much longer than alone among others
    for kinds, take in _beside(device, known):
        entries = list(take(device, dtype))
        if kinds[0] not in UPDATES:
            slower = slower or _slower_here(device, dtype)
            entries = scaled(entries, slower)
        found += entries
    return tuple(entry for entry in found if entry.kind not in known)


def _beside(device: str, known: Collection[str]) -> Iterator[tuple[tuple[str, ...], Take]]:
    """What is measured by itself, and not known yet."""
    for kinds, take in BESIDE.items():
        if not (set(kinds) <= set(known) or (device == "cpu" and kinds == SHARING)):
            yield kinds, take


def _slower_here(device: str, dtype: torch.dtype) -> tuple[float, float]:
    alone = [HostEntry(kind, *slope(kind, device, dtype)) for kind in IN_MIXED]
    return _slower(alone, slope(MIXED, device, dtype))


def _slower(entries: Sequence[HostEntry], mixed: tuple[float, float]) -> tuple[float, float]:
    """How much longer a block of many kinds takes than the chains of each, forward and backward.

    All take as much longer as those.
    """
    alone = {entry.kind: (entry.forward_seconds, entry.backward_seconds) for entry in entries}
    forward, backward = (
        max(1.0, mixed[side] / total) if total else 1.0
        for side in (0, 1)
        for total in [sum(n * alone[kind][side] for kind, n in IN_MIXED.items())]
    )
    return forward, backward


def _update(
    device: str, dtype: torch.dtype, wrapped: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> tuple[float, float]:
    """Seconds for one more parameter in an update, and for an update of none."""

    def seconds(count: int) -> float:
        tensors = [torch.ones(SIDE, device=device, dtype=dtype) for _ in range(count)]
        parameters = [nn.Parameter(wrapped(tensor)) for tensor in tensors]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.AdamW(parameters, lr=1e-6)
        found = []
        for _ in range(ROUNDS):
            wait(device)
            began = time.perf_counter()
            optimizer.step()
            found.append(time.perf_counter() - began)
        return statistics.median(found)

    few, many = seconds(SHORT), seconds(4 * LONG)
    each = max(0.0, (many - few) / (4 * LONG - SHORT))
    return rounded(each), rounded(few - SHORT * each)


def _update_of_parts(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """As `_update`, for parameters of several devices: DTensors, in the group of this process."""
    with _some_group():
        mesh = DeviceMesh(device, list(range(dist.get_world_size())))
        return _update(device, dtype, lambda t: DTensor.from_local(t, mesh, [Replicate()]))


@contextmanager
def _some_group() -> Iterator[None]:
    """The process group that is there, or one of this process alone."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _split_norm(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """Seconds for one batch norm of a part, forward and backward, without the sending."""
    x = torch.randn(SIDE, SIDE, SIDE, SIDE, device=device, dtype=dtype, requires_grad=True)
    weights = [torch.ones(SIDE, device=device, dtype=dtype, requires_grad=True) for _ in range(2)]
    shared = Shared(SIDE**3, 1e-5, lambda sums: sums, passes_for(x, is_traced=False))

    def forward() -> Tensor:
        y = x
        for _ in range(LONG):
            y = BatchNorm.apply(y, *weights, shared)[0]
        return y

    return tuple(  # type: ignore[return-value]
        rounded(seconds / LONG) for seconds in times_of(forward, device, ROUNDS)
    )


def _experts(device: str, dtype: torch.dtype) -> tuple[HostEntry, ...]:
    """Seconds of one call without its products, of one expert more, and of asking for a sort.

    Rows are sent to other experts at every call, as a router that learns sends them: no product
    has the sizes of one before.
    """
    few, many = (_routed(count, device, dtype) for count in (FEW_EXPERTS, MANY_EXPERTS))
    each = [(b - a) / (MANY_EXPERTS - FEW_EXPERTS) for a, b in zip(few, many, strict=True)]
    once = [a - FEW_EXPERTS * e for a, e in zip(few, each, strict=True)]
    sort = [_sorting(device)] * 2
    return tuple(
        HostEntry(kind, *map(rounded, found))
        for kind, found in zip(EXPERTS_TIMES, (once, each, sort), strict=True)
    )


def _routed(experts: int, device: str, dtype: torch.dtype) -> tuple[float, float]:
    """Seconds of a call whose rows were sorted before."""
    from shardfold.runtime.ops.experts import Sorted, SortedLinear

    with torch.device(device):
        start = torch.randn(SIDE * MANY_EXPERTS, SIDE, dtype=dtype, requires_grad=True)
        weights = [
            torch.randn(experts, SIDE, SIDE, dtype=dtype, requires_grad=True) for _ in range(SHORT)
        ]
    drawn = (
        [torch.randint(experts, (len(start),), device=device) for _ in weights]
        for _ in range(DRAWS)
    )
    rounds = iter([[Sorted.of(route, experts) for route in routes] for routes in drawn])

    def forward() -> Tensor:
        x = start
        for weight, found in zip(weights, next(rounds), strict=True):
            x = SortedLinear.apply(x, weight, found, x.shape[:1])
        return x

    forwards, backwards = times_of(forward, device, DRAWS)
    return forwards / SHORT, backwards / SHORT


def _sorting(device: str) -> float:
    """Seconds of asking for the rows in the order of their experts."""
    from shardfold.runtime.ops.experts import asked

    route = torch.randint(MANY_EXPERTS, (SIDE * MANY_EXPERTS,), device=device)
    x = torch.zeros(1, device=device, requires_grad=True)

    def forward() -> Tensor:
        for _ in range(SHORT):
            asked(route, MANY_EXPERTS)
        return x * 1.0

    return times_of(forward, device, DRAWS)[0] / SHORT


def _one(kind: str, take: Callable[[str, torch.dtype], tuple[float, float]]) -> Take:
    return lambda device, dtype: (HostEntry(kind, *take(device, dtype)),)


UPDATES = ("update", "update.parts")  # of many tensors at once: not slower among others
# What is measured by itself: an update's parameter, whole or in parts; a norm of a part; experts,
# one expert more, and their sort; collectives, of which a CPU's are measured as they are performed.
BESIDE: Mapping[tuple[str, ...], Take] = {
    ("update",): _one("update", _update),
    ("update.parts",): _one("update.parts", _update_of_parts),
    ("split_norm",): _one("split_norm", _split_norm),
    EXPERTS_TIMES: _experts,
    SHARING: sharing_entries,
}
