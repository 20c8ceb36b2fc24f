"""Random modules: statements are drawn from the templates, and kept where PyTorch runs them.

A draw is the text of a module. Statements are tried one by one on real tensors while it grows, so
that the next one knows the shapes; what PyTorch itself refuses is left out.
"""

from __future__ import annotations

import functools
import linecache
import random
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fuzzing.functions import Both, Scaled, Straight
from unit.capture.meanings import Reversed

SHAPE = (4, 6, 8)
FLOAT = torch.float64
NUMBERS = ("0.5", "-0.7", "1.25", "0.1")
KNOWN = {
    "torch": torch,
    "F": F,
    "nn": nn,
    "np": np,
    "random": random,
    "functools": functools,
    **{f.__name__: f for f in (checkpoint, Straight, Reversed, Both, Scaled)},
}


def _grammar() -> dict[str, list[str]]:
    """The templates, by the name of their kind."""
    found: dict[str, list[str]] = {}
    for line in Path(__file__).with_name("grammar.txt").read_text().splitlines():
        if line.startswith("["):
            kind = found[line.strip("[]")] = []
        elif line and not line.startswith("#"):
            kind.append(line)
    return found


GRAMMAR = _grammar()
RARE = ("random", "refused")
RETURNS = (
    *("loss",) * 4,
    *("(loss, h0.detach())", "{'loss': loss, 'hidden': h0}", "{'hidden': h0, 'loss': loss}"),
    *("[loss]", "(loss, {'hidden': [h0]})"),
)


