"""Small modules whose forward does what a graph of operators does not keep by itself.

Each is a class with a `steps` function: the batches of two or three training steps. The oracle is
the module itself, run in plain PyTorch.
"""

from __future__ import annotations

import collections
import itertools
import random
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

WIDTH, BATCH = 6, 4
Step = tuple[tuple[Any, ...], dict[str, Any]]


class Case(nn.Module):
    """Two linear layers; what is between them is the case's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.prepare()

    def prepare(self) -> None:
        """Further parts."""

    def between(self, h: Tensor) -> Tensor:
        """What the case is about."""
        return h

    def forward(self, x: Tensor) -> Any:
        """A loss."""
        return self.b(self.between(self.a(x))).square().mean()

    def steps(self) -> list[Step]:
        """The batches of three steps."""
        torch.manual_seed(1)
        return [((torch.randn(BATCH, WIDTH),), {}) for _ in range(3)]


# -- backward functions and hooks


class Round(torch.autograd.Function):
    """Rounds forward, passes the gradient straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Reversed(torch.autograd.Function):
    """The identity whose gradient is turned round, by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return -ctx.factor * gradient, None


class Pair(torch.autograd.Function):
    """Two inputs, two results, saved tensors, in the style with setup_context."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return x * w, x + w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor, k: Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return 2 * g * w + k, (3 * g * x + k).sum(0)


kept_round, kept_pair = Round.apply, Pair.apply


class FunctionsKeptBefore(Case):
    """Functions under names of their own, of a module and of the file."""

    def prepare(self) -> None:
        self.reverse = Reversed.apply

    def between(self, h: Tensor) -> Tensor:
        y, z = kept_pair(h, self.b.weight[0])
        return self.reverse(kept_round(h * 3), 0.5) + y * z


class Dirty(torch.autograd.Function):
    """Writes into its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 5 * gradient


class StraightThrough(Case):
    def between(self, h: Tensor) -> Tensor:
        return Round.apply(h * 3)


class GradientReversal(Case):
    def between(self, h: Tensor) -> Tensor:
        return Reversed.apply(h, 0.5)


class FunctionOfTwo(Case):
    def prepare(self) -> None:
        self.w = nn.Parameter(torch.randn(WIDTH))

    def between(self, h: Tensor) -> Tensor:
        p, q = Pair.apply(h, self.w)
        return p * q


class FunctionInBlocks(Case):
    def prepare(self) -> None:
        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

            def forward(self, x: Tensor) -> Tensor:
                return x + self.down(Round.apply(self.up(x) * 4))

        self.blocks = nn.ModuleList([Block() for _ in range(4)])

    def between(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h)
        return h


class DirtyFunction(Case):
    def between(self, h: Tensor) -> Tensor:
        return Dirty.apply(h * 1.0)


class TensorHook(Case):
    def between(self, h: Tensor) -> Tensor:
        h.register_hook(lambda g: -g)
        return h


class HookOnlyLooks(Case):
    def prepare(self) -> None:
        self.seen: list[float] = []

    def between(self, h: Tensor) -> Tensor:
        h.register_hook(lambda g: self.seen.append(1.0))
        return h


class BackwardHook(Case):
    def prepare(self) -> None:
        self.a.register_full_backward_hook(
            lambda m, gi, go: tuple(g * 0 for g in gi if g is not None) or None
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.b(x)).square().mean()


class BackwardPreHook(Case):
    def prepare(self) -> None:
        self.a.register_full_backward_pre_hook(lambda m, go: tuple(2 * g for g in go))


class ParameterHook(Case):
    def prepare(self) -> None:
        self.a.weight.register_hook(lambda g: g * 0.25)


class AccumulateHook(Case):
    def prepare(self) -> None:
        def halve(p: Tensor) -> None:
            assert p.grad is not None
            p.grad.mul_(0.5)

        self.a.weight.register_post_accumulate_grad_hook(halve)


class ForwardHook(Case):
    def prepare(self) -> None:
        self.a.register_forward_hook(lambda m, args, out: out * 2)
        self.b.register_forward_pre_hook(lambda m, args: (args[0] + 1,))


class HookThatCounts(Case):
    def prepare(self) -> None:
        self.a.calls = 0

        def count(module: Any, args: Any, out: Tensor) -> Tensor:
            module.calls += 1
            return out * module.calls

        self.a.register_forward_hook(count)


# -- buffers and parameters that forward changes


class RunningMean(Case):
    def prepare(self) -> None:
        self.register_buffer("mean", torch.zeros(WIDTH))

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return h - self.mean


class Lerped(Case):
    def prepare(self) -> None:
        self.register_buffer("mean", torch.ones(WIDTH))

    def between(self, h: Tensor) -> Tensor:
        out = h * self.mean.clone()
        self.mean.lerp_(h.detach().mean(0), 0.3)
        return out


class Reassigned(Case):
    def prepare(self) -> None:
        self.register_buffer("scale", torch.ones(()))

    def between(self, h: Tensor) -> Tensor:
        out = h * self.scale
        self.scale = 0.5 * self.scale + h.detach().abs().mean()
        return out


class CountedInABuffer(Case):
    def prepare(self) -> None:
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def between(self, h: Tensor) -> Tensor:
        self.count += 1
        return h * self.count


class CountedButUnread(Case):
    def prepare(self) -> None:
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(()))

    def between(self, h: Tensor) -> Tensor:
        self.count += 2
        self.seen.add_(h.shape[0])
        return h


class CopiedInto(Case):
    def prepare(self) -> None:
        self.register_buffer("last", torch.zeros(BATCH, WIDTH))

    def between(self, h: Tensor) -> Tensor:
        out = h + self.last.clone()
        with torch.no_grad():
            self.last.copy_(h)
        return out


class SliceOfABuffer(Case):
    def prepare(self) -> None:
        self.register_buffer("queue", torch.zeros(2 * BATCH, WIDTH))

    def between(self, h: Tensor) -> Tensor:
        out = h + self.queue.mean(0)
        self.queue[BATCH:] = self.queue[:BATCH].clone()
        self.queue[:BATCH] = h.detach()
        return out


class SliceWithoutGradients(Case):
    def prepare(self) -> None:
        self.register_buffer("queue", torch.zeros(2 * BATCH, WIDTH))

    def between(self, h: Tensor) -> Tensor:
        out = h + self.queue.mean(0)
        with torch.no_grad():
            self.queue[:BATCH] = h
        return out


class DataOfABuffer(Case):
    def prepare(self) -> None:
        self.register_buffer("peak", torch.zeros(WIDTH))

    def between(self, h: Tensor) -> Tensor:
        self.peak.data = torch.maximum(self.peak, h.detach().amax(0))
        return h * self.peak


class UpdatedInBlocks(Case):
    def prepare(self) -> None:
        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
                self.register_buffer("mean", torch.zeros(8))

            def forward(self, x: Tensor) -> Tensor:
                u = self.up(x)
                with torch.no_grad():
                    self.mean.mul_(0.5).add_(u.mean(0))
                return x + self.down(u - self.mean)

        self.blocks = nn.ModuleList([Block() for _ in range(4)])

    def between(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h)
        return h


class Teacher(Case):
    def prepare(self) -> None:
        self.teacher = nn.Linear(WIDTH, WIDTH)
        for parameter in self.teacher.parameters():
            parameter.requires_grad_(False)

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, theirs in zip(self.teacher.parameters(), self.a.parameters(), strict=True):
                mine.mul_(0.7).add_(theirs, alpha=0.3)
            target = self.teacher(h)
        return h - target


class Codebook(Case):
    def prepare(self) -> None:
        self.register_buffer("codes", torch.randn(5, WIDTH))
        self.register_buffer("sizes", torch.ones(5))

    def between(self, h: Tensor) -> Tensor:
        nearest = torch.cdist(h, self.codes).argmin(1)
        chosen = F.one_hot(nearest, 5).to(h.dtype)
        quantised = chosen @ self.codes
        with torch.no_grad():
            self.sizes.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            sums = chosen.t() @ h
            self.codes.mul_(0.9).add_(sums / self.sizes[:, None], alpha=0.1)
        return h + (quantised - h).detach()


class ClampedWeight(Case):
    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.b.weight.clamp_(-0.1, 0.1)
        return h


class DataOfAWeight(Case):
    def between(self, h: Tensor) -> Tensor:
        self.b.weight.data.mul_(0.5)
        return h


class ScaledDataOfAWeight(Case):
    def between(self, h: Tensor) -> Tensor:
        self.b.weight.data *= 0.9
        return h


class TableOfBuffers(Case):
    """A buffer that is set past the module's own way."""

    def prepare(self) -> None:
        self.register_buffer("mean", torch.zeros(WIDTH))

    def between(self, h: Tensor) -> Tensor:
        self._buffers["mean"] = self.mean * 0.9 + 0.1 * h.detach().mean(0)
        return h + self.mean


