"""Code generation: one device's step as Python source, with nothing left to interpret.

For `torch.compile`, operators of recomputed blocks carry a checkpointing policy: the compiler then
does not decide by itself what backward keeps of them.

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

What runs again before backward is a function within: autograd keeps what it is given, calls it
once more, with the same dropout and all its collectives, and stops at the last thing it lacks.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

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


@dataclass
class _Writer:
    lowered: Lowered
    style: Style
    names: Names = field(default_factory=Names)

    def __post_init__(self) -> None:
        uses: Sequence[Use] = self.style.uses.uses if self.style.uses is not None else ()
        self.uses = {(use.instruction, use.operand): use for use in uses}
        self.edges: dict[int, str] = {}
        functions = (perform, write_back, promising, leaves_of, twice, made_again)
        for function in (*functions, torch.no_grad):
            self.names.add(function.__name__, function)
        self.read = {t for i in self.lowered.instructions for t in i.drops} | {*self.style.returns}
        self.inside: set[int] = set()  # of a stretch that runs again: what it is given
        self.hidden: set[int] = set()  # and what it cannot see
        self.runs_twice = False

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
        for stretch, is_again in self._stretches():
            for line in self._block(stretch) if is_again else self._body(stretch):
                yield INDENT + line
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

    def _stretches(self) -> Iterator[tuple[range, bool]]:
        """All instructions, cut where something begins or ceases to run again."""
        at = 0
        for again in self.lowered.again:
            yield range(at, again.start), False
            yield again, True
            at = again.stop
        yield range(at, len(self.lowered.instructions)), False

    def _block(self, indices: range) -> Iterator[str]:
        """A stretch as a function of what it reads, called so that it can be called again."""
        if self.style.is_traced:
            yield f"with made_again({indices.start}):"
            yield from (INDENT + line for line in self._body(indices))
            return
        inside = [self.lowered.instructions[i] for i in indices]
        made = {t for instruction in inside for t in instruction.results}
        read = [feed.tensor for instruction in inside for feed in instruction.feeds]
        dropped = {t for instruction in inside for t in instruction.drops}
        leaves = [u for u in self.uses.values() if u.instruction in indices]
        through = {(u.instruction, u.operand) for u in leaves}
        given = dict.fromkeys(
            f"t{feed.tensor}"
            for i, instruction in zip(indices, inside, strict=True)
            for k, feed in enumerate(instruction.feeds)
            if feed.tensor not in made and (i, k) not in through
        )
        given |= dict.fromkeys(f"u{u.number}" for u in leaves)
        results_in_order = [t for instruction in inside for t in instruction.results]
        wanted = [t for t in results_in_order if t not in dropped and t in self.read]
        self.inside, self.runs_twice = set(read) - made, True
        self.hidden = {t for t in self.inside if f"t{t}" not in given}
        name, results = f"block_{indices.start}", "".join(f"t{t}, " for t in wanted)
        yield f"def {name}({', '.join(given)}):"
        yield from (INDENT + line for line in self._body(indices))
        yield f"{INDENT}return {results}"
        yield f"{results}= twice({name}, {', '.join(given)})"
        yield from (f"del t{t}" for t in sorted(dropped - made))
        self.inside, self.hidden, self.runs_twice = set(), set(), False

    def _body(self, indices: Sequence[int]) -> Iterator[str]:
        ahead = self._started_ahead(indices)
        for index in indices:
            instruction = self.lowered.instructions[index]
            yield f"# {instruction.site.op.name}"
            yield from (self._start(use) for use in ahead.get(index, ()))
            yield from self._instruction(index, instruction)
            for tensor in instruction.drops:
                if tensor not in self.hidden:
                    yield f"del t{tensor}"

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
            # What is gathered when a stretch runs again serves its backward.
            regathers = feed.regathers and not self.runs_twice
            if k in instruction.writes or regathers:
                before.append(f"w{k} = {text}")
                after.append(f"del w{k}")
                text = f"w{k}"
            if regathers:
                promised.append(f"({self._promise(index, k, feed)}, {text})")
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
        yield from self._results(instruction)

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
                feed.owns_value and is_free and feed.tensor not in self.inside,
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


def twice(block: Callable[..., tuple[Tensor, ...]], *given: Tensor) -> tuple[Tensor, ...]:
    """Call a function now, and again when backward asks for what it would have kept."""
    if not torch.is_grad_enabled():
        return block(*given)
    found: tuple[Tensor, ...] = checkpoint(
        block, *given, use_reentrant=False, preserve_rng_state=False
    )
    return found


def leaves_of(found: Any) -> list[Tensor]:
    """The tensors of a result with several, in order."""
    if isinstance(found, Tensor):
        return [found]
    items = found if isinstance(found, (list, tuple)) else ()
    return [leaf for item in items for leaf in leaves_of(item)]
