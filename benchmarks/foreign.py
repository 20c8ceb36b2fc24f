"""Predictions for models that nobody tuned for: their steps on a GPU, and how far off.

The cases (`foreign_cases.py`) were written down before the first of them was measured. Each is a
transformers class with a loss in a size of its own, in bfloat16 with AdamW, eager (and compiled,
from the third set on), and is predicted by its estimate on one device: with `--cost kernels`, and
with a profile of the device's kernels.

    python benchmarks/foreign.py measure --out benchmarks/results/foreign-h200.json
    python benchmarks/foreign.py measure --set second \
        --out benchmarks/results/foreign-h200-second.json
    python benchmarks/foreign.py measure --set third \
        --out benchmarks/results/foreign-h200-third.json
    python benchmarks/foreign.py measure --set fourth \
        --out benchmarks/results/foreign-h200-fourth.json
    python benchmarks/foreign.py measure --set fifth \
        --out benchmarks/results/foreign-h200-fifth.json
    python benchmarks/foreign.py measure --set fifth --ours --only LongT5,BigBirdForMasked \
        --out benchmarks/results/foreign-h200-ours.json
    python benchmarks/foreign.py predict benchmarks/results/foreign-h200.json \
        --profile benchmarks/profiles/h200.json --page
    python benchmarks/foreign.py page
"""

from __future__ import annotations

import gc
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from environment import environment
from foreign_cases import SETS, Case

WARM, STEPS = 4, 15
TRIES, SPARE_SECONDS, READY = 8, 20.0, "ready"
PAGE = Path("docs/results/foreign.md")
RESULTS = {
    name: Path(f"benchmarks/results/foreign-h200{suffix}.json")
    for name, suffix in (
        *(("first", ""), ("second", "-second")),
        *(
            ("third", "-third"),
            ("fourth", "-fourth"),
            ("fifth", "-fifth"),
            ("ours", "-ours"),
            ("compiled", "-compiled"),
        ),
    )
}
Columns = Sequence[tuple[str, str]]
CLUSTER = "1xh200"


def built(case: Case, device: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The module with its batch on a device."""
    import transformers

    from shardfold.cli.model import load_model

    config = getattr(transformers, case.config)(**case.sizes)
    plain = {**config.to_dict(), "architectures": [case.kind]}
    sizes = {"batch": case.batch, "seq": case.seq, "layers": None, "hidden": None}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(plain, default=str))
        example = load_model(f"hf:{path}", sizes, device)
    return example.module, example.args, example.kwargs


class Steps:
    """Training steps of one module on the GPU, plain or compiled."""

    def __init__(self, case: Case) -> None:
        import torch

        def half(value: Any) -> Any:
            is_real = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.to(torch.bfloat16) if is_real else value

        module, args, kwargs = built(case, "cuda")
        self.module = module.to("cuda", torch.bfloat16).train()
        self.compiled = torch.compile(self.module, dynamic=False)
        self.args = tuple(map(half, args))
        self.kwargs = {name: half(value) for name, value in kwargs.items()}
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-5)

    def step(self, module: Any) -> float:
        """One step, in seconds."""
        import torch

        torch.cuda.synchronize()
        start = time.perf_counter()
        module(*self.args, **self.kwargs).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def measured(self, module: Any) -> tuple[list[float], int]:
        """The seconds of some steps, and the most memory."""
        import torch

        gc.collect()
        torch.cuda.empty_cache()
        for _ in range(WARM):
            self.step(module)
        torch.cuda.reset_peak_memory_stats()
        times = [self.step(module) for _ in range(STEPS)]
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.empty_cache()
        return times, peak

    def warm_up(self) -> None:
        """Compile, beside others that do: whoever finds no memory tries again."""
        import torch

        for left in range(TRIES, 0, -1):
            try:
                self.step(self.compiled)
                break
            except torch.cuda.OutOfMemoryError:
                if left == 1:
                    raise
                self.optimizer.zero_grad(set_to_none=True)
                gc.collect()
                torch.cuda.empty_cache()
                time.sleep(3)
        torch.cuda.empty_cache()


def measured(case: Case, wait: Callable[[], None], ours: bool) -> dict[str, Any]:
    """The median step and the peak, plain and compiled, or plain and ours; timed after `wait`."""
    steps = Steps(case)
    if ours:
        return _beside(steps, wait)
    found: dict[str, Any] = {}
    try:
        steps.warm_up()
    except Exception as error:
        found["compile_error"] = f"{type(error).__name__}: {str(error)[:300]}"
    wait()
    times, peak = steps.measured(steps.module)
    found |= {
        "step_seconds": statistics.median(times),
        "all_seconds": [round(t, 6) for t in times],
        "peak_bytes": peak,
        "parameters": sum(p.numel() for p in steps.module.parameters()),
    }
    if "compile_error" not in found:
        times, peak = steps.measured(steps.compiled)
        found["compiled_seconds"], found["compiled_bytes"] = statistics.median(times), peak
        found["all_compiled_seconds"] = [round(t, 6) for t in times]
    return found


def _beside(steps: Steps, wait: Callable[[], None]) -> dict[str, Any]:
    """The plain module's step, and that of the same module under a plan of one device."""
    import torch

    import shardfold as sf

    given = (steps.args, steps.kwargs)
    plan = sf.plan(steps.module, *given, cluster=CLUSTER, precision="bf16", pipeline="off")
    wait()
    times, peak = steps.measured(steps.module)
    found = {"step_seconds": statistics.median(times), "peak_bytes": peak}
    module = sf.parallelize(steps.module, plan, *given)
    steps.module.to("cpu")
    steps.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5)
    times, peak = steps.measured(module)
    found |= {"ours_seconds": statistics.median(times), "ours_bytes": peak}
    estimate = plan.estimate
    return found | {"planned_seconds": estimate.step_seconds, "planned_bytes": estimate.peak_bytes}


