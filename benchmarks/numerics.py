"""Under any plan, the numbers of one device: many plans of every model, on real processes.

For each model, in a small configuration and in float64, on 2 and on 4 gloo processes: the best
plan, and random legal ones (any configuration of any operator, any layout of any tensor, any
storage of any parameter). The loss, every gradient, and some plans' losses and parameters over 20
steps of AdamW are held against one device; the collectives that torch.distributed is asked for
are held against those that the plan lists. One start of the processes serves all plans of a model.

    python benchmarks/numerics.py --out benchmarks/results/numerics.json
    python benchmarks/numerics.py rnnlm-tiny --processes 2 --plans 5
    python benchmarks/numerics.py --mixtures --out benchmarks/results/numerics-mixtures.json
    python benchmarks/numerics.py --page        # write the page from what was measured before
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from architecture_list import ARCHITECTURES, GROUPED, IDS, Architecture
from environment import environment

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # choices and recorder are those of the tests

PAGE = ROOT / "docs" / "results" / "numerics.md"
RESULTS = ROOT / "benchmarks" / "results" / "numerics.json"
MIXTURES_RESULTS = RESULTS.with_name("numerics-mixtures.json")
MODELS = (
    "alexnet-tiny",
    "inceptionv3-tiny",
    "rnnlm-tiny",
    "transformer-tiny",
    "resnet50-tiny",
    "densenet121-tiny",
    "gpt2-tiny",
    "llama3-8b-tiny",
    "t5-large-tiny",
    "bert-large-tiny",
    "vit-large-tiny",
    "mixtral-8x7b-tiny",
)
# Classes of transformers as they are, from the list of architectures; in every second random plan
# rows go to their experts on other devices.
MIXTURES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "olmoe", "llama4_text")
ROUTED = "shardfold.routed_experts"
LLAMA4 = Architecture(
    "llama4_text",
    "Llama4ForCausalLM",
    "experts",
    {**GROUPED, **IDS, "intermediate_size_mlp": 64, "num_local_experts": 4},
)
SMALL = {  # each family has its own names for these
    **GROUPED,
    **IDS,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "sliding_window": 4,
    "max_position_embeddings": 64,
}
LATENT = {"num_key_value_heads": 4, "head_dim": 4, "q_lora_rank": 8, "kv_lora_rank": 8} | {
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
FURTHER = {
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "flex_olmo": "FlexOlmoForCausalLM",
    "afmoe": "AfmoeForCausalLM",
    "cohere2_moe": "Cohere2MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
}
OWN_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {**LATENT, "topk_method": "greedy"},
}
OTHERS = tuple(
    Architecture(name, class_name, "experts", {**SMALL, **OWN_FIELDS.get(name, {})})
    for name, class_name in FURTHER.items()
)
MESHES = {2: ("2",), 4: ("2x2", "4"), 8: ("2x2x2",)}
STEPS, LR = 20, 1e-3
# With batch norm over few samples, training at that rate magnifies rounding: InceptionV3 on one
# device with 8 images, its weights disturbed by 1e-13 of themselves, has a loss 3e-2 off after the
# steps. At the lower rate, a disturbance of 1e-15 moves a parameter by 2e-6 with 8 images and by
# 2e-11 with 16, so 16 it has.
LOWER_LR = {"inceptionv3-tiny": 1e-4, "resnet50-tiny": 1e-4, "densenet121-tiny": 1e-4}
BATCHES = {"inceptionv3-tiny": 16}
WAIT = timedelta(minutes=30)  # of ranks for each other
TINY_BATCH = 4
STEP_TOLERANCE, TRAINING_TOLERANCE = 1e-9, 1e-7


@dataclass(frozen=True, slots=True)
class Row:
    """One plan of one model: how far it is from one device, and whether it sent what it says."""

    model: str
    processes: int
    mesh: str
    plan: str
    seconds: float
    loss: float  # difference of the loss, relative
    gradient: float  # largest difference of any gradient, relative to that gradient
    collectives: int
    sent: float  # bytes
    unlike: str  # how the collectives differ from the plan's; empty if they do not
    training: float | None  # largest difference in loss or parameters over the steps
    error: str = ""

    @property
    def is_right(self) -> bool:
        """Whether everything is as on one device and as planned."""
        near = max(self.loss, self.gradient) <= STEP_TOLERANCE
        trained = self.training is None or self.training <= TRAINING_TOLERANCE
        return near and trained and not self.unlike and not self.error


Case = tuple[str, str, bytes, bool]  # mesh, label, plan, whether to train


def built(model: str, dtype: str | None = None) -> tuple[Any, Any, Any]:
    """The model, with weights and a batch, alike on every rank."""
    from shardfold import zoo

    known = next((each for each in (*ARCHITECTURES, LLAMA4, *OTHERS) if each.name == model), None)
    if known is not None:
        module, args, kwargs = as_it_is(known)
        return module if dtype is None else module.double(), args, kwargs
    return zoo.build(model, device="cpu", batch=BATCHES.get(model), dtype=dtype)


def as_it_is(known: Architecture) -> tuple[Any, Any, Any]:
    """A class of transformers as it is, with the loop over experts that it falls back to."""
    import torch
    import transformers

    from shardfold.zoo.huggingface import LossOf

    fields = {**known.real, **known.tiny}
    config = transformers.AutoConfig.for_model(known.name, **fields)
    config.use_cache, config._experts_implementation = False, "eager"
    torch.manual_seed(0)
    kind = getattr(transformers, known.class_name)
    tokens = torch.randint(fields["vocab_size"], (TINY_BATCH, known.tiny_seq or 1))
    return LossOf(kind(config).train()), (), {"input_ids": tokens, "labels": tokens}


def cases(model: str, processes: int, plans: int, training: int) -> list[Case]:
    """The best plan, and so many random ones, over the meshes of so many processes."""
    from tests.distributed.choices import Chooser

    from shardfold.plans.files import dumps

    meshes = MESHES[processes]
    found: list[Case] = []
    for k, mesh in enumerate(meshes):
        chooser = Chooser(*built(model), f"{processes}xcpu", mesh)
        found.append((mesh, "best", dumps(chooser.best()).encode(), True))
        sent = chooser.splitting(plans, ROUTED, lambda _: "d")
        for seed in range(k, plans, len(meshes)):
            drawn = sent.get(f"random {seed}") if seed // len(meshes) % 2 else None
            label = f"random {seed}" + (", dispatch" if drawn else "")
            given = dumps(drawn or chooser.random(seed)).encode()
            found.append((mesh, label, given, seed < training))
    return found


class Captured:
    """A model and its program: made before the processes are started, and found in all of them."""

    def __init__(self, name: str, plan: Any) -> None:
        from shardfold.runtime.parallelize import prepared

        self.name = name
        self.model, self.args, self.kwargs = built(name)
        self.program, self.subdims = prepared(self.model, plan, self.args, self.kwargs, None, None)

    def module(self, plan: Any | None) -> Any:
        """The module under a plan, or on one device alone."""
        from shardfold.runtime.lower import alone
        from shardfold.runtime.parallelize import Settings, assemble, lowered_here

        if plan is None:
            lowered = alone(self.program, self.subdims)
        else:
            lowered = lowered_here(plan, self.program, self.subdims, None)
        # A model may compute its loss in float32 whatever its own dtype: all of it is widened.
        return assemble(self.model, self.program, lowered, Settings(float64=True))


@dataclass(frozen=True, slots=True)
class Numbers:
    """Losses of some steps of AdamW, the gradients of the first, the parameters after the last."""

    losses: list[float]
    gradients: dict[str, Any]
    parameters: dict[str, Any]


def trained(captured: Captured, module: Any, steps: int, first: Any = nullcontext) -> Numbers:
    """Take the steps; `first` is around forward and backward of the first."""
    import torch

    rate = LOWER_LR.get(captured.name, LR)
    optimizer = torch.optim.AdamW(module.parameters(), lr=rate)
    keepings = module._run.named()
    losses, gradients = [], {}
    for step in range(steps):
        with first() if step == 0 else nullcontext():
            loss = module(*captured.args, **captured.kwargs)
            loss.backward()
        if step == 0:
            gradients = {
                n: None if p.grad is None else keepings[n].whole(p.grad).clone()
                for n, p in module.named_parameters()
            }
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    parameters = {n: keepings[n].whole(p.detach()) for n, p in module.named_parameters()}
    return Numbers(losses, gradients, parameters)


def job(rank: int, captured: Captured, given: Sequence[Case], show: bool) -> list[Row]:
    """Every plan of a model, one after the other; on each process."""
    from shardfold.errors import ShardfoldError
    from shardfold.plans.files import loads

    # One device's numbers are made once for all plans; only rank 0 compares. All ranks make the
    # module, as they compare its weights.
    alone = captured.module(None)
    single = trained(captured, alone, STEPS) if rank == 0 else None
    rows = []
    for number, (mesh, label, data, trains) in enumerate(given):
        started = time.perf_counter()
        plan = loads(data)
        size = math.prod(axis.size for axis in plan.mesh)
        try:
            found = tried(captured, single, plan, STEPS if trains else 1)
        except ShardfoldError as error:
            found = {"loss": 0.0, "gradient": 0.0, "collectives": 0, "sent": 0.0, "unlike": ""}
            found |= {"training": None, "error": str(error)}
        rows.append(Row(captured.name, size, mesh, label, time.perf_counter() - started, **found))
        if rank == 0 and show:
            done = f"{number + 1}/{len(given)}"
            click.echo(f"\r{captured.name} on {size}: {done} ", err=True, nl=False)
    return rows


def tried(captured: Captured, single: Numbers | None, plan: Any, steps: int) -> dict[str, Any]:
    """One plan beside one device."""
    import torch.distributed as dist
    from tests.distributed.recorder import by_member, planned, recorded

    module = captured.module(plan)
    names = tuple(axis.name for axis in plan.mesh)
    ran: Any = None

    @contextmanager
    def recording() -> Iterator[None]:
        nonlocal ran
        with recorded(module._run.context.groups, names, widened=True) as ran:
            yield
        ran = by_member(ran, module._run.uses.launched, names, widened=True)

    own = trained(captured, module, steps, recording)
    losses: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(losses, own.losses)
    wanted = planned(plan)
    is_same = all(each == losses[0] for each in losses)
    return {
        **apart(own, single or own),
        "collectives": sum(ran.values()),
        "sent": sum(size * count for (_, _, size), count in ran.items()),
        # Rank 0 has the fullest part of everything, which is what a plan counts.
        "unlike": "" if ran == wanted else f"planned {wanted - ran}, ran {ran - wanted}",
        "error": "" if is_same else f"the loss differs between ranks: {losses}",
    }


def apart(found: Numbers, expected: Numbers) -> dict[str, Any]:
    """The largest relative differences: of the first loss, of gradients, and over all steps."""
    from shardfold.runtime.check import SMALL, difference

    floor = SMALL * max(float(g.abs().max()) for g in expected.gradients.values() if g is not None)
    gradient = 0.0
    for name, there in expected.gradients.items():
        here = found.gradients[name]
        if here is None or there is None:
            gradient = max(gradient, 0.0 if here is there else math.inf)
        else:
            gradient = max(gradient, difference(here, there, floor))
    pairs = list(zip(found.losses, expected.losses, strict=False))
    losses = [abs(a - b) / abs(b) for a, b in pairs]
    training = None
    if len(found.losses) == len(expected.losses):
        # The bias of a key has no gradient but rounding, which Adam makes into a number.
        least = SMALL * max(float(p.abs().max()) for p in expected.parameters.values())
        pairs_after = ((found.parameters[n], p) for n, p in expected.parameters.items())
        training = max(*losses, *(difference(a, b, least) for a, b in pairs_after))
    return {"loss": losses[0], "gradient": gradient, "training": training}


def module_difference(rank: int, model: str) -> float:
    """How far the runner on one device is from the model itself, dropout off: loss, gradients."""
    import torch
    from torch import nn

    import shardfold as sf
    from shardfold.runtime.check import SMALL, difference
    from shardfold.zoo import language

    language.DROPOUT = 0.0
    module, args, kwargs = built(model, "fp64")
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if isinstance(part, nn.Dropout) and name == "p":
                part.p = 0.0
            elif "dropout" in name and isinstance(value, float):
                setattr(part, name, 0.0)
    plan = sf.plan(module, args, kwargs, cluster="cpu")
    single = sf.parallelize(module, plan, args, kwargs)
    torch.manual_seed(0)
    found, expected = single(*args, **kwargs), module(*args, **kwargs)
    found.backward()
    expected.backward()
    gradients = {n: p.grad for n, p in module.named_parameters()}
    floor = SMALL * max(float(g.abs().max()) for g in gradients.values() if g is not None)
    return max(
        difference(found.detach(), expected.detach()),
        *(
            difference(p.grad, gradients[n], floor)
            for n, p in single.named_parameters()
            if p.grad is not None
        ),
    )


def summary(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One line a model and number of processes."""
    found: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["model"], row["processes"]), []).append(row)
    return [
        {
            "model": model,
            "processes": processes,
            "plans": len(own),
            "loss": max(r["loss"] for r in own),
            "gradient": max(r["gradient"] for r in own),
            "trained": sum(r["training"] is not None for r in own),
            "training": max((r["training"] or 0.0) for r in own),
            "collectives": sum(r["collectives"] for r in own),
            "wrong": sum(not Row(**r).is_right for r in own),
        }
        for (model, processes), own in found.items()
    ]


