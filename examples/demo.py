"""What shardfold finds: plans a few models on a few clusters, then trains one under its plan.

For the plans nothing is run and no weight is allocated: a laptop plans for 64 GPUs. The training
is real: two processes of this machine under a plan, beside one process.
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
from shardfold.report import drawn, plan_view, view
from shardfold.report.units import number, seconds, size


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
TRAINED = Case("transformer-tiny", "2xcpu", sizes={"batch": 64, "hidden": 64})
STEPS = 12
NEXT = """
Next:
  .venv/bin/shardfold models                    what else there is to plan
  .venv/bin/shardfold clusters                  and where
  .venv/bin/shardfold plan gpt2 --cluster 8xa100 --dtype bf16 --save plan.json
  .venv/bin/shardfold plan examples/own_model.py:make --cluster 2x8xh100
  .venv/bin/shardfold plan gpt2-tiny --cluster 2xcpu --batch 64 --save plan.json
  .venv/bin/shardfold train gpt2-tiny --plan plan.json --batch 64 --local 2
"""


def main() -> None:
    """Plan every case, then print one plan in full and all of them in a line each."""
    console = Console(highlight=False)
    _hush()
    started = time.perf_counter()
    plans = {case.title: _planned(case, console) for case in CASES}
    console.print()
    shown = view(plans[SHOWN.title], model=SHOWN.model)
    console.print(plan_view(shown, width=min(console.width, 110)))
    console.print()
    console.print(_summary(plans))
    console.print(
        "step: simulated with overlap, as in the plan above; the baselines are how many times as "
        "long. 'proven': no other choice of splits has a lower additive cost."
    )
    console.print(f"All planned on this machine in {time.perf_counter() - started:.0f} s.")
    console.print()
    console.print(_training(TRAINED, console))
    console.print(NEXT, end="")


def _training(case: Case, console: Console) -> Table:
    """Train under a plan on two processes and on one, and put the losses side by side."""
    from shardfold.runtime.ranks import launch

    plan = _planned(case, console)
    module, args, kwargs = zoo.build(case.model, **case.sizes)
    alone = sf.plan(module, args, kwargs, cluster="cpu")
    split, _ = launch(trained, 2, plan, case)
    (single,) = launch(trained, 1, alone, case)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(f"step of {case.title}", justify="right")
    for heading in ("2 processes", "1 process", "apart"):
        table.add_column(heading, justify="right")
    for step, (two, one) in enumerate(zip(split, single, strict=True)):
        if step % 3 == 0 or step == STEPS - 1:
            table.add_row(str(step), f"{two:.6f}", f"{one:.6f}", f"{abs(two - one):.0e}")
    return table


def trained(rank: int, plan: sf.Plan, case: Case) -> list[float]:
    """The losses of a few steps under a plan; on every process."""
    from shardfold.runtime.training import Recipe, begin, repeated, train

    _hush()
    module, *batch = zoo.build(case.model, device="cpu", **case.sizes)
    args, kwargs = batch
    state = begin(module, plan, (args, kwargs), Recipe(lr=3e-3))
    return [report.loss for report in train(state, repeated((args, kwargs)), steps=STEPS)]


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
    for heading in ("params", "step", "data-\nparallel", "fsdp", "memory", "proven"):
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
