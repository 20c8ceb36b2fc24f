"""PaSE's Figure 6 with our simulator: speed-up over data parallelism on 1080 Ti and 2080 Ti."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import shardfold as sf
from papers_placed import placed
from papers_search import DEVICES, MODELS, cluster_of
from shardfold import zoo
from shardfold.plans.contest import Effort

GPUS = ("1080ti", "2080ti")
PLACED = "layer placement"  # RNNLM's expert: priced, as no plan can place layers
EXPERT = {
    "alexnet": "one-weird-trick",
    "inceptionv3": "one-weird-trick",
    "rnnlm": PLACED,
    "transformer": "mesh-tensorflow",
}
ONE_NODE = {"mesh-tensorflow": "megatron"}  # the same thing where there is one level of links
MOVES = 250_000
OPTIMIZER = "adamw"


def rows() -> Iterator[dict[str, Any]]:
    """One row a cluster, model and number of devices."""
    for model in MODELS:
        module, args, kwargs = zoo.build(model)
        for gpu in GPUS:
            for devices in DEVICES:
                expert = EXPERT[model]
                if devices <= 8:
                    expert = ONE_NODE.get(expert, expert)
                methods = ["plan", "exact", "data-parallel", "mcmc"]
                found = sf.compare(
                    module,
                    args,
                    kwargs,
                    cluster=cluster_of(devices, gpu),
                    optimizer=OPTIMIZER,
                    methods=methods if expert == PLACED else [*methods, expert],
                    effort=Effort(moves=MOVES),
                )
                results = found.as_plain()["results"]
                row = {"gpu": gpu, "model": model, "devices": devices, "expert": expert}
                speedups = {name: found.speedups.get(name) for name in ("mcmc", "exact", "plan")}
                speedups["expert"] = found.speedups.get(expert)
                if expert == PLACED:
                    speedups |= _placed(gpu, devices, results)
                yield {**row, "speedups": speedups, "results": results}


def _placed(gpu: str, devices: int, results: list[dict[str, Any]]) -> dict[str, float]:
    plain = next(r for r in results if r["method"] == "data-parallel")["simulated_seconds"]
    found = placed(devices, gpu, OPTIMIZER)
    return {
        "expert": plain / found.step_seconds,
        "expert_pipelined": plain / found.pipelined_seconds,
    }
