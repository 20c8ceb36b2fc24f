"""PaSE's Figure 6 with our simulator: speed-up over data parallelism on 1080 Ti and 2080 Ti."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import shardfold as sf
from papers_search import DEVICES, MODELS, cluster_of
from shardfold import zoo
from shardfold.plans.contest import Effort

GPUS = ("1080ti", "2080ti")
EXPERT = {  # the paper's experts; RNNLM's places whole layers, which no split of ours can say
    "alexnet": "one-weird-trick",
    "inceptionv3": "one-weird-trick",
    "transformer": "mesh-tensorflow",
}
ONE_NODE = {"mesh-tensorflow": "megatron"}  # the same thing where there is one level of links
MOVES = 250_000


def rows() -> Iterator[dict[str, Any]]:
    """One row a cluster, model and number of devices."""
    for model in MODELS:
        module, args, kwargs = zoo.build(model)
        for gpu in GPUS:
            for devices in DEVICES:
                name = cluster_of(devices, gpu)
                expert = EXPERT.get(model)
                if expert is not None and devices <= 8:
                    expert = ONE_NODE.get(expert, expert)
                methods = ["exact", "data-parallel", "mcmc", *([expert] if expert else [])]
                found = sf.compare(
                    module, args, kwargs, cluster=name, methods=methods, effort=Effort(moves=MOVES)
                )
                yield {
                    "gpu": gpu,
                    "model": model,
                    "devices": devices,
                    "expert": expert,
                    "speedups": {
                        "expert": found.speedups.get(expert) if expert else None,
                        "mcmc": found.speedups.get("mcmc"),
                        "exact": found.speedups["exact"],
                    },
                    "results": found.as_plain()["results"],
                }