class GrownBuffer(Case):
    def prepare(self) -> None:
        self.register_buffer("rows", torch.zeros(1, WIDTH))

    def between(self, h: Tensor) -> Tensor:
        self.rows = torch.cat([self.rows, h.detach()[:1]])
        return h + self.rows.mean(0)


class RenormedEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(9, WIDTH, max_norm=0.5)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embedding(x)).square().mean()

    def steps(self) -> list[Step]:
        torch.manual_seed(1)
        return [((torch.randint(0, 9, (BATCH, 3)),), {}) for _ in range(2)]


class ByFrequency(RenormedEmbedding):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, WIDTH, scale_grad_by_freq=True)


class SparseEmbedding(RenormedEmbedding):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, WIDTH, sparse=True)


class BatchNormTwice(Case):
    def prepare(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH)

    def between(self, h: Tensor) -> Tensor:
        return self.norm(self.norm(h) * 2 + 1)


class FrozenNorm(Case):
    def prepare(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH).eval()
        self.other = nn.BatchNorm1d(WIDTH)

    def between(self, h: Tensor) -> Tensor:
        return self.other(self.norm(h))


class UnusedNorm(Case):
    def prepare(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH)
        self.unused = nn.BatchNorm1d(WIDTH)

    def between(self, h: Tensor) -> Tensor:
        return self.norm(h)


class CumulativeNorm(Case):
    def prepare(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None)

    def between(self, h: Tensor) -> Tensor:
        return self.norm(h)


class SpectralNorm(Case):
    def prepare(self) -> None:
        self.c = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def between(self, h: Tensor) -> Tensor:
        return self.c(h)


class WeightNorm(Case):
    def prepare(self) -> None:
        self.c = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def between(self, h: Tensor) -> Tensor:
        return self.c(h)


# -- arguments and Python's own state


class Scaled(Case):
    def forward(self, x: Tensor, beta: float = 1.0, flag: bool = False) -> Tensor:  # type: ignore[override]
        h = self.a(x) * beta
        return self.b(h.relu() if flag else h).square().mean()

    def steps(self) -> list[Step]:
        (x,), _ = super().steps()[0]
        return [((x,), {"beta": beta}) for beta in (1.0, 0.5)]


class Flagged(Scaled):
    def steps(self) -> list[Step]:
        (x,), _ = Case.steps(self)[0]
        return [((x, 1.0, flag), {}) for flag in (False, True)]


class Nested(Case):
    def forward(self, batch: dict[str, Any]) -> Tensor:  # type: ignore[override]
        return self.b(self.a(batch["x"]) * batch["weights"][0]).square().mean()

    def steps(self) -> list[Step]:
        (x,), _ = super().steps()[0]
        return [(({"x": x, "weights": [w, 0]},), {}) for w in (2.0, 3.0)]


class Maybe(Case):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        h = self.a(x)
        return self.b(h if mask is None else h * mask).square().mean()

    def steps(self) -> list[Step]:
        (x,), _ = super().steps()[0]
        return [((x,), {"mask": mask}) for mask in (None, torch.zeros(BATCH, 1))]


class Counter(Case):
    def prepare(self) -> None:
        self.calls = 0

    def between(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h * self.calls


class EveryOther(Case):
    def prepare(self) -> None:
        self.state = {"calls": 0}

    def between(self, h: Tensor) -> Tensor:
        self.state["calls"] += 1
        return h.relu() if self.state["calls"] % 2 else h


class History(Case):
    def prepare(self) -> None:
        self.history: list[int] = []

    def between(self, h: Tensor) -> Tensor:
        self.history.append(h.shape[0])
        return h * len(self.history)


class CounterInABlock(Case):
    def prepare(self) -> None:
        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
                self.calls = 0

            def forward(self, x: Tensor) -> Tensor:
                self.calls += 1
                return x + self.down(self.up(x)) / self.calls

        self.blocks = nn.ModuleList([Block() for _ in range(4)])

    def between(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h)
        return h


class WrittenOnly(Case):
    def between(self, h: Tensor) -> Tensor:
        self.width = h.shape[-1]
        return h / self.width


class OnceFlag(Case):
    def prepare(self) -> None:
        self.warned = False

    def between(self, h: Tensor) -> Tensor:
        if not self.warned:
            self.warned = True
        return h


class PythonsRandom(Case):
    def between(self, h: Tensor) -> Tensor:
        return h * 2 if random.random() < 0.5 else h


# -- what forward returns, and regions


class PlainTensors(Case):
    """Tensors that are no buffers: an attribute, in a list, in a dictionary, in a block."""

    def prepare(self) -> None:
        self.scale = torch.arange(1.0, 7.0)
        self.more = [torch.tensor(0.5), {"shift": torch.linspace(-1, 1, WIDTH)}]
        self.parts = nn.ModuleList(Scaling(float(k)) for k in range(4))

    def between(self, h: Tensor) -> Tensor:
        for part in self.parts:
            h = part(h)
        self.last = h.detach()  # read by nobody
        return h * self.scale[:1] + self.scale * self.more[0] + self.more[1]["shift"]


class Scaling(nn.Module):
    """A part with a number of its own."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.linear, self.by = nn.Linear(WIDTH, WIDTH), torch.full((WIDTH,), by)

    def forward(self, h: Tensor) -> Tensor:
        return h + (self.linear(h) * self.by).tanh()


class PlainTensorWritten(PlainTensors):
    def between(self, h: Tensor) -> Tensor:
        self.scale[1:].mul_(0.9)
        return h * self.scale


class PlainTensorReplaced(PlainTensors):
    def between(self, h: Tensor) -> Tensor:
        self.more[0] = 0.9 * self.more[0]
        return h * self.more[0]


class PackedSequence(Case):
    def prepare(self) -> None:
        self.rnn = nn.GRU(1, 1, batch_first=True)

    def between(self, h: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(h[..., None], [6, 4, 3, 2], batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0][..., 0]


class FlexAttention(Case):
    def between(self, h: Tensor) -> Tensor:
        heads = h[None, None]
        return flex_attention(heads, heads, heads, lambda score, b, h, i, j: score + (i - j))[0, 0]


class ListOfLosses(Case):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        return [h.square().mean(), self.b(h).square().mean()]

    loss = staticmethod(lambda out: sum(out))


class DictOfLosses(Case):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        return {"one": h.square().mean(), "two": self.b(h).square().mean()}

    loss = staticmethod(lambda out: sum(out.values()))


class LossAndItsParts(Case):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        one, two = h.square().mean(), self.b(h).square().mean()
        return one + two, {"one": one, "two": two.detach()}

    loss = staticmethod(lambda out: out[0])


class Autocast(Case):
    dtype = torch.float32  # autocast leaves float64 alone

    def between(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.b(h).float()


class AutocastElsewhere(Case):
    """On a machine without such a device, torch leaves it off."""

    def between(self, h: Tensor) -> Tensor:
        absent = patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: True)
        with absent, torch.autocast("cuda"):
            return self.b(h)


class AutocastOffElsewhere(Case):
    def between(self, h: Tensor) -> Tensor:
        with torch.autocast("cuda", enabled=False):
            return self.b(h)


class AutocastOff(Case):
    def between(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.b(h)


class Checkpointed(Case):
    def between(self, h: Tensor) -> Tensor:
        return checkpoint(lambda t: self.b(t).relu(), h, use_reentrant=False)


class CheckpointedReentrant(Case):
    def between(self, h: Tensor) -> Tensor:
        return checkpoint(lambda t: self.b(t).relu(), h, use_reentrant=True)


class InferenceMode(Case):
    def between(self, h: Tensor) -> Tensor:
        with torch.inference_mode():
            scale = self.b(h.detach()).abs().mean()
        return h * scale.item() if False else h * scale.clone()


class WrittenWithoutGradients(Case):
    def between(self, h: Tensor) -> Tensor:
        y = h * 1.0
        with torch.no_grad():
            y.add_(1.0)
        return y


class WrittenConstant(Case):
    def between(self, h: Tensor) -> Tensor:
        weights = torch.zeros(WIDTH, dtype=h.dtype)
        with torch.no_grad():
            weights.add_(h.mean(0))
        return h * weights


class InputWritten(Case):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return self.b(self.a(x)).square().mean()


class FrozenInForward(Case):
    def between(self, h: Tensor) -> Tensor:
        self.b.weight.requires_grad_(False)
        out = self.b(h)
        self.b.weight.requires_grad_(True)
        return out


class GradientPenalty(Case):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        y = self.b(self.a(x).tanh()).square().mean()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        return y + gradient.square().mean()


class SecondDerivative(Case):
    """An equation of the second derivative; autograd keeps the results of its functions."""

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_(True)
        u = self.b(torch.sigmoid(self.a(x))).softmax(-1)
        first = torch.autograd.grad(u[:, 0], x, torch.ones_like(u[:, 0]), create_graph=True)[0]
        second = torch.autograd.grad(first[:, 1].sum(), x, create_graph=True)[0][:, 1]
        return (second + u[:, 0]).square().mean() + first.square().mean()


class GradientTakenAsNumbers(Case):
    """A step along a gradient that is no part of the graph."""

    def forward(self, x: Tensor) -> Tensor:
        h = x.detach()
        h.requires_grad = True
        (gradient,) = torch.autograd.grad(self.b(torch.tanh(self.a(h))).sum(), h)
        return self.b(self.a(x - 0.3 * gradient)).square().mean()


class StepOfTheWeights(Case):
    """An inner step, and the loss after it, of blocks that repeat."""

    def prepare(self) -> None:
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for block in self.blocks:
            h = torch.tanh(block(h))
        weights = [self.a.weight, self.a.bias]
        inner = F.linear(h, *weights).square().mean()
        steps = torch.autograd.grad(inner, weights, create_graph=True)
        moved = [w - 0.5 * s for w, s in zip(weights, steps, strict=True)]
        return self.b(F.linear(h, *moved)).square().mean()


class BackwardInForward(Case):
    def between(self, h: Tensor) -> Tensor:
        self.b(h.detach()).sum().backward()
        return h


# -- constants, randomness, data-dependent values


class ListsAsIndices(Case):
    def between(self, h: Tensor) -> Tensor:
        h = h[:, [2, 0, 1, 5, 4, 3]] * h[:, np.array([[1], [2]])].sum((1, 2))[:, None]
        h = h + h[:, [True, False, True, True, False, False]].sum(-1, keepdim=True)
        h = h.clone()
        h[:, [0, -1]] = h[:, [-1, 0]] * 2
        return h


class ConstantInForward(Case):
    def between(self, h: Tensor) -> Tensor:
        return h * torch.tensor(1.5, dtype=h.dtype) + torch.tensor(
            [1, 2, 3, 4, 5, 6], dtype=h.dtype
        )


class ConstantOfAnother(Case):
    def between(self, h: Tensor) -> Tensor:
        return F.prelu(h, h.new_tensor(0.2)) * h.new_tensor([1, 2, 3, 4, 5, 6])


class LayerDropOff(Case):
    def between(self, h: Tensor) -> Tensor:
        if self.training and torch.rand([]) < 0.0:
            return h
        return self.b(h)


class LayerDropByNumber(Case):
    """The coin as Python's number, or drawn in place."""

    def between(self, h: Tensor) -> Tensor:
        if self.training and torch.rand(1).item() < 0.0:
            return h
        if torch.empty(1).uniform_().item() >= 1 or torch.empty(()).uniform_() < 0.0:
            return h * 3
        return h * 2


class LayerDropByNumberOn(Case):
    def between(self, h: Tensor) -> Tensor:
        return h if torch.rand(1).item() < 0.5 else h * 2


class LoggedNumbers(Case):
    def forward(self, x: Tensor) -> Any:
        loss = super().forward(x)
        return loss, {"loss": float(loss)}


class FunctionGiven(Case):
    def forward(self, x: Tensor, act: Any) -> Tensor:
        return super().forward(act(x))

    def steps(self) -> list[Step]:
        return [((torch.ones(BATCH, WIDTH), F.gelu), {})]


class ArrayGiven(Case):
    def forward(self, x: Tensor, *, w: Any) -> Tensor:
        return super().forward(x * torch.from_numpy(w))

    def steps(self) -> list[Step]:
        return [((torch.ones(BATCH, WIDTH),), {"w": np.ones(WIDTH)})]


class OwnTrainingMode(Case):
    """Its norm is frozen by `train()`, which nobody has called yet."""

    def prepare(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH)

    def between(self, h: Tensor) -> Tensor:
        return self.norm(h)

    def train(self, mode: bool = True) -> OwnTrainingMode:
        super().train(mode)
        self.norm.eval()
        return self


class OwnTrainingModeSet(OwnTrainingMode):
    def __init__(self) -> None:
        super().__init__()
        self.train()


class Registered(nn.Module):
    """A class that keeps a register of all that are derived from it, under names they give."""

    known: ClassVar[dict[str, type[nn.Module]]] = {}

    def __init_subclass__(cls, *, name: str, **given: Any) -> None:
        super().__init_subclass__(**given)
        Registered.known[name] = cls


class Half(Registered, name="half"):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * self.a(x)


class RegisteredBlocks(Case):
    def prepare(self) -> None:
        self.blocks = nn.ModuleList(Registered.known["half"]() for _ in range(4))

    def between(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h)
        return h


class Noise(Case):
    def between(self, h: Tensor) -> Tensor:
        return h + 0.1 * torch.randn_like(h)


class DroppedBetweenLayers(Case):
    def prepare(self) -> None:
        options = {"num_layers": 2, "batch_first": True, "dropout": 0.4}
        self.one = nn.LSTM(WIDTH, 5, bidirectional=True, **options)
        self.two = nn.GRU(10, WIDTH, **options)

    def between(self, h: Tensor) -> Tensor:
        return self.two(self.one(torch.stack([h, 2 * h, h.cos()], 1))[0])[0][:, -1]


class BooleanIndex(Case):
    def between(self, h: Tensor) -> Tensor:
        return h[h[:, 0] > 0].mean(0, keepdim=True)


class LoopOverExperts(Case):
    def between(self, h: Tensor) -> Tensor:
        out = torch.zeros_like(h)
        for expert in range(2):
            rows = (h[:, 0] > expert).nonzero().squeeze(-1)
            out.index_add_(0, rows, self.b(h[rows]))
        return out


class RowsOfExperts(Case):
    """Every token goes to two experts; their rows are found by `where`, as is usual."""

    def prepare(self) -> None:
        self.gate = nn.Linear(WIDTH, 3)
        self.up = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(3))

    def between(self, h: Tensor) -> Tensor:
        weights, chosen = self.gate(h).softmax(-1).topk(2)
        found, marks = torch.zeros_like(h), F.one_hot(chosen, 3).permute(2, 1, 0)
        for number, up in enumerate(self.up):
            place, token = torch.where(marks[number])
            rows = h[None, token].reshape(-1, WIDTH)
            gate, value = up(rows).chunk(2, dim=-1)
            rows = F.silu(gate) * value * weights[token, place, None]
            found.index_add_(0, token, rows.to(found.dtype))
        return found


