"""Sixty architectures of Hugging Face transformers: planned at their real sizes, run when tiny.

Each is a `config.json` and goes the way of `hf:config.json`. At its real size (on meta: no weights)
it is planned for eight H100s. In a tiny size it runs on 2 and on 2x2 gloo processes in float64
under the best plan, data parallel, fully sharded and random plans; two steps on different batches
are held against the plain eager module: loss, gradients, buffers. The collectives that run are
held against those planned.

    python benchmarks/architectures.py --out benchmarks/results/architectures.json
    python benchmarks/architectures.py gpt2 whisper --random 2
    python benchmarks/architectures.py --page       # write the page from what was measured before
"""

from __future__ import annotations

import copy
import json
import logging
import math
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from architecture_list import ARCHITECTURES, Architecture, Fields
from environment import environment
from limited import limited

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # choices and recorder are those of the tests

PAGE = ROOT / "docs" / "results" / "architectures.md"
RESULTS = ROOT / "benchmarks" / "results" / "architectures.json"
CLUSTER, COST, MESHES = "8xh100", "roofline", ("2", "2x2")
TINY_BATCH = 4
TOLERANCE = 1e-6  # as of `shardfold check`: where forward insists on float32, they differ
LIMIT_SECONDS = 900.0
LIMIT_BYTES = 10 * 2**30
SHARED = (  # modules that each process would import, which takes longer than most tiny models do
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch.distributed.checkpoint",
    "torch.export._trace",
    "transformers.models.auto.modeling_auto",
    "transformers.generation.utils",
    "transformers.modeling_layers",
    "transformers.modeling_utils",
    "shardfold.planner.planner",
    "shardfold.runtime.parallelize",
    "shardfold.zoo",
    "tests.distributed.choices",
    "tests.distributed.recorder",
)
# The worst first. A plan whose numbers are right, but not its collectives, is not right.
OUTCOMES = ("raw", "out of memory", "out of time", "wrong", "other collectives", "refused")


@dataclass(frozen=True, slots=True)
class Row:
    """One plan of one tiny model: how far it is from the plain module, and what was said."""

    plan: str
    mesh: str
    apart: float  # largest difference of a loss, a gradient or a buffer, relative
    outcome: str  # "right" or one of OUTCOMES
    told: str = ""


def configuration(known: Architecture, tiny: bool) -> Fields:
    """The fields of a config.json."""
    sizes = {**known.real, **known.tiny} if tiny else known.real
    return {"model_type": known.name, "architectures": [known.class_name], **sizes}


def built(known: Architecture, tiny: bool) -> tuple[Any, Any, Any]:
    """The model by way of its config.json: on meta at its real size, with weights if tiny."""
    from shardfold import zoo

    with tempfile.TemporaryDirectory(prefix="shardfold-") as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(configuration(known, tiny)))
        if tiny:
            return zoo.from_config(str(path), batch=TINY_BATCH, seq=known.tiny_seq, device="cpu")
        return zoo.from_config(str(path), batch=known.batch, seq=known.seq)


def plain(known: Architecture, ours: Any) -> Any:
    """The class as transformers builds it by itself, with the same weights."""
    import transformers

    fields = dict(configuration(known, True))
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    config.use_cache = False
    config._experts_implementation = "eager"
    theirs = copy.copy(ours)
    theirs._modules = {"model": type(ours.model)(config).train()}
    theirs.load_state_dict(ours.state_dict())
    return theirs


def planned(known: Architecture) -> dict[str, Any]:
    """The real size on eight H100s: the plan in numbers, or what was said instead, as "real"."""
    import shardfold as sf

    started = time.perf_counter()
    found: dict[str, Any] = {"outcome": "planned", "told": ""}
    try:
        model, args, kwargs = built(known, tiny=False)
        plan = sf.plan(model, args, kwargs, cluster=CLUSTER, dtype="bf16", cost=COST)
        found |= {
            "parameters": sum(p.numel() for p in model.parameters()),
            "step_seconds": plan.estimate.step_seconds,
            "fits": plan.fits,
        }
    except sf.ShardfoldError as error:
        found |= {"outcome": "refused", "told": str(error)}
    except MemoryError:
        told = f"Planning took more than {LIMIT_BYTES / 2**30:.0f} GiB."
        found |= {"outcome": "out of memory", "told": told}
    except Exception as error:
        found |= {"outcome": "raw", "told": _raw(error)}
    return {"real": {**found, "seconds": time.perf_counter() - started}}