def page(results: Mapping[str, Any], mixed: Mapping[str, Any]) -> str:
    """The results as a page; mixtures as they are have a table of their own."""
    made, rows = results["environment"], summary(results["rows"])
    plans, sent = sum(r["plans"] for r in rows), sum(r["collectives"] for r in rows)
    return TEXT.format(
        table=_table(rows),
        plans=plans,
        models=len({r["model"] for r in rows}),
        collectives=f"{sent:,}",
        wrong=sum(r["wrong"] for r in rows) or "None",
        own=f"{max(results['module_difference'].values()):.1e}",
        minutes=f"{results['seconds'] / 60:.0f}",
        load=f"{made['load_before']:.0f}",
        note=results.get("note", ""),
        missing=missing({(r["model"], r["processes"]) for r in rows}),
        sensitivity=sensitivity(results.get("sensitivity")),
        steps=STEPS,
        mixtures=_mixtures(mixed),
        **{k: made[k] for k in ("date", "processor", "cores", "python", "torch")},
    )


def _mixtures(results: Mapping[str, Any]) -> str:
    rows, made = results["rows"], results["environment"]
    wrong = sum(r["wrong"] for r in summary(rows))
    return MIXED.format(
        table=_table(summary(rows)),
        wrong=wrong or "None",
        left=", ".join(_left_out({(r["model"], r["processes"]) for r in rows})) or "nothing",
        steps=STEPS,
        plans=len(rows),
        sent=sum(r["plan"].endswith("dispatch") for r in rows),
        own=f"{max(results['module_difference'].values()):.1e}",
        **{k: made[k] for k in ("date", "torch", "transformers")},
    )