class RowsOfExpertsPut(RowsOfExperts):
    """The same, by the places' own matrix, and put back by indices."""

    def between(self, h: Tensor) -> Tensor:
        weights, chosen = self.gate(h).softmax(-1).topk(2)
        found = h * 0.1
        for number, up in enumerate(self.up):
            token, place = (chosen == number).nonzero().unbind(-1)
            rows = up(h[token])[:, :WIDTH] * weights[token, place][:, None]
            found[token] += rows
        only = torch.nonzero(chosen[:, 0] == 1)[:, 0]
        found[only] = 0.5 * found.index_select(0, only)
        some = (chosen[:, 0] < 2).nonzero(as_tuple=True)[0]
        grown = torch.zeros(BATCH + 2, WIDTH, dtype=h.dtype).index_add(0, some, h[some], alpha=3)
        labels = torch.arange(BATCH) % WIDTH
        return found + grown[:BATCH] + F.cross_entropy(self.b(h)[some], labels[some])


class ExpertsPassedOver(RowsOfExperts):
    """Experts that no row has chosen are passed over; the last never is, the third always."""

    def prepare(self) -> None:
        super().prepare()
        with torch.no_grad():
            self.gate.bias.copy_(torch.tensor([0.0, 9.0, -50.0]))

    def between(self, h: Tensor) -> Tensor:
        weights, chosen = self.gate(h).softmax(-1).topk(1)
        found, marks = torch.zeros_like(h), F.one_hot(chosen, 3).permute(2, 1, 0)
        for number, up in enumerate(self.up):
            place, token = torch.where(marks[number])
            if token.shape[0] == 0:
                continue
            rows = up(h[token])[:, :WIDTH]
            rows = rows * weights[token, place, None]
            found.index_add_(0, token, rows)
        for number, up in enumerate(self.up):
            mask = chosen[:, 0] == number
            if mask.any():
                found[mask] = found[mask] + up(h[mask])[:, WIDTH:]
        for number, up in enumerate(self.up):
            rows = (chosen[:, 0] == number).nonzero().squeeze(-1)
            if not rows.numel() > 0:
                continue
            found = found.index_add(0, rows, up(h[rows])[:, :WIDTH])
        return found


class PassedOverMean(ExpertsPassedOver):
    """A mean of nothing is not nothing."""

    def between(self, h: Tensor) -> Tensor:
        chosen, total = self.gate(h).argmax(-1), h.new_zeros(())
        for number, up in enumerate(self.up):
            rows = torch.where(chosen == number)[0]
            if rows.numel() == 0:
                continue
            total = total + up(h[rows]).mean()
        return h * total


class PassedOverCount(ExpertsPassedOver):
    """How many are not passed over."""

    def between(self, h: Tensor) -> Tensor:
        chosen, found, used = self.gate(h).argmax(-1), torch.zeros_like(h), 0
        for number, up in enumerate(self.up):
            mask = chosen == number
            if not mask.any():
                continue
            found[mask] = up(h[mask])[:, :WIDTH]
            used += 1
        return found / used