def _raw(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    where = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames))
    last = (str(error).strip().splitlines() or [""])[-1]  # after another process's traceback
    return f"{type(error).__name__}: {last[:300]} ({where})"


Case = tuple[str, str, bytes]  # label, mesh, plan


def cases(model: Any, args: Any, kwargs: Any, mesh: str, random_plans: int) -> list[Case]:
    """The best plan, the two baselines, and random legal ones."""
    from tests.distributed.choices import Chooser

    from shardfold.plans.files import dumps

    processes = math.prod(map(int, mesh.split("x")))
    chooser = Chooser(model, args, kwargs, f"{processes}xcpu", mesh)
    data_parallel, fully_sharded = chooser.baselines()
    named = {"best": chooser.best(), "data parallel": data_parallel, "fully sharded": fully_sharded}
    named |= {f"random {seed}": chooser.random(seed) for seed in range(random_plans)}
    return [(label, mesh, dumps(plan).encode()) for label, plan in named.items()]


class Runner:
    """A tiny model with its program, beside the plain module; made before the processes."""

    wanted: Numbers | None = None  # what plans are held to, once prepared

    def __init__(self, known: Architecture) -> None:
        self.known = known
        self.model, self.args, self.kwargs = built(known, tiny=True)

    def plain(self) -> Any:
        """The module that plans are held against."""
        return plain(self.known, self.model)

    def prepare(self, plan: Any) -> None:
        """Capture the program that all plans of this model share, and what they are held to."""
        from shardfold.runtime.parallelize import prepared
        from shardfold.runtime.ranks import launch

        self.captured = prepared(self.model, plan, self.args, self.kwargs, None, None)
        self.wanted = launch(expected, 1, self, is_fork=True)[0]

    def module(self, plan: Any | None) -> Any:
        """The module under a plan, or on one device."""
        from shardfold.runtime.lower import alone
        from shardfold.runtime.parallelize import Settings, assemble, lowered_here

        program, subdims = self.captured
        lowered = (
            alone(program, subdims) if plan is None else lowered_here(plan, program, subdims, None)
        )
        return assemble(self.model, program, lowered, Settings(float64=True))

    def batches(self) -> list[Any]:
        """Two batches, the second with samples in another order and other numbers."""
        from shardfold.runtime.reference import other_batch

        first = (self.args, self.kwargs)
        return [first, other_batch(first)]


Numbers = dict[str, Any]


def trained(module: Any, batches: list[Any], recording: Any = nullcontext) -> Numbers:
    """Losses of two steps, gradients added up over both, and buffers."""
    found: Numbers = {}
    for number, (args, kwargs) in enumerate(batches):
        with recording() if number == 0 else nullcontext():
            loss = module(*args, **kwargs)
            loss.backward()
        found[f"loss {number}"] = loss.detach()
    keepings = module._run.named()
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            found[f"gradient {name}"] = keepings[name].whole(parameter.grad).to_dense().clone()
    module.gather_buffers()
    return found | {f"buffer {n}": b.detach().clone() for n, b in module.named_buffers()}


def expected(rank: int, runner: Runner) -> Numbers:
    """The same of the plain module, with the random numbers that the program draws."""
    from shardfold.runtime.reference import Reference

    single = runner.module(None)
    reference = Reference(runner.plain(), None)
    found: Numbers = {}
    total: Numbers = {}
    for number, batch in enumerate(runner.batches()):
        single._run.context.drawn = drawn = []
        single(*batch[0], **batch[1])
        single._run.context.drawn = None
        outcome = reference.step([batch], drawn)
        found[f"loss {number}"] = outcome.loss
        for name, gradient in outcome.gradients.items():
            key = f"gradient {name}"
            total[key] = total[key] + gradient if key in total else gradient
    buffers = dict(reference.module.named_buffers())
    return found | total | {f"buffer {n}": outcome.state[n].clone() for n in buffers}