def predicted(case: Case, profile: str | None, row: dict[str, Any], pace: float) -> dict[str, Any]:
    """The estimates of one device's step: by the datasheet, at the host's pace, by a profile."""
    from shardfold.api import Planner

    module, args, kwargs = built(case, "meta")
    planner = Planner(module, args, kwargs, cluster=CLUSTER, precision="bf16")

    def estimated(**given: Any) -> Any:
        return planner.estimate("dp=1", beside_plan=False, **given)

    one = estimated()
    found = {"default_seconds": one.step_seconds, "predicted_bytes": one.peak_bytes}
    if pace != 1.0:
        found["paced_seconds"] = estimated(host_pace=pace).step_seconds
    if profile is not None:
        found["profile_seconds"] = estimated(profile=profile).step_seconds
    if "compiled_seconds" in row:
        one = estimated(compile=True)
        found["compiled_default_seconds"] = one.step_seconds
        found["compiled_predicted_bytes"] = one.peak_bytes
        paced = estimated(compile=True, host_pace=pace)
        found["compiled_paced_seconds"] = paced.step_seconds
    return found


@click.group(help=__doc__)
def main() -> None:
    """Cases outside the zoo."""


@main.command("measure")
@click.option("--out", required=True, help="The JSON to write, after each case anew.")
@click.option("--set", "chosen", type=click.Choice(list(SETS)), default="first")
@click.option("--workers", default=9, help="Processes that build and compile side by side.")
@click.option("--minutes", default=8.5, help="When they are over, no further case is begun.")
@click.option("--ours", is_flag=True, help="Under a plan of one device, in place of compiled.")
@click.option("--only", default="", help="Cases whose name contains one of these, by commas.")
def measure(out: str, chosen: str, workers: int, minutes: float, ours: bool, only: str) -> None:
    """Measure every case on this machine's GPU; those that the file has are left alone.

    Cases are built and compiled by several processes at a time, and timed one by one, while the
    others wait. The pace of the host is measured before and after.
    """
    document: dict[str, Any] = {"environment": {}, "host_pace": [], "rows": []}
    if Path(out).exists():
        document = json.loads(Path(out).read_text())
    known = {row["name"] for row in document["rows"]}
    document["environment"] = {**environment(), **_versions()}
    document["host_pace"].append(_asked("pace"))
    left = [
        k
        for k, case in enumerate(SETS[chosen])
        if case.name not in known and any(part in case.name for part in only.split(","))
    ]
    over = time.monotonic() + 60 * minutes
    while left and time.monotonic() < over:
        batch, left = left[:workers], left[workers:]
        for row in _rows_of(chosen, batch, over, ours):
            document["rows"].append(row)
            click.echo(json.dumps({k: v for k, v in row.items() if not k.startswith("all_")}))
            Path(out).write_text(json.dumps(document, indent=1) + "\n")
    document["host_pace"].append(_asked("pace"))
    Path(out).write_text(json.dumps(document, indent=1) + "\n")
    click.echo(
        f"{len(document['rows'])} of {len(SETS[chosen])} cases, pace {document['host_pace']}"
    )


def _versions() -> dict[str, str]:
    import torch
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}


def _started(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "4"},
    )