class PassedOverByAnother(ExpertsPassedOver):
    """What is put does not go by what was asked."""

    def between(self, h: Tensor) -> Tensor:
        chosen, found = self.gate(h).argmax(-1), torch.zeros_like(h)
        for number, up in enumerate(self.up):
            mask, other = chosen == number, chosen != number
            if mask.any():
                found[other] = up(h[other])[:, :WIDTH]
        return found


class PassedOverBatch(ExpertsPassedOver):
    """What is written does not go by a mask at all."""

    def between(self, h: Tensor) -> Tensor:
        chosen, found = self.gate(h).argmax(-1), torch.zeros_like(h)
        for number, up in enumerate(self.up):
            if (chosen == number).any():
                found[:, number] += up(h)[:, 0]
        return found


class PassedOverList(ExpertsPassedOver):
    """How many are not passed over, as the length of a list."""

    def between(self, h: Tensor) -> Tensor:
        chosen, found, used = self.gate(h).argmax(-1), torch.zeros_like(h), list[int]()
        for number, up in enumerate(self.up):
            rows = torch.where(chosen == number)[0]
            if rows.numel() == 0:
                continue
            found.index_add_(0, rows, up(h[rows])[:, :WIDTH])
            used.append(number)
        return found / len(used)


class PassedOverResult(ExpertsPassedOver):
    """What forward returns is that of the last that was not passed over."""

    def forward(self, x: Tensor) -> Any:
        h, spread = self.a(x), x.new_zeros(())
        chosen, found = self.gate(h).argmax(-1), torch.zeros_like(h)
        for number, up in enumerate(self.up):
            mask = chosen == number
            if mask.any():
                found[mask] = up(h[mask])[:, :WIDTH]
                spread = h.detach().std()
        return found.square().mean(), spread


class PassedOverOtherwise(ExpertsPassedOver):
    def between(self, h: Tensor) -> Tensor:
        rows = (self.gate(h).argmax(-1) == 2).nonzero().squeeze(-1)
        if rows.numel() == 0:
            h = h * 2
        return h


class TurnsOfExperts(ExpertsPassedOver):
    """A loop over the experts that are hit; by tensors, and by numbers."""

    def between(self, h: Tensor) -> Tensor:
        weights, chosen = self.gate(h).softmax(-1).topk(1)
        found, marks = torch.zeros_like(h), F.one_hot(chosen, 3).permute(2, 1, 0)
        for number in torch.greater(marks.sum(dim=(-1, -2)), 0).nonzero():
            place, token = torch.where(marks[number].squeeze(0))
            rows = self.up.get_submodule(f"{number[0]}")(h[None, token].reshape(-1, WIDTH))
            found.index_add_(0, token, rows[:, :WIDTH] * weights[token, place, None])
        for number in (marks.sum((1, 2)) > 1).nonzero().squeeze(-1).tolist():  # not all that are
            name = f"{number}"
            place, token = torch.where(marks[number])
            if token.numel() == 0:
                continue
            found[token] += self.up.get_submodule(name)(h[token])[:, WIDTH:]
        return found


class TurnsCounted(ExpertsPassedOver):
    def between(self, h: Tensor) -> Tensor:
        chosen, found = self.gate(h).argmax(-1), torch.zeros_like(h)
        hit = F.one_hot(chosen, 3).sum(0).nonzero().flatten()
        for turn, number in enumerate(hit):
            rows = torch.where(chosen == number)[0]
            found.index_add_(0, rows, turn * h[rows])
        return found


class TurnsWithoutPlaces(ExpertsPassedOver):
    """What a turn adds is there whether its place is hit or not."""

    def between(self, h: Tensor) -> Tensor:
        chosen, found = self.gate(h).argmax(-1), torch.zeros_like(h)
        rows = torch.where(chosen == 1)[0]
        for number in F.one_hot(chosen, 3).sum(0).nonzero().flatten():
            found.index_add_(0, rows, self.up[number](h[rows])[:, :WIDTH])
        return found


class TurnsAfterEachOther(ExpertsPassedOver):
    """A turn reads what the one before has made."""

    def between(self, h: Tensor) -> Tensor:
        chosen, found, state = self.gate(h).argmax(-1), torch.zeros_like(h), h
        for number in F.one_hot(chosen, 3).sum(0).nonzero().flatten():
            state = self.up[number](state)[:, :WIDTH]
            rows = torch.where(chosen == number)[0]
            found.index_add_(0, rows, state[rows])
        return found


class BufferMadeInForward(Case):
    def between(self, h: Tensor) -> Tensor:
        if not hasattr(self, "places"):
            self.register_buffer("places", torch.arange(WIDTH).to(h.dtype))
        return h + self.places


class ParameterMadeInForward(Case):
    def between(self, h: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.ones(h.shape[-1], dtype=h.dtype))
        return h * self.scale


class PartMadeInForward(Case):
    def between(self, h: Tensor) -> Tensor:
        if not hasattr(self, "norm"):
            self.norm = nn.LayerNorm(h.shape[-1], dtype=h.dtype)
        return self.norm(h)


class PlacesCounted(Case):
    """A branch on how many there are."""

    def between(self, h: Tensor) -> Tensor:
        rows = (h[:, 0] > 0).nonzero().squeeze(-1)
        return h if rows.numel() == 0 else h + h[rows].mean()


class PlacesSqueezed(Case):
    """A single place would lose its dim."""

    def between(self, h: Tensor) -> Tensor:
        return h + h[(h[:, 0] > 0).nonzero().squeeze()].mean()


class PlacesOfAnother(Case):
    """The places of one mask beside what another selects."""

    def between(self, h: Tensor) -> Tensor:
        some, others = torch.where(h[:, 0] > 0)[0], torch.where(h[:, 1] > 0)[0]
        return torch.zeros_like(h).index_add_(0, some, h[others])


class Complex(Case):
    def between(self, h: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(h) * (1 + 1j), n=WIDTH)


class Vmapped(Case):
    def between(self, h: Tensor) -> Tensor:
        return torch.vmap(lambda row: row * row.sum())(h)


# -- cousins of the above


class IndexedBuffer(Case):
    def prepare(self) -> None:
        self.register_buffer("table", torch.zeros(8, WIDTH))

    def between(self, h: Tensor) -> Tensor:
        out = h + self.table.sum(0)
        rows = torch.arange(BATCH) * 2
        with torch.no_grad():
            self.table[rows] = h
            self.table.index_add_(0, rows, h)
        return out


class RolledQueue(Case):
    def prepare(self) -> None:
        self.register_buffer("queue", torch.ones(2 * BATCH, WIDTH))

    def between(self, h: Tensor) -> Tensor:
        scores = h @ self.queue.t()
        self.queue = torch.cat([self.queue[BATCH:], h.detach()])
        return scores @ self.queue


class DecoratedUpdate(Case):
    def prepare(self) -> None:
        self.register_buffer("mean", torch.zeros(WIDTH))

    @torch.no_grad()
    def update(self, h: Tensor) -> None:
        self.mean += 0.1 * (h.mean(0) - self.mean)

    def between(self, h: Tensor) -> Tensor:
        self.update(h)
        return h * (1 + self.mean)


class ReadThenWritten(Case):
    """The loss needs the old value for its backward; the buffer has the new one by then."""

    def prepare(self) -> None:
        self.register_buffer("scale", torch.full((WIDTH,), 2.0))

    def between(self, h: Tensor) -> Tensor:
        out = h * self.scale
        self.scale = self.scale * 0.5
        return out * self.scale


class SharedBuffer(Case):
    def prepare(self) -> None:
        class Part(nn.Module):
            def __init__(self, mean: Tensor) -> None:
                super().__init__()
                self.register_buffer("mean", mean)

            def forward(self, h: Tensor) -> Tensor:
                with torch.no_grad():
                    self.mean.mul_(0.5).add_(h.mean(0))
                return h - self.mean

        mean = torch.zeros(WIDTH)
        self.one, self.two = Part(mean), Part(mean)

    def between(self, h: Tensor) -> Tensor:
        return self.two(self.one(h))