def apart(found: Numbers, wanted: Numbers) -> tuple[float, str]:
    """The largest relative difference, and of what."""
    import torch

    from shardfold.runtime.check import SMALL, beside, difference

    gradients = [g for k, g in wanted.items() if k.startswith("gradient")]
    floor = SMALL * max((float(g.abs().max()) for g in gradients if g.numel()), default=0.0)
    worst = (0.0, "")
    for key in {**found, **wanted}:
        here, there = found.get(key), wanted.get(key)
        if here is None or there is None:  # a gradient of zeros may not be there at all
            other = here if there is None else there
            amount = (
                float(torch.as_tensor(other).abs().max() > 0) * math.inf
                if other is not None
                else 0.0
            )
            amount = 0.0 if amount != amount else amount
        else:
            least = floor if key.startswith("gradient") else 0.0
            if key.startswith("buffer"):
                least = beside(key, {k: t for k, t in wanted.items() if k.startswith("buffer")})
            amount = difference(torch.as_tensor(here), torch.as_tensor(there).to(here.dtype), least)
        worst = max(worst, (amount, key))
    return worst


def job(rank: int, runner: Runner, given: list[Case]) -> list[Row]:
    """Every plan of a model, one after the other; on each process."""
    from shardfold.errors import LostError, ShardfoldError

    rows = []
    for label, mesh, data in given:
        try:
            rows.append(Row(label, mesh, *tried(rank, runner, data)))
        except LostError as error:  # a rank waited in vain
            rows.append(Row(label, mesh, math.inf, "raw", _raw(error)))
            break
        except ShardfoldError as error:
            rows.append(Row(label, mesh, math.inf, "refused", str(error)))
        except Exception as error:
            rows.append(Row(label, mesh, math.inf, "raw", _raw(error)))
            break  # the ranks may no longer be at the same place
    return rows


def tried(rank: int, runner: Runner, data: bytes) -> tuple[float, str, str]:
    """How far a plan is from the plain module, its outcome, and what differs."""
    from tests.distributed import recorder

    from shardfold.plans.files import loads

    plan = loads(data)
    module = runner.module(plan)
    names = tuple(axis.name for axis in plan.mesh)
    ran: Any = None

    @contextmanager
    def recording() -> Iterator[None]:
        nonlocal ran
        with recorder.recorded(module._run.context.groups, names, widened=True) as ran:
            yield
        ran = recorder.by_member(ran, module._run.uses.launched, names, widened=True)

    found = trained(module, runner.batches(), recording)
    if rank:
        return 0.0, "right", ""
    assert runner.wanted is not None
    amount, what = apart(found, runner.wanted)
    if not amount <= TOLERANCE:
        return amount, "wrong", what
    listed = recorder.planned(plan)
    if ran != listed:
        told = f"planned {dict(listed - ran)}, ran {dict(ran - listed)}"
        return amount, "other collectives", told
    return amount, "right", ""


def ran(make: Callable[[], Runner], random_plans: int, meshes: tuple[str, ...]) -> dict[str, Any]:
    """The tiny size under plans of every mesh."""
    from shardfold.errors import LostError, ShardfoldError
    from shardfold.plans.files import loads
    from shardfold.runtime.ranks import launch

    started = time.perf_counter()
    rows: list[Row] = []
    try:
        runner = make()
        for mesh in meshes:
            given = cases(runner.model, runner.args, runner.kwargs, mesh, random_plans)
            if runner.wanted is None:
                runner.prepare(loads(given[0][2]))
            processes = math.prod(map(int, mesh.split("x")))
            rows += launch(job, processes, runner, given, is_fork=True)[0]
        found = judged(rows)
    except LostError as error:  # a rank raised what is no refusal
        found = {"outcome": "raw", "told": _raw(error)}
    except ShardfoldError as error:
        found = {"outcome": "refused", "told": str(error)}
    except Exception as error:
        found = {"outcome": "raw", "told": _raw(error)}
    right = [row.apart for row in rows if row.outcome == "right"]
    return {
        **found,
        "plans": len(rows),
        "outcomes": Counter(row.outcome for row in rows),
        "meshes": meshes,
        "random": random_plans,
        "apart": max(right, default=0.0),
        "seconds": time.perf_counter() - started,
    }


def ran_on_each(
    make: Callable[[], Runner], random_plans: int, meshes: tuple[str, ...]
) -> dict[str, Any]:
    """The same by mesh; the model is made and captured once."""
    once = cache(make)
    return {mesh: ran(once, random_plans, (mesh,)) for mesh in meshes}


def judged(rows: list[Row]) -> dict[str, str]:
    """The worst outcome of a model's plans, and what was said of the first that had it."""
    there = {row.outcome for row in rows}
    worst = next((outcome for outcome in OUTCOMES if outcome in there), "right")
    told = next((f"{r.plan} on {r.mesh}: {r.told}" for r in rows if r.outcome == worst), "")
    return {"outcome": worst, "told": "" if worst == "right" else told}


