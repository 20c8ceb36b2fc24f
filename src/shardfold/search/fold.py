"""Folding: equal vertices are eliminated together, in rounds, or one at a time.

Each distinct pattern is computed once. `pick` chooses the vertices of a round: cheap ones, no two
of them neighbours.

A vertex with one neighbour u leaves a table at u; a vertex with two neighbours a, b leaves a table
between a and b:

    leaf:    c_u[u]    += min over v of c[v] + e[v, u]
    bridge:  e_ab[a, b] = min over v of c[v] + l[v, a] + r[v, b]

A round picks vertices of which no two are neighbours, groups them by the numbers of the tables
around them, and computes each group's table once. Equal blocks therefore shrink together, at the
price of one. What is left of a run of L equal blocks is a chain of equal tables; picking every
other vertex of it halves the chain and squares its table, so the run is a min-plus power and
costs log2(L) products. Nothing is approximated: these are the eliminations of the exact search,
in another order.

Example: a chain of 9 equal vertices loses its 2 ends (one leaf table), then every other vertex of
the 7 left (one bridge table), and so on: 9 -> 7 -> 4 -> 2 -> 1 vertices.

Small problems, the block of a run, and what a run leaves fold one vertex at a time (`fold_few`):
the same eliminations, by dictionaries instead of arrays: a few microseconds a vertex, where a round
costs some hundred however few vertices it takes. A vertex with one neighbour goes first, since it
costs a product less. Of those with two the one goes that leaves the smallest table, but a vertex
whose neighbour went waits as if its own were twice as large: so equal chains shrink by every other
vertex here too, and their tables are squared instead of lengthened. A vertex that the end of a
chain has been added to waits longer: it is unlike its equals elsewhere, and the end goes on through
it once they have gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from shardfold.search.interning import Array, Ints, Mask
from shardfold.search.problem import Problem
from shardfold.search.table_store import Blocks, Folding, Group, Step, Steps, Store

_FREE = 100_000
"""Tables with at most this many joint entries cost less than the calls that build them."""

_STEP = 500_000
"""A round costs about as much as this many joint entries."""

_SPREAD = 8
"""When only dear vertices are left, those within this factor of the cheapest go."""


def pick(sizes: Ints, ends: Ints, kind: Ints, locked: Mask | None = None) -> Ints:
    """Vertices with at most two neighbours to eliminate next; no two of them are neighbours."""
    count = len(sizes)
    u, v = ends[:, 0], ends[:, 1]
    degree = np.bincount(ends.reshape(-1), minlength=count)
    if locked is not None:
        degree[locked] = count + 3
    take = degree <= 1
    both = take[u] & take[v]
    take[v[both]] = False
    bridging = degree == 2
    if bridging.any():
        near = np.zeros(count, dtype=bool)
        near[u[take[v]]] = True
        near[v[take[u]]] = True
        bridging &= ~near
        work = _work(sizes, u, v, count)
        allowed = bridging & _worthwhile(sizes, work, kind, bridging, bool(take.any()))
        take |= _independent(allowed, work, u, v)
    return np.flatnonzero(take)


def _work(sizes: Ints, u: Ints, v: Ints, count: int) -> Array:
    """Entries of the joint table of each vertex with its neighbours, as floats."""
    log = np.log(sizes.astype(np.float64))
    total = log.copy()
    np.add.at(total, u, log[v])
    np.add.at(total, v, log[u])
    return np.exp(np.minimum(total, 600.0)).round()


def _worthwhile(sizes: Ints, work: Array, kind: Ints, bridging: Mask, others: bool) -> Mask:
    """Which bridges to build now rather than wait for a sweep of leaves to come by.

    A run of m alike vertices costs about log2(m) + 1 products when halved, and m leaves when
    swept from its end. Where no leaf is left, the cheapest go.
    """
    alike = np.bincount(kind[bridging], minlength=int(kind.max()) + 1)[kind]
    halving = work * (np.log2(np.maximum(alike, 1)) + 1)
    sweeping = alike * (_STEP + work / sizes)
    now: Mask = (work <= _FREE) | (halving <= sweeping)
    if not others and not (now & bridging).any():
        now = work <= _SPREAD * work[bridging].min(initial=np.inf)
    return now


def _independent(allowed: Mask, work: Array, u: Ints, v: Ints) -> Mask:
    """A subset without neighbours: the cheaper of two, and every other one along equal runs."""
    inside = allowed[u] & allowed[v]
    u, v = u[inside], v[inside]
    if not u.size:
        return allowed
    chosen = allowed.copy()
    chosen[np.where(work[u] > work[v], u, v)[work[u] != work[v]]] = False
    tie = (work[u] == work[v]) & chosen[u] & chosen[v]
    low, high = np.minimum(u, v)[tie], np.maximum(u, v)[tie]
    if low.size:
        odd = _depth(low, high, len(allowed)) & 1 == 1
        chosen &= ~odd
        clash = chosen[low] & chosen[high]
        chosen[high[clash]] = False
    return chosen


def _depth(low: Ints, high: Ints, count: int) -> Ints:
    """Distance of each vertex from the start of its run, by pointer doubling."""
    before = np.arange(count)
    order = np.argsort(low, kind="stable")
    before[high[order]] = low[order]
    depth = (before != np.arange(count)).astype(np.int64)
    while True:
        further = before[before]
        if (further == before).all():
            return np.asarray(depth)
        depth = depth + depth[before]
        before = further


def start(
    problem: Problem,
    store: Store,
    ids: Ints,
    edges: Ints | slice,
    groups: list[Group | Steps | Blocks],
) -> Folding:
    """The vertices `ids`, ascending, and the edges numbered `edges`, which lie between them."""
    ends = problem.ends[edges]
    if len(ids) < len(problem):
        ends = np.searchsorted(ids, ends)
    kind, edge_kind = problem.vertex_kinds.of[ids], problem.edge_kinds.of[edges] * 2
    return Folding(store, ids, problem.sizes[ids], kind, ends, edge_kind, groups)


def tidy(folding: Folding) -> None:
    """Put edges the same way round and add up parallel ones, as rounds expect."""
    _set_edges(folding, folding.ends, folding.edge_kind)


def fold(folding: Folding) -> None:
    """Eliminate vertices with at most two neighbours until none is left."""
    while one_round(folding):
        pass


def one_round(folding: Folding) -> bool:
    """Eliminate one independent set of vertices; False when there was nothing to pick."""
    picked = pick(folding.sizes, folding.ends, folding.kind, folding.locked)
    if not picked.size:
        return False
    gone = np.zeros(len(folding.ids), dtype=bool)
    gone[picked] = True
    source, target, kind = _half_edges(folding, gone)
    degree = np.bincount(source, minlength=len(folding.ids))
    first = np.cumsum(degree) - degree
    _drop_lone(folding, picked[degree[picked] == 0])
    leaves = picked[degree[picked] == 1]
    at_leaf = first[leaves]
    messages = _drop_leaves(folding, leaves, target[at_leaf], kind[at_leaf])
    inner = picked[degree[picked] == 2]
    at = first[inner]
    near = np.stack([target[at], target[at + 1]], axis=1)
    bridges = _drop_inner(folding, inner, near, kind[at], kind[at + 1])
    _receive(folding, target[at_leaf], messages)
    stay = ~(gone[folding.ends[:, 0]] | gone[folding.ends[:, 1]])
    ends = np.concatenate([folding.ends[stay], near])
    edge_kind = np.concatenate([folding.edge_kind[stay], bridges])
    _compact(folding, ~gone, ends, edge_kind)
    return True


def condition(folding: Folding, vertex: int) -> None:
    """Fix a vertex that very many others know: its choice becomes a leading axis of their tables.

    Memory and work grow by its number of choices, and its neighbours all lose one neighbour.
    """
    store = folding.store
    folding.contexts.append(int(folding.ids[vertex]))
    mine = (folding.ends[:, 0] == vertex) | (folding.ends[:, 1] == vertex)
    ends, kinds = folding.ends[mine], folding.edge_kind[mine]
    turned = ends[:, 0] == vertex
    others = np.where(turned, ends[:, 1], ends[:, 0])
    towards = kinds ^ turned
    distinct, inverse = np.unique(towards, return_inverse=True)
    given = np.array([store.condition(int(k)) for k in distinct], dtype=np.int64)
    own = store.vertices[int(folding.kind[vertex])]
    padded = own.reshape((1,) * (store.depth + 1 - own.ndim) + own.shape)
    folding.constants.append(np.moveaxis(padded, -1, 0))
    store.depth += 1
    _receive(folding, others, given[inverse] if len(distinct) else given)
    alive = np.ones(len(folding.ids), dtype=bool)
    alive[vertex] = False
    _compact(folding, alive, folding.ends[~mine], folding.edge_kind[~mine])


def _half_edges(folding: Folding, gone: Mask) -> tuple[Ints, Ints, Ints]:
    """The edges of the vertices that go, seen from them, sorted by vertex, then by neighbour."""
    u, v = folding.ends[:, 0], folding.ends[:, 1]
    out, back = gone[u], gone[v]
    source = np.concatenate([u[out], v[back]])
    target = np.concatenate([v[out], u[back]])
    kind = np.concatenate([folding.edge_kind[out], folding.edge_kind[back] ^ 1])
    order = np.argsort(source * len(folding.ids) + target, kind="stable")
    return source[order], target[order], kind[order]


def _drop_lone(folding: Folding, lone: Ints) -> None:
    order, runs = _grouped(folding.kind[lone])
    who = folding.ids[lone[order]]
    for kind, low, high in runs:
        folding.groups.append(Group(kind, (), who[low:high], ()))
        folding.constants.append(folding.store.vertices[kind].min(axis=-1) * (high - low))


def _drop_leaves(folding: Folding, leaves: Ints, target: Ints, kind: Ints) -> Ints:
    """Eliminate vertices with one neighbour; the number of the table each leaves there."""
    messages = np.zeros(len(leaves), np.int64)
    base = len(folding.store.edges)
    order, runs = _grouped(folding.kind[leaves] * base + kind)
    who, near = folding.ids[leaves[order]], folding.ids[target[order]]
    for code, low, high in runs:
        vertex, edge = divmod(code, base)
        messages[order[low:high]] = folding.store.leaf(vertex, edge)
        folding.groups.append(Group(vertex, (edge,), who[low:high], (near[low:high],)))
    return messages


def _drop_inner(folding: Folding, inner: Ints, near: Ints, left: Ints, right: Ints) -> Ints:
    """Eliminate vertices with two neighbours; the number of the table each leaves between them."""
    bridges = np.zeros(len(inner), np.int64)
    base = len(folding.store.edges)
    order, runs = _grouped((folding.kind[inner] * base + left) * base + right)
    who, near = folding.ids[inner[order]], folding.ids[near[order]]
    for code, low, high in runs:
        rest, second = divmod(code, base)
        vertex, first = divmod(rest, base)
        bridges[order[low:high]] = folding.store.bridge(vertex, first, second)
        around = near[low:high, 0], near[low:high, 1]
        folding.groups.append(Group(vertex, (first, second), who[low:high], around))
    return bridges


def _grouped(codes: Ints) -> tuple[Ints, list[tuple[int, int, int]]]:
    """An order that puts equal codes together, and each code with the range of its positions."""
    order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    cuts = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    lows = [0, *cuts.tolist()] if codes.size else []
    highs = [*lows[1:], codes.size]
    return order, [(int(ordered[low]), low, high) for low, high in zip(lows, highs, strict=False)]


def _receive(folding: Folding, targets: Ints, messages: Ints) -> None:
    """Add to each target's table the tables that it is sent."""
    if not targets.size:
        return
    touched = np.unique(targets)
    keys, kinds = _add_up(
        np.concatenate([touched, targets]),
        np.concatenate([folding.kind[touched], messages]),
        folding.store.add_vertices,
    )
    folding.kind[keys] = kinds