def _left_out(found: set[tuple[str, int]]) -> Iterator[str]:
    return (f"`{m}` on {n}" for m in MIXTURES for n in MESHES if (m, n) not in found)


def _table(rows: Iterable[Mapping[str, Any]]) -> str:
    lines = []
    for r in rows:
        cells = (
            f"`{r['model']}`",
            r["processes"],
            r["plans"],
            f"{r['loss']:.1e}",
            f"{r['gradient']:.1e}",
            f"{r['training']:.1e} ({r['trained']})",
            f"{r['collectives']:,}",
            r["wrong"] or "-",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def missing(found: set[tuple[str, int]]) -> str:
    """What was not measured, if anything."""
    left = [f"`{m}` on {size}" for m in MODELS for size in (2, 4) if (m, size) not in found]
    return f"Not measured: {', '.join(left)}.\n\n" if left else ""


def sensitivity(found: Mapping[str, Any] | None) -> str:
    """What was seen at the higher rate, if it was tried."""
    if found is None:
        return ""
    plans = ", ".join(f"{name} {value:.1e}" for name, value in found["plans"].items())
    return (
        f"At {found['lr']:g}, `{found['model']}` on 2 processes did not stay within 1e-7 over "
        f"{STEPS} steps\n({plans}).\nNor does one device stay near itself there: its weights "
        f"disturbed by {found['disturbed']:g} of themselves,\nits loss is {found['loss']:.0e} off "
        f"after the steps at that rate, and {found['loss_at_lower']:.0e} at 1e-4\n"
        f"(a parameter: {found['parameter_at_lower']:.0e}). So the lower rate was taken. There, "
        "a disturbance of\n1e-15 moves a parameter by "
        + ", ".join(f"{by:.0e} with {count} images" for count, by in found["images"].items())
        + f",\nso the batch has {BATCHES[found['model']]}. What exceeds the limit is counted as "
        "wrong.\n\n"
    )


TEXT = """# Under any plan, the numbers of one device

{plans} plans of {models} models, each run on real processes (gloo) in float64 beside one device:
the best plan on each mesh (2; 2x2 and 4), and random legal ones, in which every operator has any of
its configurations, every tensor any of its layouts, every parameter any of its storages. Random
plans are slow and odd on purpose: they go through splits that no good plan would combine.

- **loss**, **gradient**: the largest difference from one device over all plans, relative to the
  loss, and to the largest number of that gradient (of one that is nearly zero, to a ten-thousandth
  of the largest of all; so are parameters compared). The limit is 1e-9.
- **{steps} steps**: the largest difference of any loss or parameter over the steps of AdamW, and in
  how many plans that was measured. The limit is 1e-7. The learning rate is 1e-3; 1e-4 for
  networks with batch norm (see below).
- **collectives**: how many were asked of torch.distributed in one step, over all plans. Each is in
  its plan: same kind, axes, count and bytes.
- **wrong**: plans of which anything was not so.

| model | processes | plans | loss | gradient | {steps} steps | collectives | wrong |
|---|---:|---:|---:|---:|---:|---:|---:|
{table}

{wrong} of the {plans} plans were wrong; {collectives} collectives were as planned. One device is
shardfold's own runner, so that dropout is the same; without dropout, its loss and gradients are
within {own} of the model's own.

{sensitivity}{missing}Measured on {date} in {minutes} minutes of runs, several at once, on a
machine busy with other work (load {load}): {processor}, {cores} cores, Python {python}, torch
{torch}.
{note}Again: `python benchmarks/numerics.py --out benchmarks/results/numerics.json`.

{mixtures}"""
MIXED = """## Mixtures of experts, as they are

Classes of transformers in small sizes, with the loop over experts of their own. The same figures;
in {sent} of the {plans} plans rows go to experts on other devices, in all blocks at once. Not
measured: {left}.

| model | processes | plans | loss | gradient | {steps} steps | collectives | wrong |
|---|---:|---:|---:|---:|---:|---:|---:|
{table}

{wrong} of the plans were wrong; on one device loss and gradients are within {own} of the model's.
Measured on {date}, torch {torch}, transformers {transformers}. Again:
`python benchmarks/numerics.py --mixtures --out benchmarks/results/numerics-mixtures.json`.
"""


@click.command(help=__doc__)
@click.argument("models", nargs=-1)
@click.option("--processes", type=int, multiple=True, default=(2, 4), show_default=True)
@click.option("--plans", type=int, default=20, show_default=True, help="Random plans of each.")
@click.option("--training", type=int, default=2, show_default=True, help="Of those, to train.")
@click.option("--out", type=click.Path(dir_okay=False), help="Write the rows as JSON.")
@click.option("--mixtures", is_flag=True, help="Mixtures of experts instead, as they are.")
@click.option("--page", "write", is_flag=True, help="Write the page from the stored rows.")
def main(
    models: tuple[str, ...],
    processes: tuple[int, ...],
    plans: int,
    training: int,
    out: str | None,
    mixtures: bool,
    write: bool,
) -> None:
    """Try every model, then print a line for each."""
    if write:
        PAGE.write_text(
            page(*(json.loads(file.read_text()) for file in (RESULTS, MIXTURES_RESULTS)))
        )
        return
    from shardfold.plans.files import loads
    from shardfold.runtime.ranks import launch

    started = time.perf_counter()
    facts = {**environment(), "torch": version("torch"), "transformers": version("transformers")}
    rows: list[Row] = []
    own: dict[str, float] = {}
    show = sys.stderr.isatty()
    warnings.simplefilter("ignore")
    for name in ("torch", "torch.distributed.tensor._redistribute", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for model in models or (MIXTURES if mixtures else MODELS):
        own[model] = launch(module_difference, 1, model, is_fork=True)[0]
        for size in processes:
            given = cases(model, size, plans, training)
            captured = Captured(model, loads(given[0][2]))
            found = launch(job, size, captured, given, show, is_fork=True, wait=WAIT)[0]
            rows += found
            (line,) = summary(map(asdict, found))
            click.echo(
                f"\r{model:18} {size} {line['plans']:3} plans  loss {line['loss']:.1e}  gradient "
                f"{line['gradient']:.1e}  training {line['training']:.1e}  "
                f"{line['collectives']:5} collectives  {line['wrong']} wrong  "
                f"{sum(r.seconds for r in found):.0f} s, {time.perf_counter() - started:.0f} in all"
            )
            for row in found:
                if not row.is_right:
                    click.echo(f"  {row}", err=True)
            if out:  # after each, so that a long run that is cut short leaves what it has
                results = {
                    "environment": facts,
                    "seconds": time.perf_counter() - started,
                    "module_difference": own,
                    "rows": [asdict(row) for row in rows],
                }
                Path(out).write_text(json.dumps(results, indent=1) + "\n")
    if not all(row.is_right for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