def within(seconds: float, parts: tuple[str, ...], function: Any, *args: Any) -> dict[str, Any]:
    """What a function finds of each part in a process of its own, or that it had no time for it."""
    try:
        found: dict[str, Any] = limited(seconds, LIMIT_BYTES, function, *args)
        return found
    except TimeoutError as error:
        lost = {"outcome": "out of time", "told": str(error)}
    except RuntimeError as error:
        lost = {"outcome": "raw", "told": str(error)}
    nothing = {"plans": 0, "outcomes": {}, "meshes": (), "random": 0, "apart": 0.0}
    return {part: {**lost, **nothing, "seconds": seconds} for part in parts}


def line(name: str, result: Mapping[str, Any]) -> str:
    """An architecture as a line of the terminal."""
    cells = [f"{name:30}"]
    for part, found in result.items():
        cells.append(f"{part} {found['outcome']:8} {found['seconds']:5.0f} s")
        if found.get("plans"):
            cells.append(f"{found['plans']:3} plans, {found['apart']:.0e} apart")
    told = [found["told"] for found in result.values() if found["told"]]
    return "  ".join(cells) + "".join(f"\n    {each.splitlines()[0][:300]}" for each in told)


def counted(results: Mapping[str, Any], part: str) -> str:
    """How many had which outcome, in words."""
    found = Counter(each[part]["outcome"] for each in results.values() if part in each)
    order = ("planned", "right", *reversed(OUTCOMES))
    return ", ".join(f"{found[outcome]} {outcome}" for outcome in order if found[outcome])


def by_plan(tinies: list[Mapping[str, Any]]) -> str:
    """How many plans had which outcome, in words."""
    found: Counter[str] = Counter()
    for tiny in tinies:
        found.update(tiny["outcomes"])
    return ", ".join(f"{found[outcome]} {outcome}" for outcome in ("right", *reversed(OUTCOMES)))


def spread(numbers: list[int]) -> str:
    """The least and the most, in words."""
    least, most = min(numbers, default=0), max(numbers, default=0)
    return str(most) if least == most else f"{least} to {most}"