def _asked(*words: str) -> Any:
    """What another process prints last."""
    found, _ = _started(*words).communicate()
    return json.loads(found.strip().splitlines()[-1])


def _rows_of(chosen: str, cases: list[int], over: float, ours: bool) -> Iterator[dict[str, Any]]:
    """The rows of some cases: all get ready, then each in turn is told to go on."""
    words = ["--ours"] if ours else []
    processes = [_started("worker", chosen, str(k), *words) for k in cases]
    ready = {k: _line_of(each, over) for k, each in zip(cases, processes, strict=True)}
    for k, each in zip(cases, processes, strict=True):
        name, line = SETS[chosen][k].name, ready[k]
        if line == READY and each.stdin is not None:
            each.stdin.write("go\n")
            each.stdin.flush()
            line = _line_of(each, over + SPARE_SECONDS)
        each.kill()
        row = json.loads(line) if line.startswith("{") else {"error": line or "no answer in time"}
        yield {"name": name, **row}


def _line_of(process: subprocess.Popen[str], until: float) -> str:
    """The next line of a process, or nothing when time is over."""
    seconds = max(0.0, until - time.monotonic())
    if process.stdout is None or not select.select([process.stdout], [], [], seconds)[0]:
        return ""
    return process.stdout.readline().strip()


