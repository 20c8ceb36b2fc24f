"""The paper's expert for RNNLM, priced and not run: layers placed on two groups of devices.

The first half of the devices holds the embedding and the first LSTM layer, the second half the
second layer, the projection and the loss; each half is data parallel within. The runner splits
operators and does not place them, so this is no plan, but its parts are: each half's step is the
simulated data-parallel step of its layers on half of the cluster. Forward and backward go through
the halves one after the other,

    forward 1, send, forward 2, backward 2, send, backward 1,

and each half ends with what its own reductions still need, and its update. What is sent is the
hidden state of every position, and its gradient, from each device to its peer in the other half.
With perfect pipelining over time the halves would work side by side: a bound for that is given too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from papers_search import cluster_of
from shardfold import zoo
from shardfold.capture import capture
from shardfold.cluster import Cluster, parse
from shardfold.costs import optimizer_named, pricing_named
from shardfold.costs.steps import Collective
from shardfold.planner.case import ResolvedRequest
from shardfold.planner.planner import select_for
from shardfold.simulate import timeline

GROUPS = 2


class First(nn.Module):
    """Embedding and first layer."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.embedding = whole.embedding
        self.lstm = nn.LSTM(whole.lstm.input_size, whole.lstm.hidden_size, 1, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """The sum stands for what the other half makes of it."""
        return self.lstm(self.embedding(tokens))[0].sum()


class Second(nn.Module):
    """Second layer, projection and loss."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.lstm = nn.LSTM(whole.lstm.hidden_size, whole.lstm.hidden_size, 1, batch_first=True)
        self.projection = whole.projection

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy over all positions."""
        logits = self.projection(self.lstm(hidden)[0])
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@dataclass(frozen=True)
class Half:
    """Seconds of one half's step: forward, backward, and what comes after."""

    forward: float
    backward: float
    rest: float


@dataclass(frozen=True)
class Placed:
    """Seconds of the step of both halves, and the least that pipelining could leave of it."""

    step_seconds: float
    pipelined_seconds: float


def placed(devices: int, gpu: str, optimizer: str) -> Placed:
    """RNNLM's layers on the two halves of a cluster."""
    whole, (tokens,), rest = zoo.build("rnnlm")
    labels = rest["labels"]
    with torch.device("meta"):
        first, second = First(whole), Second(whole)
    hidden = torch.empty(*tokens.shape, whole.lstm.hidden_size, device="meta")
    half = parse(cluster_of(devices // GROUPS, gpu))
    a = _half(first, (tokens,), half, optimizer)
    b = _half(second, (hidden, labels), half, optimizer)
    sending = _sending(parse(cluster_of(devices, gpu)), hidden.numel() * 4 / half.size)
    there = a.forward + sending + b.forward + b.backward
    return Placed(
        max(there + b.rest, there + sending + a.backward + a.rest),
        max(h.forward + h.backward + h.rest for h in (a, b)) + 2 * sending,
    )


def _half(module: nn.Module, args: tuple[Tensor, ...], cluster: Cluster, optimizer: str) -> Half:
    """A data-parallel step on half of the cluster, cut where forward and backward end."""
    graph, updates = capture(module, args), optimizer_named(optimizer)
    request = ResolvedRequest(cluster, cluster.meshes(), pricing_named("roofline"), updates)
    selection = select_for(graph, request, lambda done, total: None)
    candidate = selection.best_by_label()["data-parallel"]
    found, spans = timeline(candidate.schedule())
    ends = {
        phase: max(s.end_seconds for s in spans.spans if s.phase == phase and s.stream == "compute")
        for phase in ("forward", "backward")
    }
    forward, backward = ends["forward"], ends["backward"]
    return Half(forward, backward - forward, found.step_seconds - backward)


def _sending(cluster: Cluster, sent_bytes: float) -> float:
    """Seconds from each device to its peer, over the outermost links."""
    mesh = cluster.meshes()[0]
    model = pricing_named("roofline").model(cluster, mesh)
    step = Collective("forward", "halo", (0,), np.zeros(1, np.intp), np.array([sent_bytes]))
    return float(model.collective_seconds(step)[0])
