"""Code generation: one device's step as Python source, with nothing left to interpret.

For `torch.compile`, operators that run again carry a checkpointing policy: the compiler then does
not decide by itself what backward keeps of them.

    def step(context, given, leaves, observe):
        groups = context.groups
        t0, t1, t2 = given
        # fc1
        t5 = op_linear(t2, u0, u1)
        # fc2
        t6 = op_linear(t5, u2, t1)
        t6 = edge(t6, groups)
        del t5

Tensors are `t` with their number in the graph, uses of parameters `u` with theirs. The same text
serves training, checking (which looks at every result) and compilers (for which parameters are
ordinary tensors and collectives are functions).

What runs again before backward is written a second time, as a function of what it is given (see
`runtime/again.py`).

    def again_0(region, given):
        t4, = given
        with region.running(7):
            t5 = op_gelu(t4)
        region.fill(0, t5)
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy

from shardfold.costs.activations import Region
from shardfold.runtime.again import Remade
from shardfold.runtime.lower import Feed, Instruction, Lowered
from shardfold.runtime.ops import Context, Site
from shardfold.runtime.ops.local_op import Names, Target, call_text
from shardfold.runtime.parameter_gather import Gather, Joint, Member, Promise, promising
from shardfold.runtime.parameter_uses import Use, Uses
from shardfold.runtime.reshard import Casting, Edge, Moves, perform, write_back


def made_again(number: int) -> AbstractContextManager[None]:
    """What is recorded here is made again for backward; stretches have ascending numbers."""
    return _advised(recompute=CheckpointPolicy.PREFER_RECOMPUTE, ac_graph_id=number)


def kept() -> AbstractContextManager[None]:
    """What is recorded here is kept for backward."""
    return _advised(recompute=CheckpointPolicy.MUST_SAVE, ac_graph_id=0)


@contextmanager
def _advised(**advice: object) -> Iterator[None]:
    noted = traceback.get_current_meta()
    before = {key: noted[key] for key in advice if key in noted}
    noted |= advice
    try:
        yield
    finally:
        for key in advice:
            del noted[key]
        noted |= before


Step = Callable[..., tuple[Tensor, ...]]
INDENT = "    "
NUMBERS = count()


@dataclass(frozen=True, slots=True)
class Style:
    """Which of the three ways a step is written in."""

    target: Target
    given: tuple[int, ...]  # the tensors that no operator makes, in the order they are given
    returns: tuple[int, ...]  # the loss; of a stage of a pipeline, what it sends on
    uses: Uses | None = None  # None: parameters are ordinary tensors
    is_observed: bool = False
    is_traced: bool = False


def write(lowered: Lowered, style: Style) -> Step:
    """The step as a function of (context, given, leaves, observe), and what it returns."""
    writer = _Writer(lowered, style)
    source = "\n".join(writer.lines())
    name = f"<shardfold step {next(NUMBERS)}>"
    # Tracebacks show the lines of the step.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), writer.names.objects)
    step: Step = writer.names.objects["step"]
    step.__doc__ = source
    return step


@dataclass(frozen=True)
class _Written:
    """A region with the names of what it is given and of what it fills."""

    number: int
    region: Region
    given: tuple[int, ...]  # tensors from others, in the order they are read
    first: dict[int, int]  # who reads each of them first
    drops: dict[int, list[int]]  # tensors that nothing in it reads after an instruction
    slots: dict[tuple[int, int], int]

    @classmethod
    def of(cls, lowered: Lowered, number: int, through: Container[tuple[int, int]]) -> _Written:
        """Operands that come `through` the uses of parameters are no tensors of the step."""
        region = lowered.again[number]
        again = [(index, lowered.instructions[index]) for index in region.ops]
        made = {t for _, instruction in again for t in instruction.results}
        read = [
            (feed.tensor, index)
            for index, each in again
            for k, feed in enumerate(each.feeds)
            if (index, k) not in through
        ]
        others = [(lowered.instructions[op].feeds[k].tensor, op) for op, k in region.reads]
        last = {t: index for index, each in again for t in each.results}
        for tensor, index in sorted((*read, *others), key=lambda pair: pair[1]):
            last[tensor] = max(index, last.get(tensor, index))
        first: dict[int, int] = {}
        for tensor, index in read:
            if tensor not in made:
                first.setdefault(tensor, index)
        drops: dict[int, list[int]] = {}
        for tensor, index in last.items():
            if tensor in made or tensor in first:
                drops.setdefault(index, []).append(tensor)
        slots = {place: slot for slot, place in enumerate(region.reads)}
        return cls(number, region, tuple(first), first, drops, slots)


@dataclass
class _Writer:
    lowered: Lowered
    style: Style
    names: Names = field(default_factory=Names)

    def __post_init__(self) -> None:
        uses: Sequence[Use] = self.style.uses.uses if self.style.uses is not None else ()
        self.uses = {(use.instruction, use.operand): use for use in uses}
        self.edges: dict[int, str] = {}
        functions = (perform, write_back, promising, leaves_of, Remade, made_again)
        for function in (*functions, torch.no_grad):
            self.names.add(function.__name__, function)
        self.read = {t for i in self.lowered.instructions for t in i.drops} | {*self.style.returns}
        self.regions = [
            _Written.of(self.lowered, number, self.uses)
            for number in range(len(self.lowered.again))
        ]
        self.home = {op: each for each in self.regions for op in each.region.ops}
        self.reads = {read: each for each in self.regions for read in each.region.reads}
        self.held = {t for each in self.regions for t in each.given}

    def lines(self) -> Iterator[str]:
        """The whole function."""
        yield "def step(context, given, leaves, observe):"
        yield f"{INDENT}groups = context.groups"
        for what, names in (
            ("given", [f"t{t}" for t in self.style.given]),
            ("leaves", [f"u{use.number}" for use in self.uses.values()]),
        ):
            if names:
                yield f"{INDENT}{', '.join(names)}, = {what}"
        yield from (INDENT + line for line in self._summed())
        if not self.style.is_traced:
            yield from (INDENT + line for each in self.regions for line in self._again(each))
        yield from (INDENT + line for line in self._body())
        yield f"{INDENT}return {''.join(f't{t}, ' for t in self.style.returns)}".rstrip()

    def _summed(self) -> Iterator[str]:
        """Parameters whose readers' gradients are added up: the sum is reduced where they end."""
        for instruction in self.lowered.instructions if self.style.uses is None else ():
            for feed in instruction.feeds:
                if feed.onward is not None:
                    stay = Moves((), feed.onward.target, feed.onward.target)
                    cast = feed.cast and replace(feed.cast, used=feed.cast.kept)
                    edge = self.names.add("edge", Edge(stay, feed.onward, cast=cast))
                    yield f"t{feed.tensor} = {edge}(t{feed.tensor}, groups)"

    def _again(self, written: _Written) -> Iterator[str]:
        """What runs again, as a function of what it is given; and what will call it."""
        region, number = written.region, written.number
        yield f"def again_{number}(region, given):"
        if written.given:
            yield f"{INDENT}{''.join(f't{t}, ' for t in written.given)}= given"
        ahead = self._started_ahead(region.ops)
        for index in region.visited:
            yield from (INDENT + self._start(use) for use in ahead.get(index, ()))
            for line in self._made_again(written, index):
                yield INDENT + line
            yield from (f"{INDENT}del t{t}" for t in written.drops.get(index, ()))
        yield f"remade_{number} = Remade(again_{number})"

    def _made_again(self, written: _Written, index: int) -> Iterator[str]:
        instruction = self.lowered.instructions[index]
        if index in self.home:
            yield f"with region.running({index}):"
            yield from (INDENT + line for line in self._instruction(index, instruction))
            yield from self._shared(instruction)
            return
        for (op, k), slot in written.slots.items():
            if op == index:
                yield f"region.fill({slot}, {self._operand(index, k, instruction.feeds[k])})"

    def _body(self) -> Iterator[str]:
        indices = range(len(self.lowered.instructions))
        ahead = self._started_ahead(indices)
        for index in indices:
            instruction = self.lowered.instructions[index]
            yield f"# {instruction.site.op.name}"
            yield from (self._start(use) for use in ahead.get(index, ()))
            lines = self._instruction(index, instruction)
            home = self.home.get(index)
            if home is None:
                yield from lines
            else:
                yield from self._first_time(home, index, lines)
            yield from self._results(instruction)
            yield from (f"del t{tensor}" for tensor in instruction.drops)
            for each in self.regions if not self.style.is_traced else ():
                if each.region.end == index:
                    yield f"del remade_{each.number}"

    def _first_time(self, home: _Written, index: int, lines: Iterator[str]) -> Iterator[str]:
        """An instruction that will run again: what it reads from others is held."""
        if self.style.is_traced:
            yield f"with made_again({home.number + 1}):"
        else:
            for place, tensor in enumerate(home.given):
                if home.first[tensor] == index:
                    yield f"remade_{home.number}.hold({place}, t{tensor})"
            yield f"with remade_{home.number}.running({index}):"
        yield from (INDENT + line for line in lines)

    def _started_ahead(self, indices: Sequence[int]) -> dict[int, list[Use]]:
        """Before which instruction each gather begins: a reader so many before its own."""
        gathered = [u for u in self.uses.values() if u.feed.there and u.instruction in indices]
        readers = sorted({use.instruction for use in gathered})
        first = [indices[0]] * self.lowered.ahead if readers else []
        before = dict(zip(readers, [*first, *readers], strict=False))
        found: dict[int, list[Use]] = {}
        for use in gathered:
            found.setdefault(before[use.instruction], []).append(use)
        return found

    def _start(self, use: Use) -> str:
        assert self.style.uses is not None
        start = self.names.add(f"start_{use.number}", partial(self.style.uses.start, use.number))
        return f"{start}()"

    def _instruction(self, index: int, instruction: Instruction) -> Iterator[str]:
        operands, before, after = [], [], []
        promised = []
        for k, feed in enumerate(instruction.feeds):
            text = self._operand(index, k, feed)
            # What is gathered when an operator runs again serves its backward.
            regathers = feed.regathers and index not in self.home
            remade = None if self.style.is_traced else self.reads.get((index, k))
            if k in instruction.writes or regathers or remade is not None:
                before.append(f"w{k} = {text}")
                after.append(f"del w{k}")
                text = f"w{k}"
            if regathers:
                promised.append(f"({self._promise(index, k, feed)}, {text})")
            if remade is not None:
                promised.append(f"(remade_{remade.number}, {remade.slots[index, k]}, {text})")
            operands.append(text)
        yield from before
        body = list(self._call(instruction, operands))
        if promised:
            body = [f"with promising([{', '.join(promised)}]):", *(INDENT + b for b in body)]
        if self._stops_gradient(instruction):
            body = ["with no_grad():", *(INDENT + line for line in body)]
            # A view that was made without gradients may not be written to, or be viewed, with them.
            body += [f"t{t} = t{t}.detach()" for t in instruction.results]
        yield from body
        for k in instruction.writes:
            feed = instruction.feeds[k]
            yield f"write_back({self.names.add('moves', feed.there)}, w{k}, t{feed.tensor})"
        yield from after

    def _operand(self, index: int, operand: int, feed: Feed) -> str:
        use = self.uses.get((index, operand))
        if use is not None:
            if not feed.there and feed.cast is None:
                return f"u{use.number}"
            assert self.style.uses is not None
            function = partial(self.style.uses.gathered, use.number)
            return f"{self.names.add(f'gathered_{use.number}', function)}(u{use.number})"
        return self._moved(feed) if feed.moves else f"t{feed.tensor}"

    def _moved(self, feed: Feed) -> str:
        if feed.back is None:
            taken = f"t{feed.tensor}"
            if feed.cast is not None:
                taken = f"{self.names.add('to_use', feed.cast.to_use)}({taken}.detach())"
            return f"perform({self.names.add('moves', feed.there)}, {taken}, groups)"
        if id(feed) not in self.edges:
            # Someone who looks at results keeps them: they are nobody's to write to.
            is_free = not self.style.is_observed
            edge = Edge(
                feed.there,
                feed.back,
                feed.owns_value and is_free and feed.tensor not in self.held,
                feed.owns_gradient and is_free,
                feed.cast,
            )
            self.edges[id(feed)] = self.names.add("edge", edge)
        return f"{self.edges[id(feed)]}(t{feed.tensor}, groups)"

    def _promise(self, index: int, operand: int, feed: Feed) -> str:
        """The promise of an operand, and its number there."""
        use = self.uses.get((index, operand))
        if use is not None:
            assert self.style.uses is not None
            function = partial(self.style.uses.promise, use.number)
            return f"{self.names.add(f'promise_{use.number}', function)}(context), {use.number}"
        name = self.names.add("alone", partial(alone, feed.there, feed.cast))
        return f"{name}(t{feed.tensor}, context), 0"

    def _stops_gradient(self, instruction: Instruction) -> bool:
        """Whether an operand has a gradient that must not flow on."""
        feeds = instruction.feeds
        return not instruction.has_gradient and any(feed.requires_grad for feed in feeds)

    def _call(self, instruction: Instruction, operands: list[str]) -> Iterator[str]:
        site, local = instruction.site, instruction.local
        if local == site.invoke:
            text = call_text(site.call, operands, self.style.target, self.names)
        else:
            name = self.names.add(f"local_{site.op.kind.split('.')[-1]}", local)
            text = f"{name}(({', '.join(operands)}{',' if operands else ''}), context)"
        results = [f"t{t}" for t in instruction.results]
        if len(results) == 1 and _gives_one_tensor(site):
            yield f"{results[0]} = {text}"
        else:
            yield f"{', '.join(results)}, = leaves_of({text})"

    def _results(self, instruction: Instruction) -> Iterator[str]:
        if self.style.is_observed:
            results = ", ".join(f"t{t}" for t in instruction.results)
            yield f"{results}, = observe({self.names.add('instruction', instruction)}, [{results}])"
        yield from self._shared(instruction)

    def _shared(self, instruction: Instruction) -> Iterator[str]:
        """To the layout that several readers share."""
        for tensor, shared in zip(instruction.results, instruction.shared, strict=True):
            if shared is not None and shared.moves:
                yield f"t{tensor} = {self._moved(shared)}"


def _gives_one_tensor(site: Site) -> bool:
    returns = site.call.target._schema.returns
    return len(returns) == 1 and str(returns[0].type) == "Tensor"


def alone(moves: Moves, cast: Casting | None, stored: Tensor, context: Context) -> Promise:
    """The promise of a parameter that is moved when it is asked for."""
    member = Member(0, Gather(moves, context.groups, cast=cast), stored, 0)
    return Promise(Joint([member]), context)


def leaves_of(found: Any) -> list[Tensor]:
    """The tensors of a result with several, in order."""
    if isinstance(found, Tensor):
        return [found]
    items = found if isinstance(found, (list, tuple)) else ()
    return [leaf for item in items for leaf in leaves_of(item)]