@dataclass(frozen=True)
class Draw:
    """A module as text."""

    inits: tuple[str, ...]
    lines: tuple[str, ...]
    block: tuple[tuple[str, ...], tuple[str, ...]] | None
    result: str
    is_random: bool

    def __str__(self) -> str:
        return "\n".join(self._block() + self._module()) + "\n"

    def _block(self) -> list[str]:
        if self.block is None:
            return []
        inits, lines = self.block
        return _class("Block", inits, "h0, tokens, mask, scale=1.5, flag=True", lines)

    def _module(self) -> list[str]:
        blocks = ["self.blocks = nn.ModuleList([Block() for _ in range(3)])"]
        inits = [*self.inits, *(blocks if self.block is not None else ())]
        return _class("Drawn", inits, "x, tokens, mask, scale=1.5, flag=True", self.lines)

    def module(self) -> nn.Module:
        """The module, in float64, always with the same weights."""
        known = {**KNOWN, "__name__": __name__}
        source, name = str(self), f"<drawn {abs(hash(self))}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        exec(compile(source, name, "exec"), known)
        torch.manual_seed(0)
        made: nn.Module = known["Drawn"]().to(FLOAT)
        return made

    def steps(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Two different batches."""
        return [(batch(seed), {"scale": 1.5}) for seed in (1, 2)]


def _class(name: str, inits: Sequence[str], given: str, lines: Sequence[str]) -> list[str]:
    return [
        f"class {name}(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        *(f"        {line}" for line in inits),
        "    def helper(self, v, *, by):",
        "        return torch.tanh(v) * by",
        f"    def forward(self, {given}):",
        *(f"        {line}" for line in lines),
    ]


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers, tokens and a mask of tokens."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SHAPE, generator=generator, dtype=FLOAT)
    tokens = torch.randint(0, 12, SHAPE[:2], generator=generator)
    return x, tokens, torch.rand(SHAPE[:2], generator=generator) < 0.4


def draw(rng: random.Random, *, rare: float = 0.03) -> Draw:
    """A module of a few statements, in a third of the draws with blocks that repeat."""
    has_blocks = rng.random() < 0.3
    block = None
    if has_blocks:
        body = _Body(rng, "h0", 0)
        body.grow(rng.randint(1, 4), 0.0)
        block = (tuple(body.inits), (*body.lines, f"return {body.close()}"))
    body = _Body(rng, "x", rng.random() < 0.25)
    body.grow(rng.randint(2, 8), rare)
    if has_blocks:
        body.lines.append("for block in self.blocks: h0 = block(h0, tokens, mask)")
    body.lines.append(f"loss = {body.loss()}")
    result = rng.choice(RETURNS)
    lines = (*body.lines, f"return {result}")
    return Draw(tuple(body.inits), lines, block, result, body.is_random)


class _Body:
    """The statements of one forward, and its values so far."""

    def __init__(self, rng: random.Random, first: str, is_random: bool) -> None:
        self.rng = rng
        self.inits = ["self.first = nn.Linear(8, 8)"] * (first == "x")
        self.lines = ["h0 = self.first(x)"] * (first == "x")
        self.count, self.is_random = 0, False
        self.kinds = [kind for kind in GRAMMAR if kind not in RARE] + ["random"] * (2 * is_random)
        x, tokens, mask = batch(0)
        self.module = nn.Module()
        self.module.helper = lambda v, *, by: torch.tanh(v) * by
        self.values: dict[str, Any] = {
            **KNOWN,
            "self": self.module,
            "x": x,
            "tokens": tokens,
            "mask": mask,
            "scale": 1.5,
            "flag": True,
        }
        self.values["h0"] = (x * 1.0).requires_grad_() * 1.0

    def grow(self, count: int, rare: float) -> None:
        """Add so many statements, or as many as are found in a few trials for each."""
        for _ in range(4 * count):
            is_rare = self.rng.random() < rare
            kind = "refused" if is_rare else self.rng.choice(self.kinds)
            if self._add(self.rng.choice(GRAMMAR[kind])):
                count -= 1
                self.is_random |= kind == "random"
            if not count:
                return

    def _add(self, template: str) -> bool:
        filled = self._filled(template)
        if filled is None:
            return False
        init, _, line = filled.rpartition(" | ")
        before = dict(self.values)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(init, self.values)
                self.module.to(FLOAT)
                exec(line, self.values)
        except Exception:
            self.values = before
            return False
        self.inits += [init] if init else []
        self.lines.append(line)
        return True

    def _filled(self, template: str) -> str | None:
        self.count += 1
        rng, names = self.rng, {"q": str(self.count)}
        for key in ("o", "p"):
            names[key] = f"{'h' if key == 'o' else 'g'}{self.count}"
        names |= {"i": str(rng.randrange(4)), "j": str(rng.randrange(4)), "f": rng.choice(NUMBERS)}
        shaped: dict[str, Callable[[Tensor], bool]] = {
            "a": lambda t: True,
            "m": lambda t: tuple(t.shape) == SHAPE,
            "n": lambda t: tuple(t.shape) == SHAPE,
            "d": lambda t: t.dim() > 1 and t.shape[-1] == 8,
            "u": lambda t: t.dim() == 2,
        }
        for key, fits in shaped.items():
            if f"{{{key}}}" in template:
                found = self._named(fits)
                if not found:
                    return None
                names[key] = rng.choice(found)
        if "{b}" in template:
            wanted = self.values[names["a"]].shape
            names["b"] = rng.choice(self._named(lambda t: t.shape == wanted))
        return template.format(**names)

    def _named(self, fits: Callable[[Tensor], bool]) -> list[str]:
        """The names of floating values that fit, the latest three times as often."""
        found = [
            name
            for name, value in self.values.items()
            if re.fullmatch(r"[hg]\d+", name) and isinstance(value, Tensor) and value.dtype == FLOAT
            if value.numel() and fits(value)
        ]
        return found + found[-1:] * 2

    def close(self) -> str:
        """A value of the batch's shape, of several."""
        found = self._named(lambda t: tuple(t.shape) == SHAPE)
        return f"torch.tanh({found[-1]}) + {self.rng.choice(found)}"

    def loss(self) -> str:
        """A number made of the first value and a few others."""
        found = list(dict.fromkeys(self._named(lambda t: True)))
        chosen = dict.fromkeys(["h0", *found[-2:], *self.rng.sample(found, min(2, len(found)))])
        return " + ".join(f"torch.tanh({name}).square().mean()" for name in chosen)