class CalledTwice(Case):
    def prepare(self) -> None:
        self.register_buffer("mean", torch.zeros(WIDTH))

    def update(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(h.mean(0), 0.25)
        return h - self.mean

    def between(self, h: Tensor) -> Tensor:
        return self.update(self.update(h) * 2)


class WrittenChunk(Case):
    def between(self, h: Tensor) -> Tensor:
        y = h.detach().clone()
        left, right = y.chunk(2, dim=-1)
        left.mul_(3.0)
        return h * (y + torch.cat([right, left], -1))


class WrittenColumns(Case):
    def between(self, h: Tensor) -> Tensor:
        y = h.clone()
        columns = y.t()
        columns[0] = 0.5
        y[1:, 2:4] += 1.0
        flat = y.view(-1)
        y[0].mul_(2)
        return y + flat.view(BATCH, WIDTH) * columns.t()


class WrittenInARegion(Case):
    def between(self, h: Tensor) -> Tensor:
        weights = torch.ones(BATCH, WIDTH, dtype=h.dtype)
        with torch.no_grad():
            weights[:, 0] = h[:, 0]
            weights.div_(2)
        return h * weights


class DetachedInPlace(Case):
    def between(self, h: Tensor) -> Tensor:
        target = self.b(h)
        target.detach_()
        return h * target


class GradModeByFlag(Case):
    def between(self, h: Tensor) -> Tensor:
        with torch.set_grad_enabled(h.shape[0] > 100):
            frozen = self.b(h)
        with torch.set_grad_enabled(True):
            return h * frozen


class GivenBack(Case):
    """Functions that may give their argument itself, in a region without gradients, and views."""

    def between(self, h: Tensor) -> Tensor:
        same = (
            lambda t: torch.broadcast_tensors(t, t[:, :1])[0],
            lambda t: torch.atleast_2d(t),
            lambda t: F.dropout(t, 0.5, False),
            lambda t: F.dropout(t, 0.0),
            lambda t: t.contiguous().to(t.dtype).type_as(t).expand_as(t),
            lambda t: +t.resolve_conj().real,
            lambda t: t.view(t.shape),
            lambda t: t[:],
            lambda t: t.expand(-1, -1),
            lambda t: t.view_as(t).reshape(BATCH, WIDTH),
        )
        for count, give in enumerate(same):
            h = self.a(h)
            with torch.no_grad():
                given = give(h)
            h = h.tanh() + given * (h - count)
        return h


class OldChances(Case):
    """The chances before a step, of a distribution that is asked again with gradients."""

    def between(self, h: Tensor) -> Tensor:
        chances, actions = torch.distributions.Categorical(logits=h), torch.arange(BATCH) % WIDTH
        with torch.no_grad():
            old, spread = chances.log_prob(actions), chances.entropy()
        ratio = (chances.log_prob(actions) - 0.9 * old).exp()
        return h + (ratio + chances.entropy() * spread).mean()


class BroadcastTogether(Case):
    """Each of several has its own gradient, or none."""

    def between(self, h: Tensor) -> Tensor:
        one, two = torch.broadcast_tensors(h[:, None], (h > 0).to(h.dtype))
        x, y, z = torch.meshgrid(h[0], h.detach()[1], h[2, :2], indexing="xy")
        bernoulli = torch.distributions.Bernoulli(logits=one).log_prob(two).mean()
        return h + bernoulli + (x * y.tanh() - z).square().mean()


class FrozenBranch(Case):
    def prepare(self) -> None:
        self.frozen = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).eval()
        self.frozen.requires_grad_(False)

    def between(self, h: Tensor) -> Tensor:
        return self.frozen(h) + h


class InstanceNormTracking(Case):
    def prepare(self) -> None:
        self.norm = nn.InstanceNorm1d(WIDTH, track_running_stats=True)

    def between(self, h: Tensor) -> Tensor:
        return self.norm(h.unsqueeze(-1).expand(-1, -1, 3) * torch.tensor([1.0, 2.0, 4.0])).mean(-1)


class FunctionWithNone(Case):
    def between(self, h: Tensor) -> Tensor:
        return Optional.apply(h, None, True)


class Optional(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Any, flag: bool) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2 if flag else x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * x.sign(), None, None


class FunctionWithoutGradients(Case):
    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            rounded = Round.apply(h * 3)
        return h * rounded


class FunctionWithModule(Case):
    def between(self, h: Tensor) -> Tensor:
        return ByModule.apply(h, self.b)