def _set_edges(folding: Folding, ends: Ints, kinds: Ints) -> None:
    """Put every edge the same way round and add up parallel ones."""
    turned = ends[:, 0] > ends[:, 1]
    count = max(len(folding.ids), 1)
    pair = np.where(turned, ends[:, 1] * count + ends[:, 0], ends[:, 0] * count + ends[:, 1])
    keys, kinds = _add_up(pair, kinds ^ turned, folding.store.add_edges)
    folding.ends = np.stack([keys // count, keys % count], axis=1)
    folding.edge_kind = kinds


def _add_up(keys: Ints, kinds: Ints, add: Callable[[int, int], int]) -> tuple[Ints, Ints]:
    """Sum the tables that share a key, two by two: equal sums are computed once."""
    order = np.argsort(keys, kind="stable")
    keys, kinds = keys[order], kinds[order]
    while (same := keys[1:] == keys[:-1]).any():
        order = np.lexsort((kinds, keys))
        keys, kinds = keys[order], kinds[order]
        begins = np.concatenate([[True], ~same])
        here = np.arange(len(keys))
        rank = here - np.maximum.accumulate(np.where(begins, here, 0))
        second = (rank & 1) == 1
        first = np.flatnonzero(second) - 1
        base = int(kinds.max()) + 1
        kinds = kinds.copy()
        together, runs = _grouped(kinds[first] * base + kinds[first + 1])
        for code, low, high in runs:
            kinds[first[together[low:high]]] = add(*divmod(code, base))
        keys, kinds = keys[~second], kinds[~second]
    return keys, kinds


def _compact(folding: Folding, alive: Mask, ends: Ints, edge_kind: Ints) -> None:
    """Renumber what is left."""
    number = np.cumsum(alive) - 1
    folding.ids, folding.sizes = folding.ids[alive], folding.sizes[alive]
    folding.kind = folding.kind[alive]
    if folding.locked is not None:
        folding.locked = folding.locked[alive]
    _set_edges(folding, number[ends], edge_kind)


FEW = 1_200
"""Vertices up to which one at a time is faster than rounds."""

_PATIENCE = 30
"""How often a vertex is passed over at most for the sake of its neighbours."""

_SWEPT = 3
"""How much longer a vertex waits that the end of a chain has been added to."""

Near = list[dict[int, int]]
"""Per vertex its neighbours, and the number of the table towards each."""


def fold_few(folding: Folding) -> None:
    """Fold, one vertex at a time where that is faster than in rounds."""
    if len(folding.ids) <= FEW and not folding.contexts:
        one_by_one(folding)
    else:
        tidy(folding)
        fold(folding)


def one_by_one(folding: Folding) -> None:
    """Eliminate vertices with at most two neighbours until none is left."""
    store, kind, near = folding.store, folding.kind.tolist(), _near(folding)
    queue = _Queue(folding, near)
    steps: list[Step] = []
    for v in queue:
        mine, around = kind[v], near[v]
        kind[v] = -1
        if len(around) == 2:
            (a, left), (b, right) = around.items()
            steps.append((v, mine, a, left, b, right))
            at_a, at_b = near[a], near[b]
            del at_a[v], at_b[v]
            edge = store.bridge(mine, left, right)
            if b in at_a:
                edge = store.add_edges(at_a[b], edge)
                at_a[b], at_b[a] = edge, edge ^ 1
                queue.fewer(a)
                queue.fewer(b)
            else:
                at_a[b], at_b[a] = edge, edge ^ 1
        elif around:
            ((a, left),) = around.items()
            steps.append((v, mine, a, left, -1, -1))
            del near[a][v]
            kind[a] = store.add_vertices(kind[a], store.leaf(mine, left))
            queue.fewer(a, _SWEPT)
        else:
            steps.append((v, mine, -1, -1, -1, -1))
            folding.constants.append(store.vertices[mine].min(axis=-1))
    folding.groups.append(Steps(steps, folding.ids))
    _keep(folding, kind, near)


def _near(folding: Folding) -> Near:
    """Neighbours by vertex; parallel edges are added up."""
    near: Near = [{} for _ in range(len(folding.ids))]
    add = folding.store.add_edges
    for (u, v), edge in zip(folding.ends.tolist(), folding.edge_kind.tolist(), strict=True):
        mine = near[u]
        if v in mine:
            edge = add(mine[v], edge)
        mine[v] = edge
        near[v][u] = edge ^ 1
    return near


class _Queue:
    """Which vertex goes next: ends of chains first, then by joint entries and patience.

    An entry is rank * count + vertex. Ranks that have grown since are noticed when they come up.
    """

    def __init__(self, folding: Folding, near: Near) -> None:
        self.near = near
        self.sizes: list[int] = folding.sizes.tolist()
        self.count = len(near)
        self.waited = [0] * self.count
        vertices: Sequence[int] = range(self.count)
        if folding.locked is not None:
            vertices = np.flatnonzero(~folding.locked).tolist()
            for v in np.flatnonzero(folding.locked).tolist():
                self.waited[v] = -_PATIENCE
        self.ends = [v for v in vertices if len(near[v]) <= 1]
        self.heap = [self._entry(v) for v in vertices if len(near[v]) == 2]
        heapify(self.heap)

    def _entry(self, v: int) -> int:
        a, b = self.near[v]
        return (self.sizes[a] * self.sizes[b] << self.waited[v]) * self.count + v

    def __iter__(self) -> Iterator[int]:
        heap, near, waited = self.heap, self.near, self.waited
        ends, sizes, count = self.ends, self.sizes, self.count
        while True:
            while ends:
                yield ends.pop()
            if not heap:
                return
            entry = heappop(heap)
            v = entry % count
            if len(near[v]) != 2:
                continue
            a, b = near[v]
            now = (sizes[a] * sizes[b] << waited[v]) * count + v
            if now > entry and heap and now > heap[0]:
                heappush(heap, now)
                continue
            later = min(waited[v] + 1, _PATIENCE)
            for u in (a, b):
                if 0 <= waited[u] < later:
                    waited[u] = later
            yield v

    def fewer(self, v: int, wait: int = 1) -> None:
        """A vertex lost a neighbour."""
        left = len(self.near[v])
        if left <= 2 and self.waited[v] >= 0:
            if left == 1:
                self.ends.append(v)
            elif left == 2:
                self.waited[v] = min(self.waited[v] + wait, _PATIENCE)
                heappush(self.heap, self._entry(v))


def _keep(folding: Folding, kind: list[int], near: Near) -> None:
    """What could not be eliminated, numbered anew."""
    left = [v for v, mine in enumerate(kind) if mine >= 0] if max(kind, default=-1) >= 0 else []
    number = {v: i for i, v in enumerate(left)}
    edges = [(number[u], number[v], near[u][v]) for u in left for v in near[u] if u < v]
    table = np.array(edges, dtype=np.int64).reshape(-1, 3)
    folding.ends, folding.edge_kind = table[:, :2], table[:, 2]
    folding.kind = np.array([kind[v] for v in left], dtype=np.int64)
    folding.ids, folding.sizes = folding.ids[left], folding.sizes[left]
    if folding.locked is not None:
        folding.locked = folding.locked[left]