@main.command("worker", hidden=True)
@click.argument("chosen")
@click.argument("number", type=int)
@click.option("--ours", is_flag=True)
def worker(chosen: str, number: int, ours: bool) -> None:
    """Get ready to measure one case, say so, wait for a word, and print its row."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is no answer

    def wait() -> None:
        print(READY, file=answers, flush=True)
        sys.stdin.readline()

    try:
        row = measured(SETS[chosen][number], wait, ours)
    except Exception as error:  # the others go on, and this one is told
        row = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    print(json.dumps(row), file=answers, flush=True)


@main.command("pace", hidden=True)
def pace() -> None:
    """The host's seconds for a block of operators, forward and backward."""
    import torch

    from shardfold.calibrate.host import Pace

    found = Pace("cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16)
    found.now()
    print(json.dumps(found.now()))


@main.command("predict")
@click.argument("file")
@click.option("--profile", help="A profile of the device, to be held beside its datasheet.")
@click.option("--only", help="Cases whose name contains this.")
@click.option("--page", is_flag=True, help="Keep the predictions, for the page.")
def predict(file: str, profile: str | None, only: str | None, page: bool) -> None:
    """Hold predictions beside what was measured."""
    document = json.loads(Path(file).read_text())
    _check_version(document["environment"])
    known = {row["name"]: row for row in document["rows"]}
    cases = {case.name: case for chosen in SETS.values() for case in chosen}
    rows = [row for name, row in known.items() if not only or only in name]
    pace = _pace(document)
    for row in rows:
        if "error" not in row:
            try:
                row.update(predicted(cases[row["name"]], profile, row, pace))
            except Exception as error:
                row["refused"] = f"{type(error).__name__}: {str(error)[:200]}"
        click.echo(_line(row))
        if page:
            Path(file).write_text(json.dumps(document, indent=1) + "\n")
    click.echo(_summary(rows))


def _check_version(environment: dict[str, Any]) -> None:
    """The model that is predicted is the one that was measured: versions compute otherwise."""
    import transformers

    then, now = environment.get("transformers", transformers.__version__), transformers.__version__
    if then != now:
        raise click.ClickException(f"measured with transformers {then}; predict with it, not {now}")


@main.command("page")
def write_page() -> None:
    """Write docs/results/foreign.md from the files of all sets."""
    PAGE.write_text(page_of({k: json.loads(each.read_text()) for k, each in RESULTS.items()}))


def _pace(document: dict[str, Any]) -> float:
    """The median pace of the host, of which it was measured before and after."""
    from shardfold.calibrate.host import pace_by

    paces = [pace_by(block) for block in document.get("host_pace", ())]
    return statistics.mean(paces) if paces else 1.0


EAGER = (
    ("default_seconds", "step_seconds"),
    ("paced_seconds", "step_seconds"),
    ("profile_seconds", "step_seconds"),
    ("predicted_bytes", "peak_bytes"),
)
COMPILED_COLUMNS = (
    ("compiled_default_seconds", "compiled_seconds"),
    ("compiled_paced_seconds", "compiled_seconds"),
    ("compiled_predicted_bytes", "compiled_bytes"),
)
OURS_COLUMNS = (("planned_seconds", "ours_seconds"),)
COLUMNS = (*EAGER, *COMPILED_COLUMNS, *OURS_COLUMNS)
BARS = {
    "planned_seconds": ("step under shardfold, default model", (0.1, 0.2)),
    "default_seconds": ("step, default model", (0.1, 0.2)),
    "paced_seconds": ("step, default model at the host's own pace", (0.1, 0.2)),
    "profile_seconds": ("step, by a profile", (0.1, 0.2)),
    "predicted_bytes": ("peak", (0.03, 0.06)),
    "compiled_default_seconds": ("compiled step, default model", (0.1, 0.2)),
    "compiled_paced_seconds": ("compiled step, at the host's own pace", (0.1, 0.2)),
    "compiled_predicted_bytes": ("compiled peak", (0.03, 0.06)),
}


def _error(row: dict[str, Any], found: str, truth: str) -> float | None:
    return row[found] / row[truth] - 1 if found in row and truth in row else None


def _cells(row: dict[str, Any], columns: Columns) -> str:
    errors = (_error(row, *pair) for pair in columns)
    return " | ".join("-" if e is None else f"{e:+.1%}" for e in errors)


def _told(row: dict[str, Any]) -> str:
    """Why there are no figures, in a line."""
    texts = (row.get(key) for key in ("error", "refused", "compile_error"))
    return next((text.splitlines()[0] for text in texts if text), "")


def _line(row: dict[str, Any]) -> str:
    """A row of the table of eager steps."""
    if "error" in row or "refused" in row:
        return f"| {row['name']} | {_told(row)} | | | | | |"
    step, peak = row["step_seconds"] * 1e3, row["peak_bytes"] / 2**30
    timed, held = _cells(row, EAGER[:3]), _cells(row, EAGER[3:])
    return f"| {row['name']} | {step:.1f} ms | {timed} | {peak:.1f} GiB | {held} |"


def _compiled_line(row: dict[str, Any]) -> str:
    if "compiled_seconds" not in row:
        return f"| {row['name']} | {_told(row)} | | | | |"
    step, peak = row["compiled_seconds"] * 1e3, row["compiled_bytes"] / 2**30
    timed, held = _cells(row, COMPILED_COLUMNS[:2]), _cells(row, COMPILED_COLUMNS[2:])
    return f"| {row['name']} | {step:.1f} ms | {timed} | {peak:.1f} GiB | {held} |"


def _line_of_ours(row: dict[str, Any]) -> str:
    plain, ours = row["step_seconds"], row["ours_seconds"]
    cells = (f"{plain * 1e3:.1f} ms", f"{ours * 1e3:.1f} ms", f"{ours / plain:.2f}")
    return f"| {row['name']} | {' | '.join(cells)} | {_cells(row, OURS_COLUMNS)} |"


def _summary(rows: list[dict[str, Any]]) -> str:
    lines = []
    for pair in COLUMNS:
        what, bars = BARS[pair[0]]
        found = [abs(e) for e in (_error(row, *pair) for row in rows) if e is not None]
        if found:
            within = ", ".join(f"{sum(e <= bar for e in found)} within {bar:.0%}" for bar in bars)
            middle = statistics.median(found)
            lines.append(f"- {what}: {len(found)} cases, median {middle:.1%}, {within}")
    return "\n".join(lines)


HEAD = """# Models that nobody tuned for

Plain steps (bfloat16, AdamW) of transformers models outside the zoo, on one H200, beside the
estimate of one device's step: with the default cost model, which knows the device's datasheet only,
and with a profile of its kernels. The cases of each set were chosen and written down before the
first of them was measured (`benchmarks/foreign.py`). The host is another in every set: models of
many short operators take its time, and it was twice as fast in one run as in another.
"""
SAID = {
    "fifth": """Eager and compiled, with a host's pace of {pace}. Chosen after kernels of the steps
of 45 models of the sets below had been timed on an H200 and prices mended by class: what is read
across rows or converted on the way, convolutions of few channels, of one point and with channels
last, small planes and channels last in batch norm, gradients of tables and of narrow layer norms,
resized planes, losses over planes. Predicted with nothing changed since it was measured. Three
cases have more positions than their tables; three were not ready in time.

Language models with long kernels are within 6%; what is far off are steps of many short operators,
which wait for the host: the plain module's Python (modules, hooks, masks) is not priced, as what is
predicted is shardfold's own step, which runs one function. GraniteSWA and Doge were not
looked into.
""",
    "ours": """The plain module and the same under a plan of one device, eager, in one run, with a
host's pace of {pace}: what is predicted is the step under shardfold. It calls one function, so
that a model of many short operators waits less for the host (BigBird). Attention with dropout runs
a kernel of shardfold's own, which draws its numbers by position and is slower than PyTorch's
(RoBERTa with dropout in attention; the step took 2.75 times as long as the plain one before there
was that kernel).
""",
    "fourth": """Eager and compiled, with a host's pace of {pace}. The GPU was lent for four
minutes: the first 18 of 34 cases, in the order in which they were written down, of which two did
not compile in time. Predicted with what stood before it was seen, and with the version of
transformers that was measured (the sets below were predicted with 5.22 where 5.17 was measured;
some classes compute otherwise in the two).

Likely causes of the large errors: a window of 4,096 at 4,096 tokens is a causal mask that
transformers builds and shardfold proves and drops, so what is predicted is another, faster program
than the plain module that was timed (Ministral, Olmo 3; not measured under shardfold); convolutions
in groups over one dim (SqueezeBERT) and steps that wait for the host (XLM, Data2Vec) are priced too
low.

Since then the rules of inductor's partitioner were read, and what is kept was held to what it keeps
on a CPU. With them, and nothing fitted, compiled peaks are within 3% in 7 and within 6% in 13 of
the 16 (median 3.1%), and in 25 and 27 of the 35 of the third set (median 1.3%). Compiled steps
moved by a point. The tables are as they were.
""",
    "first": """Some classes were mended after this set had been seen, and for them it is fresh no
more: attention that broadcasts the heads of its keys (Falcon), batch norm of few channels
(MobileNetV2), depthwise convolutions and where channels lie (ConvNeXt V2), what a batched product
is added to (Bloom), the pace of the host, and the workspace of products.
""",
    "second": """Chosen after all of that, and predicted with nothing changed since it was measured.
""",
    "third": """Eager and compiled (`torch.compile`, default mode), measured in one run with the
pace of its own host, which is the mean of {pace} (1 is the default). Predicted with what stood
before it was seen. Models were compiled nine at a time, and inductor chooses some kernels by timing
them: what it chose may be another in a run of its own.

What is compiled is the plain module. Likely causes of the large errors, of which none was looked
into: a forward that breaks the graph runs in pieces, with about the peak of its eager step, which
is not what is priced (the BART family branches on a random number in every layer); small compiled
models wait for the host, of which a kernel takes more than is priced (PVT, Hubert, Chinese CLIP);
depthwise convolutions run with channels last when they are compiled (MobileNet V1, 4.5 times as
fast as eager); where parameters outweigh activations the peak is at the update, whose temporary
copy was not counted then (Blenderbot). CTRL failed on the device.
""",
    "compiled": """The models that the two constants of [compiled steps](../explanation/costs.md)
were read off, but for BART, whose compiled step is not understood: no test of anything.
""",
}
TITLES = {
    "fifth": "The fifth set",
    "ours": "Under shardfold",
    "fourth": "The fourth set",
    "third": "The third set",
    "second": "The second set",
    "first": "The first set",
    "compiled": "Compiled models that prices were read off",
}
TABLE = (
    "| eager | measured | default | own pace | profile | peak | predicted |\n"
    "|---|--:|--:|--:|--:|--:|--:|\n"
)
OURS_TABLE = "| eager | plain | under shardfold | ratio | predicted |\n|---|--:|--:|--:|--:|\n"
COMPILED_TABLE = (
    "| compiled | measured | default | own pace | peak | predicted |\n|---|--:|--:|--:|--:|--:|\n"
)


def page_of(sets: dict[str, dict[str, Any]]) -> str:
    """The page of all sets, the freshest first."""
    from shardfold.calibrate.host import pace_by

    parts = [HEAD]
    for name, title in TITLES.items():
        each = sets[name]
        place = "".join(f"- {k}: {v}\n" for k, v in each["environment"].items())
        paces = " and ".join(f"{pace_by(block):.2f}" for block in each.get("host_pace", ()))
        if name == "ours":
            body = OURS_TABLE + "\n".join(map(_line_of_ours, each["rows"]))
        else:
            body = TABLE + "\n".join(_line(row) for row in each["rows"])
        if any("compiled_seconds" in row for row in each["rows"]):
            body += "\n\n" + COMPILED_TABLE + "\n".join(map(_compiled_line, each["rows"]))
        said = SAID[name].format(pace=paces)
        parts.append(
            f"## {title}\n\n{said}\n{_summary(each['rows'])}\n\n{body}\n\nMeasured on:\n\n{place}"
        )
    return "\n".join(parts)


if __name__ == "__main__":
    main()
