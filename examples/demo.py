"""What shardfold finds: plans a few models on a few clusters, and says what to try next.

Nothing is run and no weight is allocated: a laptop plans for 64 GPUs.
"""

from __future__ import annotations

import logging
import time
import warnings
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table

import shardfold as sf
from shardfold import zoo
from shardfold.plans.units import number, seconds, size
from shardfold.report import drawn, plan_view


@dataclass(frozen=True)
class Case:
    """A model of the zoo, resized where `sizes` says so, and where it is to be trained."""

    model: str
    cluster: str
    dtype: str | None = None
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The model and what was changed of it."""
        changed = ", ".join(f"{value} {name}" for name, value in self.sizes.items())
        return f"{self.model} ({changed})" if changed else self.model


SHOWN = Case("alexnet", "4x8x1080ti")
CASES = (
    SHOWN,
    Case("rnnlm", "4x8x1080ti"),
    Case("transformer", "8xa100", "bf16"),
    Case("resnet50-wide", "8xv100"),
    Case("llama3-8b", "8x8xh100", "bf16", {"layers": 4}),
    Case("mixtral-8x7b", "8x8xh100", "bf16", {"layers": 2}),
)
NEXT = """
Next:
  .venv/bin/shardfold models                    what else there is to plan
  .venv/bin/shardfold clusters                  and where
  .venv/bin/shardfold plan gpt2 --cluster 8xa100 --dtype bf16 --save plan.json
  .venv/bin/shardfold plan examples/own_model.py:make --cluster 2x8xh100
"""


def main() -> None:
    """Plan every case, then print one plan in full and all of them in a line each."""
    console = Console(highlight=False)
    _hush()
    started = time.perf_counter()
    plans = {case.title: _planned(case, console) for case in CASES}
    console.print()
    console.print(plan_view(plans[SHOWN.title], model=SHOWN.model, width=min(console.width, 110)))
    console.print()
    console.print(_summary(plans))
    console.print(
        "Times are what the cost model predicts for one training step. 'proven' means that no "
        "other choice of splits is faster under that model."
    )
    console.print(f"All planned on this machine in {time.perf_counter() - started:.0f} s.")
    console.print(NEXT, end="")


def _planned(case: Case, console: Console) -> sf.Plan:
    with drawn(console) as watch:
        module, args, kwargs = zoo.build(case.model, **case.sizes)
        plan = sf.plan(module, args, kwargs, cluster=case.cluster, dtype=case.dtype, watch=watch)
    made = plan.provenance
    took = seconds(made.capture_seconds + made.search_seconds)
    console.print(f"Planned {case.title} on {plan.cluster} in {took}")
    return plan


def _summary(plans: dict[str, sf.Plan]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("model")
    table.add_column("cluster")
    for heading in ("params", "step", "data\nparallel", "fully\nsharded", "memory", "proven"):
        table.add_column(heading, justify="right")
    for title, plan in plans.items():
        e = plan.estimate
        table.add_row(
            title,
            plan.cluster,
            number(plan.provenance.parameters),
            seconds(e.step_seconds),
            f"{e.data_parallel_seconds / e.step_seconds:.2f}x",
            f"{e.fully_sharded_seconds / e.step_seconds:.2f}x",
            size(e.peak_bytes),
            "yes" if e.optimal else "no",
        )
    return table


def _hush() -> None:
    """Keep other libraries' advice out of the picture."""
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)


if __name__ == "__main__":
    main()
