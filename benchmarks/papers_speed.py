"""PaSE's Figure 6 with our simulator: speed-up over data parallelism on 1080 Ti and 2080 Ti."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import shardfold as sf
from papers_placed import placed
from papers_search import DEVICES, MODELS, cluster_of
from shardfold import zoo
from shardfold.planner.compare_methods import Effort

GPUS = ("1080ti", "2080ti")
EXPERT = {
    "alexnet": ("krizhevsky-2014",),
    "inceptionv3": ("krizhevsky-2014",),
    "rnnlm": (),  # places layers on devices, which no plan can: priced apart
    # Mesh-TensorFlow's layout: of any degree within a node, or across nodes.
    "transformer": ("megatron", "mesh-tensorflow"),
}
OURS = ("additive-optimum", "selected")
MOVES = 250_000
OPTIMIZER = "adamw"


def rows() -> Iterator[dict[str, Any]]:
    """One row a cluster, model and number of devices."""
    for model in MODELS:
        module, args, kwargs = zoo.build(model)
        for gpu in GPUS:
            for devices in DEVICES:
                found = sf.compare(
                    module,
                    args,
                    kwargs,
                    cluster=cluster_of(devices, gpu),
                    optimizer=OPTIMIZER,
                    cost="roofline",
                    methods=(*OURS, "data-parallel", "mcmc", *EXPERT[model]),
                    effort=Effort(moves=MOVES),
                    micro_batches=1,
                )
                results, over = found.as_plain()["results"], found.speedups
                speedups = {name: over[name] for name in ("mcmc", *OURS)}
                if EXPERT[model]:
                    speedups["expert"] = max(over[e] for e in EXPERT[model] if e in over)
                else:
                    speedups |= _placed(gpu, devices, results)
                row = {"gpu": gpu, "model": model, "devices": devices, "speedups": speedups}
                yield {**row, "results": results}


def _placed(gpu: str, devices: int, results: list[dict[str, Any]]) -> dict[str, float]:
    plain = next(r for r in results if r["method"] == "data-parallel")["step_seconds"]
    found = placed(devices, gpu, OPTIMIZER)
    return {
        "expert": plain / found.step_seconds,
        "expert_pipelined": plain / found.pipelined_seconds,
    }