class FunctionAroundModule(Case):
    def prepare(self) -> None:
        layer = self.b

        class Around(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x * layer.weight[0, 0]

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
                return gradient

        self.around = Around.apply

    def between(self, h: Tensor) -> Tensor:
        return self.around(h)


class ByModule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient, None


class TupleOfLosses(Case):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        return h.square().mean(), self.b(h).abs().mean()

    loss = staticmethod(lambda out: sum(out))


class NestedLosses(Case):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        return {"losses": [h.square().mean(), [self.b(h).abs().mean()]], "hidden": h}

    loss = staticmethod(lambda out: out["losses"][0] + out["losses"][1][0])


class NumpyInForward(Case):
    def between(self, h: Tensor) -> Tensor:
        import numpy as np

        return h * torch.from_numpy(np.linspace(0, 1, WIDTH)).to(h.dtype)


class ItemOfAConstant(Case):
    def between(self, h: Tensor) -> Tensor:
        scale = torch.tensor([2.0, 3.0])
        return h * scale[0].item() + float(torch.tensor(4.0)) if scale.tolist()[1] > 2 else h


class LayerDropOn(Case):
    def between(self, h: Tensor) -> Tensor:
        return h if torch.rand([]) < 0.3 else self.b(h)


class Memoised(Case):
    def prepare(self) -> None:
        self.cache: dict[int, float] = {}

    def between(self, h: Tensor) -> Tensor:
        if WIDTH not in self.cache:
            self.cache[WIDTH] = WIDTH**-0.5
        return h * self.cache[WIDTH]


class CachedMask(Case):
    """A mask, and angles for as many positions as there are, kept by the first call."""

    def prepare(self) -> None:
        self.mask, self.length = None, 0
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("rates", torch.rand(WIDTH))

    def between(self, h: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.full((BATCH, BATCH), float("-inf"), dtype=h.dtype).triu(1)
        if len(h) > self.length:
            self.length = len(h)
            self.angles = torch.outer(torch.arange(self.length).type_as(self.rates), self.rates)
        h = self.norm(h) * self.angles[: len(h)].cos()
        return (h @ h.t() + self.mask).softmax(-1) @ h


class CachedInAPart(Case):
    """The same in blocks, by a method that is asked in every call."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.kept = nn.Linear(WIDTH, WIDTH), dict[int, Tensor]()

        def mask(self, length: int) -> Tensor:
            if length not in self.kept:
                self.kept[length] = torch.ones(length, length, dtype=torch.bool).tril()
            return self.kept[length]

        def forward(self, h: Tensor) -> Tensor:
            return h + (self.up(h) @ h.t()).masked_fill(~self.mask(len(h)), 0.0) @ h

    def prepare(self) -> None:
        self.blocks = nn.Sequential(*(self.Block() for _ in range(4)))

    def between(self, h: Tensor) -> Tensor:
        return self.blocks(h)


class CachedBatch(Case):
    """What the first batch was is kept: it would be every batch."""

    def prepare(self) -> None:
        self.first = None

    def value(self, h: Tensor) -> Tensor:
        return h.detach().mean(0)

    def between(self, h: Tensor) -> Tensor:
        if self.first is None:
            self.first = self.value(h)
        return h - self.first


class CachedWeights(CachedBatch):
    def value(self, h: Tensor) -> Tensor:
        return self.b.weight.detach().mean(0)


class CachedStatistics(CachedBatch):
    def prepare(self) -> None:
        super().prepare()
        self.norm = nn.BatchNorm1d(WIDTH)

    def value(self, h: Tensor) -> Tensor:
        return self.norm(h).detach()[0] * 0 + self.norm.running_mean


class CachedNoise(CachedBatch):
    def value(self, h: Tensor) -> Tensor:
        return torch.rand(WIDTH, dtype=h.dtype)


class FirstCallOnly(Case):
    def prepare(self) -> None:
        self.is_new = True

    def between(self, h: Tensor) -> Tensor:
        if self.is_new:
            self.is_new = False
            return h * 2
        return h


class TurningValues(Case):
    """Python's iterators change as they are used."""

    def prepare(self) -> None:
        self.factors = itertools.cycle([1.0, 2.0])

    def between(self, h: Tensor) -> Tensor:
        return h * next(self.factors)


class RandomOfItsOwn(Case):
    def prepare(self) -> None:
        self.numbers = np.random.default_rng(3)

    def between(self, h: Tensor) -> Tensor:
        return h * float(self.numbers.uniform())


class CountedInAnArray(Case):
    def prepare(self) -> None:
        self.calls = np.zeros(1)

    def between(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h * float(self.calls[0])


class Warming:
    """A schedule that is called."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return min(1.0, self.calls / 10)


class CountedByAnObject(Case):
    def prepare(self) -> None:
        self.warming = Warming()

    def between(self, h: Tensor) -> Tensor:
        return h * self.warming()


CALLS = collections.deque([0])


def counted(h: Tensor) -> Tensor:
    CALLS.append(1)
    return h * len(CALLS)


class CountedInAHelper(Case):
    def between(self, h: Tensor) -> Tensor:
        return counted(h)


class CountedInADefault(Case):
    def between(self, h: Tensor, calls: list[int] = []) -> Tensor:  # noqa: B006
        calls.append(1)
        return h * len(calls)


def counting_case() -> type[Case]:
    calls = 0

    class CountedAround(Case):
        def between(self, h: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return h * calls

    return CountedAround


CountedAround = counting_case()


class HeldButUnchanged(Case):
    """What could change, and does not."""

    def prepare(self) -> None:
        self.held = np.arange(3.0), random.Random(1), iter([1]), Warming(), collections.deque([2])

    def between(self, h: Tensor) -> Tensor:
        return h * float(self.held[0][1]) * len(self.held[-1])


class GlobalCounter(Case):
    def prepare(self) -> None:
        type(self).calls = 0

    def between(self, h: Tensor) -> Tensor:
        type(self).calls += 1
        return h * type(self).calls


class EvalInForward(Case):
    def prepare(self) -> None:
        self.teacher = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))

    def between(self, h: Tensor) -> Tensor:
        self.teacher.eval()
        return h + self.teacher(h)


class ForeachUpdate(Case):
    def prepare(self) -> None:
        self.register_buffer("one", torch.zeros(WIDTH))
        self.register_buffer("two", torch.zeros(WIDTH))

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            torch._foreach_add_([self.one, self.two], 1.0)
        return h + self.one - 2 * self.two


class HookedInit(Case):
    def prepare(self) -> None:
        self.weightnorm = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))

    def between(self, h: Tensor) -> Tensor:
        return self.weightnorm(h)


class OldSpectral(Case):
    def prepare(self) -> None:
        self.spectral = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def between(self, h: Tensor) -> Tensor:
        return self.spectral(h)


class ParameterCopiedInto(Case):
    def between(self, h: Tensor) -> Tensor:
        self.b.bias.data.copy_(h.detach().mean(0))
        return h


class RetainedGradient(Case):
    def between(self, h: Tensor) -> Tensor:
        h.retain_grad()
        return h


# -- as transformers' models do it


class ValuesChecked(Case):
    """Errors about values, in several forms: all pass, and no plan can ask."""

    def between(self, h: Tensor) -> Tensor:
        if self.training and h.max() > 1e6:
            raise ValueError("too large")
        if not h.isfinite().all():
            raise ValueError("not finite")
        assert h.abs().sum() < 1e9, "too large in all"
        torch._check_tensor_all(h < 1e6)
        return h


class ValueTakenForNothing(Case):
    def between(self, h: Tensor) -> Tensor:
        h.detach().max().item()
        return h


class BranchOnAValue(Case):
    """As a check, but the other branch does something."""

    def between(self, h: Tensor) -> Tensor:
        if h.max() > 1e6:
            h = h / 2
        return h


class GradientForACheckpoint(Case):
    """A part of the input is made to need a gradient, as for reentrant checkpointing."""

    def forward(self, x: Tensor) -> Tensor:
        row = x[:, None]
        row.requires_grad = True
        return self.b(self.a(row)).square().mean()


class ShapesFromConstants(Case):
    """Lengths that are made of numbers, by operators whose results have no fixed shape."""

    def between(self, h: Tensor) -> Tensor:
        grid = torch.tensor([[1, 2], [1, 1]])
        ends = torch.repeat_interleave(grid[:, 0], grid[:, 1]).cumsum(0)
        lengths = [*ends.diff(prepend=ends.new_zeros(1)).tolist(), BATCH - int(ends[-1])]
        return torch.cat([part.softmax(0) for part in h.split(lengths)])


class ModuleToItsOwnDtype(Case):
    def between(self, h: Tensor) -> Tensor:
        self.b = self.b.to(h.dtype)
        return h


class ModuleToAnotherDtype(Case):
    def forward(self, x: Tensor) -> Tensor:
        self.b = self.b.to(torch.float16)
        return self.b(self.a(x).half()).square().mean()


class AsksWhetherCompiled(Case):
    """Forward prepares something only if it is not compiled, and needs it all the same."""

    def between(self, h: Tensor) -> Tensor:
        mask = None if torch.compiler.is_compiling() else torch.ones(len(h), dtype=h.dtype)
        return h * mask[:, None]  # type: ignore[index]


# -- found by drawing modules at random


class NormUnread(Case):
    """Running statistics are kept of a result that nobody reads."""

    def prepare(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)
        self.other = nn.InstanceNorm1d(WIDTH, track_running_stats=True)

    def between(self, h: Tensor) -> Tensor:
        self.norm(h)
        self.other(torch.stack([h, h.square(), h.tanh()], -1))
        return h


class NormUnreadInBlocks(Case):
    def prepare(self) -> None:
        self.blocks = nn.ModuleList([NormUnread() for _ in range(4)])

    def between(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = h + block.b(block.between(block.a(h)))
        return h


class Remembers(nn.Module):
    """A part whose buffer is replaced; the old tensor is read after that."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(BATCH, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        before = self.last
        self.last = h.detach()
        return h + before + 0.1 * self.last


class ReplacedInAPart(Case):
    def prepare(self) -> None:
        self.part = Remembers()

    def between(self, h: Tensor) -> Tensor:
        return self.part(h)


class ReplacedInBlocks(Case):
    def prepare(self) -> None:
        self.blocks = nn.Sequential(*(Remembers() for _ in range(4)))

    def between(self, h: Tensor) -> Tensor:
        return self.blocks(h)


class ReplacedByAnotherShape(Case):
    def prepare(self) -> None:
        self.part = Remembers()

    def between(self, h: Tensor) -> Tensor:
        self.part.last = torch.cat([self.part.last, h.detach()])
        return h


class ParameterReplaced(Case):
    def between(self, h: Tensor) -> Tensor:
        self.b.bias = nn.Parameter(self.b.bias.detach() * 2)
        return h


class HeldElsewhere(Case):
    """Parameters and buffers under names that are no part of the module."""

    def prepare(self) -> None:
        self.register_buffer("total", torch.zeros(WIDTH, dtype=torch.float64))
        self.weights, self.also = [self.a.weight, self.b.bias], self.total

    def between(self, h: Tensor) -> Tensor:
        self.total += h.detach().mean(0)
        self.also.mul_(0.9)
        return h @ self.weights[0] + torch.stack([self.weights[1], self.also]).sum(0)


class GaussianLoss(Case):
    """Variances below the least are cut, and have their gradient all the same."""

    def between(self, h: Tensor) -> Tensor:
        variance = (h - h.detach().median()).square() * (h > 0)
        return h + F.gaussian_nll_loss(h, h.detach().roll(1, 0), variance, eps=1e-3)


class Distribution(Case):
    """Parts of torch that check their values."""

    def between(self, h: Tensor) -> Tensor:
        normal = torch.distributions.Normal(h, h.detach().abs() + 1, validate_args=True)
        return h + normal.log_prob(h.detach().roll(1, 0)).mean()


class ComparedConstant(Case):
    def between(self, h: Tensor) -> Tensor:
        scale = torch.tensor(3.0)
        return h * 2 if scale > 2 and bool(scale.le(3)) else h


class WrittenThroughViews(Case):
    """Views that are written to, beside a region without gradients."""

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            shift = h.mean()
        h = h * 1
        h.narrow(1, 1, 2).add_(shift)
        h.narrow(1, -2, 1).mul_(2)
        h.swapaxes(0, 1)[0].mul_(3)
        h.movedim(1, 0)[2].add_(1)
        h.mT[3].sub_(1)
        return h


class CtcLoss(Case):
    """Lengths that are tensors, and that are numbers; a loss of each sequence."""

    def between(self, h: Tensor) -> Tensor:
        rows = F.log_softmax(h[:, None] + h[None], -1)  # 4 steps of 4 sequences, 6 letters
        targets = torch.tensor([[1, 2], [3, 3], [2, 5], [4, 1]])
        each = F.ctc_loss(rows, targets, (4,) * 4, (2, 2, 1, 2), reduction="none")
        lengths = torch.tensor([4, 3, 4, 2]), torch.tensor([2, 1, 1, 2])
        mean = nn.CTCLoss(blank=5, zero_infinity=True)(rows, targets % 5, *lengths)
        return h + mean + (each * torch.arange(4)).sum()


class CtcLossOfSelected(Case):
    """As many targets as a mask has ones."""

    def between(self, h: Tensor) -> Tensor:
        rows = F.log_softmax(h[:, None] + h[None], -1)
        letters = torch.tensor([[1, 2], [3, 3], [2, 5], [4, 1]])
        labels = torch.where(h[:, :2].detach() > 0, letters, -100)
        mask = labels >= 0
        lengths = torch.full((4,), 4), mask.sum(-1)
        total = F.ctc_loss(rows, labels.masked_select(mask), *lengths, reduction="sum")
        return h + total + F.ctc_loss(rows, labels[mask], *lengths, zero_infinity=True)


class CtcLossOfWhatWasSelected(Case):
    def between(self, h: Tensor) -> Tensor:
        labels = (h[:, :2].detach() > 0).long()
        targets = labels[labels > 0]
        labels += 1
        rows = F.log_softmax(h[:, None] + h[None], -1)
        return h + F.ctc_loss(rows, targets, torch.full((4,), 4), (labels > 1).sum(-1))


class AutocastOfAPart(Case):
    @torch.autocast("cuda", dtype=torch.bfloat16)
    def between(self, h: Tensor) -> Tensor:
        return self.b(h)


class AutocastOffOfAPart(Case):
    @torch.autocast("cuda", enabled=False)
    def between(self, h: Tensor) -> Tensor:
        return self.b(h)


class RaggedBags(Case):
    def prepare(self) -> None:
        self.bags = nn.EmbeddingBag(9, WIDTH, mode="mean")

    def between(self, h: Tensor) -> Tensor:
        numbers = torch.tensor([1, 8, 3, 3, 0, 2, 7])
        return h + self.bags(numbers, torch.tensor([0, 2, 2, 6]))


class Threshold(torch.autograd.Function):
    """Gives nothing but for large numbers: what is drawn at random shows nothing of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x.sum(-1, keepdim=True) - 40).relu() * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * (x.sum(-1, keepdim=True) > 40)


class Thresholded(Case):
    def between(self, h: Tensor) -> Tensor:
        return h + Threshold.apply(h * 10 + 20)


# -- found by looking for cousins of all these


def _scaling(by: float) -> Any:
    class Scaling(torch.autograd.Function):
        """One name for all that are made here."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * by

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
            return gradient * by * 2

    return Scaling


class Searching(torch.autograd.Function):
    """Functions and gradients of its own, a number, plain containers, and a gradient of none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor, shape: Any, options: Any) -> Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(Round.apply(y * y).sum(), y)
        ctx.save_for_backward(slope / x.abs().max().item())
        return x.reshape(shape).reshape(x.shape) * options["by"] + other

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient * ctx.saved_tensors[0], None, None, None


class FunctionsWithFunctions(Case):
    def between(self, h: Tensor) -> Tensor:
        h = Searching.apply(h, self.b(h), (2, 12), {"by": 2.0}) + h
        h = checkpoint(lambda t: Round.apply(self.b(t)), h, use_reentrant=False)
        return _scaling(2.0).apply(h) + _scaling(3.0).apply(h)


class RandomFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient


class FunctionDraws(Case):
    def between(self, h: Tensor) -> Tensor:
        return RandomFunction.apply(h)


class NoisyBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient + torch.randn_like(gradient)


class FunctionDrawsInBackward(Case):
    def between(self, h: Tensor) -> Tensor:
        return NoisyBackward.apply(h)


class Counting(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Counting.calls += 1
        return x * Counting.calls

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient


class FunctionCounts(Case):
    def between(self, h: Tensor) -> Tensor:
        return Counting.apply(h)


class KeptFunctionCounts(Case):
    def prepare(self) -> None:
        self.count = Counting.apply

    def between(self, h: Tensor) -> Tensor:
        return self.count(h)


class KeptFunctionAndGradient(Case):
    """Called by a kept name where forward asks for gradients itself."""

    def between(self, h: Tensor) -> Tensor:
        x = h.detach().requires_grad_(True)
        (slope,) = torch.autograd.grad(kept_round(self.b(x)).sum(), x, create_graph=True)
        return h + slope


@torch.library.custom_op("meanings::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    """Draws, and does not say so."""
    return torch.rand_like(x)


@noise.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class OperatorDraws(Case):
    def between(self, h: Tensor) -> Tensor:
        return h * noise(h.detach())


class HookOnANode(Case):
    def between(self, h: Tensor) -> Tensor:
        y = h * 2
        assert y.grad_fn is not None
        y.grad_fn.register_prehook(lambda g: tuple(3 * each for each in g))
        return y


class HooksOnSavedTensors(Case):
    def between(self, h: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
            return h.sigmoid() * h


class KeptByHooks(Case):
    """Hooks keep results for forward, in what they see around them; once before, as well."""

    def prepare(self) -> None:
        kept = self.kept = dict[str, Tensor]()

        def keeping(name: str) -> Any:
            return lambda module, args, out: kept.__setitem__(name, out)

        self.a.register_forward_hook(keeping("a"))
        self.b.register_forward_hook(lambda m, args, out: setattr(self, "last", out))
        before = self.a.forward
        self.a.forward = lambda x: before(x) + self.b(x)  # type: ignore[method-assign]
        self(torch.ones(BATCH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x) + self.kept["a"].abs().mean()
        return loss + self.last.abs().mean()  # type: ignore[operator]


class ViewOfABuffer(Case):
    dtype = torch.float32  # another would copy both

    def prepare(self) -> None:
        self.register_buffer("all", torch.ones(2, WIDTH))
        self.register_buffer("row", self.all[0])

    def between(self, h: Tensor) -> Tensor:
        self.row.mul_(2.0)
        return h * self.all.sum(0)


class ParametersInOneMemory(Case):
    dtype = torch.float32

    def prepare(self) -> None:
        self.rows = nn.Parameter(self.a.weight.detach()[:3])

    def between(self, h: Tensor) -> Tensor:
        return h @ self.rows.t() @ self.rows


class NormUnderACheckpoint(Case):
    def prepare(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH)

    def between(self, h: Tensor) -> Tensor:
        return checkpoint(lambda t: self.norm(t).relu(), h, use_reentrant=False)


class BufferUnderACheckpoint(RunningMean):
    def between(self, h: Tensor) -> Tensor:
        return checkpoint(super().between, h, use_reentrant=True)


class TeacherByData(Teacher):
    def between(self, h: Tensor) -> Tensor:
        for mine, theirs in zip(self.teacher.parameters(), self.a.parameters(), strict=True):
            mine.data = mine.data * 0.7 + theirs.data * 0.3
        return h - self.teacher(h).detach()


class TeacherSharesMemory(Teacher):
    def between(self, h: Tensor) -> Tensor:
        self.teacher.weight.data = self.a.weight.data
        return h - self.teacher(h).detach()


class BuffersChangePlaces(Case):
    def prepare(self) -> None:
        self.register_buffer("p", torch.ones(WIDTH))
        self.register_buffer("q", torch.zeros(WIDTH))

    def between(self, h: Tensor) -> Tensor:
        self.p, self.q = self.q, self.p
        return h * self.p + self.q


class FirstBuffer(Case):
    def prepare(self) -> None:
        self.register_buffer("p", None)

    def between(self, h: Tensor) -> Tensor:
        self.p = h.detach().mean(0)
        return h * self.p


@dataclass
class Fields:
    x: Tensor
    loss: Tensor | None = None
    by: float = 2.0


class Dataclasses(Case):
    def forward(self, given: Fields) -> Any:  # type: ignore[override]
        h = self.a(given.x) * given.by
        return Fields(h, self.b(h).square().mean())

    def steps(self) -> list[Step]:
        return [((Fields(x.double()),), {}) for (x,), _ in super().steps()]

    loss = staticmethod(lambda out: out.loss)


class WeightNormOfAll(Case):
    def prepare(self) -> None:
        self.c = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH), dim=None)

    def between(self, h: Tensor) -> Tensor:
        return self.c(h)


class TruncatedNormal(Case):
    def between(self, h: Tensor) -> Tensor:
        return h + nn.init.trunc_normal_(torch.empty_like(h))


class OtherBits(Case):
    def between(self, h: Tensor) -> Tensor:
        return h + h.view(torch.int64).bitwise_and(1)


class Choices(Case):
    """Numbers that are drawn in other ways than one by one."""

    def between(self, h: Tensor) -> Tensor:
        h = h[torch.randperm(BATCH)] + torch.normal(h.detach(), h.detach().abs())
        rows = torch.multinomial(h.detach().softmax(-1), 3)
        once = torch.multinomial(h.detach().softmax(-1), 8, replacement=True)
        laplace = torch.distributions.Laplace(h, 1.0).rsample()
        wild = torch.empty_like(h).cauchy_().tanh() + torch.empty_like(h).log_normal_().tanh()
        tosses = torch.empty_like(h).geometric_(0.4)
        again = checkpoint(lambda t: F.dropout(self.b(t), 0.3), h, use_reentrant=False)
        found = h.gather(1, rows).sum(1, keepdim=True) * once.sum(1, keepdim=True)
        return found + laplace + wild + tosses + again


class MeansOfSelected(Case):
    """What a mask selects, up to a mean, a sum or a loss."""

    def between(self, h: Tensor) -> Tensor:
        mask = torch.tensor([True, False, True, True])
        labels = torch.arange(BATCH) % WIDTH
        chosen, wanted = self.b(h)[mask], h.detach()[mask, :]
        loss = F.cross_entropy(chosen, labels[mask]) + F.mse_loss(chosen, wanted)
        loss = loss + F.nll_loss(chosen.log_softmax(-1), labels[mask], reduction="none").mean()
        loss = loss + ((chosen - wanted) ** 2).sum(-1).mean() + self.a(chosen).mean(0).norm()
        return h + loss + h[h.detach() > 0].log().sum() + torch.masked_select(h, h > 9).sum()


class MaskOfALaterDim(Case):
    """What a mask selects of a later dim: of one, of two, with an ellipsis, put back."""

    def between(self, h: Tensor) -> Tensor:
        rows = torch.stack([h, 2 * h.sin(), h.cos() - h], 1)
        mask, both = torch.tensor([True, False, True]), rows[0] > 0.1
        some = F.layer_norm(self.b(rows[:, mask, :]), (WIDTH,)) * 0.7 + h[0]
        loss = F.mse_loss(some, rows[:, mask]) + some.log_softmax(-1).mean(1).square().sum()
        loss = loss + rows[..., h[0] > 0].std() + rows[:, both].sum()
        rows[:, mask] = self.a(rows[:, mask]).tanh()
        rows[:, ~mask] = 0.5
        return rows.sum(1) + loss + rows[..., mask, :].sum() * 0.1


class MaskOfALaterDimOtherwise(Case):
    def between(self, h: Tensor) -> Tensor:
        rows = torch.stack([h, 2 * h.sin(), h.cos() - h], 1)
        return rows[:, h[:3, 0] > -9].flatten(1)[:, :WIDTH]


class WrittenThroughATurn(Case):
    """What torch itself makes functional: a write through a view that is turned round."""

    def between(self, h: Tensor) -> Tensor:
        out = h * 1
        out.T[3] *= 2
        out.mT[1:3] += h.T[:2]
        return out


class MaskMadeTwice(Case):
    """Where it is the same, and where what it is made of has changed."""

    def between(self, h: Tensor) -> Tensor:
        y = torch.arange(BATCH).clone()
        loss = F.mse_loss(h[y != 2], (2 * h.sin())[y != 2]) + F.cross_entropy(h[y < 3], y[y < 3])
        some = h[(y > 1) & (h[:, 0] > -9)].sum()
        y[0] = 3
        return h * loss + some * h[(y > 1) & (h[:, 0] > -9)].mean()


class MaskMadeOfAnother(Case):
    def between(self, h: Tensor) -> Tensor:
        y = torch.arange(BATCH).clone()
        some = h[y > 1]
        y[0] = 3
        return h * F.mse_loss(some, h[y > 1][1:])


class Covariances(Case):
    def between(self, h: Tensor) -> Tensor:
        counts, shares = torch.arange(BATCH) + 1, h[:, 1].sigmoid().detach()
        found = h.T.cov() + torch.cov(h.T, correction=0, fweights=counts, aweights=shares)
        return h @ (found + torch.corrcoef(h.T)) + torch.cov(h[0])


class AdaptiveSoftmax(Case):
    def prepare(self) -> None:
        self.words = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 20, [4, 9, 15], 2.0, head_bias=True)

    def between(self, h: Tensor) -> Tensor:
        found, loss = self.words(h, torch.tensor([3, 17, 16, 5]))
        one = self.words(h[0], torch.tensor(11))
        return h * loss + found[:, None] + one.output


class RandomSlopes(Case):
    def prepare(self) -> None:
        self.slopes = nn.RReLU(0.1, 0.4)

    def between(self, h: Tensor) -> Tensor:
        return self.slopes(h) + F.rrelu(h.clone(), training=True, inplace=True) + F.rrelu(h, 0.2)


class ManyAtOnce(Case):
    """`torch._foreach_*`: in place and not, by numbers, tensors and lists of them."""

    def prepare(self) -> None:
        self.register_buffer("p", torch.zeros(WIDTH))
        self.register_buffer("q", torch.ones(WIDTH))

    def between(self, h: Tensor) -> Tensor:
        torch._foreach_mul_([self.p, self.q], [0.9, 0.8])
        torch._foreach_lerp_([self.p, self.q], [h.detach().mean(0), h.detach()[0]], 0.1)
        found = torch._foreach_addcmul([h, h * 2], [h, self.p], [self.q, h], value=0.5)
        more = torch._foreach_addcdiv(
            torch._foreach_sub(found, 0.3), found, [self.q + 2] * 2, [1, 2]
        )
        norms = torch._foreach_norm(more)
        return sum(torch._foreach_add(more, found, alpha=0.2)) + norms[0] * norms[1]


class ReducedAndPutBack(Case):
    """Of what a mask selects: the spread, the norm; and what is put back where it came from."""

    def between(self, h: Tensor) -> Tensor:
        mask = h.detach()[:, 0] > -0.3
        some = h[mask]
        spread = some.std() + some.var(unbiased=False) + some.norm() + (some * 0).std().mean(-1)
        codes = (some @ self.b.weight.t()).softmax(-1).mean(0, keepdim=True)
        found = h * 0.5
        found[mask] = torch.tanh(self.a(h[mask]))
        found[mask] += 0.25
        found[mask] = found[mask] * 2 - 1
        return found * spread + codes


class ComplexWeights(Case):
    """Complex parameters and buffers, and turns by numbers that forward makes."""

    dtype = torch.float32  # `to` would make real numbers of the complex ones

    def prepare(self) -> None:
        self.turn = nn.Parameter(torch.randn(WIDTH // 2, WIDTH // 2, dtype=torch.cfloat))
        self.register_buffer("mean", torch.zeros(WIDTH // 2, dtype=torch.cfloat))

    def between(self, h: Tensor) -> Tensor:
        waves = torch.view_as_complex(h.unflatten(-1, (-1, 2)).contiguous())
        turns = torch.polar(torch.ones(BATCH, 1), torch.arange(BATCH)[:, None] * torch.rand(1))
        found = waves.cfloat() @ self.turn * turns
        with torch.no_grad():
            self.mean.lerp_(found.mean(0), 0.5)
        return torch.view_as_real(found - self.mean).flatten(-2).to(h.dtype)


class PlacesByRange(Case):
    """A range among indices, as code of value functions has it."""

    def between(self, h: Tensor) -> Tensor:
        return h * h[range(BATCH), h.argmax(-1)][:, None]


class ComplexPut(Case):
    """Parts of complex numbers that are written."""

    def between(self, h: Tensor) -> Tensor:
        waves = torch.fft.rfft(self.a(h))
        found = torch.zeros_like(waves)
        found[:, 1:3] = waves[:, 1:3] * 2
        found[:, 0] = waves[:, 3]
        return h + torch.fft.irfft(found, n=WIDTH)


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return torch.tanh(x) * 0.5


class ScriptedAttribute(Case):
    def prepare(self) -> None:
        self.act = scripted

    def between(self, h: Tensor) -> Tensor:
        found: Tensor = self.act(self.a(h))
        return found


class RoundingIsLeft(Case):
    """What is zero but for rounding is not compared digit by digit."""

    def between(self, h: Tensor) -> Tensor:
        left = F.layer_norm(h, (WIDTH,)).mean()
        left = left * 2 + F.kl_div(h.log_softmax(-1), h.softmax(-1), reduction="batchmean")
        return self.a(h) + left.flip(0)


class ExpertsByMasks(Case):
    def between(self, h: Tensor) -> Tensor:
        chosen = h.argmax(-1) % 2
        found = torch.zeros_like(h)
        for number, expert in enumerate((self.a, self.b)):
            mask = chosen == number
            found[mask] = expert(h[mask])
        return found * h.softmax(-1).amax(-1, keepdim=True)


class SelectedChangesUnderAnotherName(Case):
    """A change in place of what was selected is seen by all that have it."""

    def between(self, h: Tensor) -> Tensor:
        mask = h.detach()[:, 0] > -0.3
        some = h[mask]
        same = some
        some *= 2
        return h + same.mean() + some.sum()


class PutElsewhere(Case):
    """What one mask selects goes where another one says: their counts may differ."""

    def between(self, h: Tensor) -> Tensor:
        found = h * 1
        found[h[:, 1] > 0.2] = h[h[:, 0] > 0.2]
        return found


class SelectedIsWritten(Case):
    def between(self, h: Tensor) -> Tensor:
        chosen = h[h[:, 0] > 0]
        chosen.mul_(2)
        return h + chosen.mean()


class SelectedIsWrittenUnseen(Case):
    def between(self, h: Tensor) -> Tensor:
        chosen = h[h[:, 0] > 0]
        with torch.no_grad():
            chosen.mul_(2)
        return h + chosen.mean()


class SelectedIsSorted(Case):
    def between(self, h: Tensor) -> Tensor:
        return h + h[h[:, 0] > 0].sort(0).values[0]


class OwnGenerator(Case):
    def between(self, h: Tensor) -> Tensor:
        return h + torch.rand(WIDTH, generator=torch.Generator().manual_seed(0))


class Seeds(Case):
    def between(self, h: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return h + torch.rand(WIDTH)


class ParameterOfNobody(Case):
    def prepare(self) -> None:
        self.weights = [nn.Parameter(torch.ones(WIDTH))]

    def between(self, h: Tensor) -> Tensor:
        return h * self.weights[0]


class Lazy(Case):
    def prepare(self) -> None:
        self.c = nn.LazyLinear(WIDTH)

    def between(self, h: Tensor) -> Tensor:
        return self.c(h)


class WrittenConstants(Case):
    """Numbers that are known no longer."""

    def between(self, h: Tensor) -> Tensor:
        numbers = torch.tensor([1.0, 2.0], dtype=h.dtype)
        numbers[0] = 3.0
        return h * numbers[0].item()