def _tiny_cell(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "not run"
    return f"{found['outcome']}, {found['plans']} plans" if found["plans"] else found["outcome"]


def _differences(found: Mapping[str, Any]) -> list[float]:
    return [found[mesh]["apart"] for mesh in MESHES if mesh in found and found[mesh]["plans"]]


def page(stored: Mapping[str, Any]) -> str:
    """The results as a page."""
    results, facts = stored["architectures"], stored["environment"]
    tinies = [each[mesh] for each in results.values() for mesh in MESHES if mesh in each]
    lines, told = [], []
    for known in ARCHITECTURES:
        found = results.get(known.name, {})
        real = found.get("real")
        size = f"{real['parameters'] / 1e9:.2f}" if real and "parameters" in real else ""
        step = f"{real['step_seconds'] * 1e3:.0f}" if real and "step_seconds" in real else ""
        cells = (
            f"`{known.class_name}`",
            known.kind,
            size,
            real["outcome"] if real else "not tried",
            f"{real['seconds']:.0f}" if real else "",
            step,
            *(_tiny_cell(found.get(mesh)) for mesh in MESHES),
            f"{max(apart):.0e}" if (apart := _differences(found)) else "",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
        said: dict[str, list[str]] = {}  # by what it is: most are told by all parts alike
        for part in ("real", *MESHES):
            if part in found and found[part]["told"]:
                words = " ".join(found[part]["told"].split())
                said.setdefault(words, []).append("real size" if part == "real" else part)
        told += [f"- `{known.class_name}`, {', '.join(n)}: {words}" for words, n in said.items()]
    return PAGE_TEXT.format(
        table="\n".join(lines),
        told="\n".join(told) or "Nothing.",
        planned=counted(results, "real") or "none tried",
        runs="; ".join(f"on {mesh} {counted(results, mesh) or 'none run'}" for mesh in MESHES),
        plans=sum(found["plans"] for found in tinies),
        by_plan=by_plan(tinies),
        random=spread([found["random"] for found in tinies]),
        **{k: facts[k] for k in ("date", "processor", "cores", "python", "torch", "transformers")},
    )


PAGE_TEXT = """# Sixty architectures of Hugging Face transformers

Each is a `config.json`, built as [`hf:config.json`](../how-to/hugging-face.md) builds it. The list
of classes was written down before any of them was tried; afterwards LayerDrop was set to 0 for
M2M-100, Qwen2-VL was given 4 images instead of 16, the tiny Switch no dropout (on one device it is
drawn for the rows that an expert has, in a plan for all), and some tiny sizes were corrected. What
is not measured yet says so. Seconds are those of the clock, on two cores that others kept busy:
planning Mamba takes 105 s of the processor.

- **Real size**: on the meta device, planned for 8 H100s in bf16, by roofline prices. {planned}.
- **Tiny**: run on gloo processes in float64 under the best plan, data parallel, fully sharded and
  random plans on each mesh ({plans} plans in all; random ones {random} a mesh). Two steps on
  different batches are held against the class as transformers builds it by itself, run eagerly:
  losses, gradients added up over both steps, buffers (largest difference, relative; the limit is
  1e-6). The collectives that ran are held against those planned. Of the architectures,
  {runs}.
  Of the plans, {by_plan}. (*Refused*: by the runner, after the planner had offered it. *Other
  collectives*: the numbers are right, but other collectives ran than planned.)

| class | kind | billion parameters | real size | planned in s | step, ms | on 2 | on 2x2 | apart |
|---|---|---:|---|---:|---:|---|---|---:|
{table}

## What was said of the others

{told}

Measured from 2026-11-16 to {date} (the eight that take longest to plan: by 2026-11-18), on a
machine busy with other work: {processor}, {cores} cores, Python {python}, torch {torch},
transformers {transformers}.
Again: `python benchmarks/architectures.py --out benchmarks/results/architectures.json`.
"""


def is_left(found: Mapping[str, Any] | None, random_plans: int) -> bool:
    """Whether a part was not measured, or under fewer random plans than are asked for."""
    return found is None or found.get("random", random_plans) < random_plans


def write_json(path: Path, results: Mapping[str, Any]) -> None:
    """Replace the file at once: a run that is stopped meanwhile leaves it whole."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(results, indent=1) + "\n")
    fresh.replace(path)


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--random", "random_plans", default=10, show_default=True, help="Plans of each mesh.")
@click.option("--mesh", "meshes", multiple=True, default=MESHES, show_default=True)
@click.option("--limit", default=LIMIT_SECONDS, show_default=True, help="Seconds a model and part.")
@click.option("--only", type=click.Choice(["real", "tiny"]), help="Plan only, or run only.")
@click.option("--out", type=click.Path(dir_okay=False), help="Write results as JSON; add to them.")
@click.option("--again", is_flag=True, help="Also what the file has under so many random plans.")
@click.option("--page", "write", is_flag=True, help="Write the page from the stored results.")
def main(
    names: tuple[str, ...],
    random_plans: int,
    meshes: tuple[str, ...],
    limit: float,
    only: str | None,
    out: str | None,
    again: bool,
    write: bool,
) -> None:
    """Plan and run each architecture, and print a line for it."""
    if write:
        PAGE.write_text(page(json.loads(RESULTS.read_text())))
        return
    warnings.simplefilter("ignore")
    for name in ("torch", "torch.distributed.tensor._redistribute", "transformers"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    for name in SHARED:
        import_module(name)  # before any process is forked
    facts = {**environment(), "torch": version("torch"), "transformers": version("transformers")}
    click.echo(", ".join(f"{key} {value}" for key, value in facts.items()))
    stored: dict[str, Any] = {}
    if out and Path(out).exists():
        stored = json.loads(Path(out).read_text())["architectures"]
    for known in ARCHITECTURES:
        if names and known.name not in names:
            continue
        result = stored.setdefault(known.name, {})
        for parts in (() if only == "tiny" else ("real",), () if only == "real" else meshes):
            left = tuple(p for p in parts if again or is_left(result.get(p), random_plans))
            if not left:
                continue
            work = (ran_on_each, partial(Runner, known), random_plans, left)
            result |= within(limit, left, *((planned, known) if left == ("real",) else work))
            if out:  # after each, so that a long run that is cut short leaves what it has
                write_json(Path(out), {"environment": facts, "architectures": stored})
        click.echo(line(known.name, result))


if __name__ == "__main__":
    main()
