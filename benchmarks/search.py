"""How fast the search is, against a plain elimination, an integer program and PaSE's own code.

    python benchmarks/search.py [FOLDER OF .npz FILES] [--only SECTION ...] [--quick]

Everything is compared in one run on one machine. The files are optional: chains, dense blocks and
random graphs are made from seeds. Files of PaSE's own tables are named MODEL_pDEVICES.npz and may
hold the reference's optimum as `ref_cost`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from environment import environment
from plain_elimination import plain_elimination
from search_figure import draw
from search_problems import dense_block, encoder_chain, falling_bytes, random_graph
from shardfold.errors import ShardfoldError
from shardfold.search import ORDERS, Problem, Solution, read_problem, solve
from shardfold.search.elimination import factors_of, forecast
from shardfold.search.ilp import ilp

# Search seconds of PaSE's published code on a 2-core machine, one core used; None: over 600 s.
# The Transformer at 64 devices is the paper's own figure (31:23).
REFERENCE_SECONDS = {
    "alexnet_p4": 0.12, "alexnet_p8": 0.15, "alexnet_p32": 0.39, "alexnet_p64": 0.53,
    "rnnlm_p4": 0.04, "rnnlm_p8": 0.08, "rnnlm_p32": 0.17, "rnnlm_p64": 0.33,
    "resnet101_p4": 20.0, "resnet101_p8": 26.0, "resnet101_p32": 584.0, "resnet101_p64": None,
    "inception3_p4": 10.0, "inception3_p8": 17.0, "inception3_p32": 72.0, "inception3_p64": 198.0,
    "transformer_p4": 16.0, "transformer_p8": 54.0, "transformer_p32": None,
    "transformer_p64": 1883.0,
}  # fmt: skip


Sections = dict[str, Callable[[], object]]


def timed(call: Callable[[], object], repeats: int) -> tuple[float, object]:
    """Least processor seconds of `call`, after one call to warm up, and what it returned.

    Everything compared here uses one thread; processor time leaves out what else the machine did,
    and the least leaves out most of what that did to the caches.
    """
    result = call()
    return min(_seconds(call) for _ in range(repeats)), result


def _seconds(call: Callable[[], object]) -> float:
    begin = time.process_time()
    call()
    return time.process_time() - begin


def timed_beside(
    call: Callable[[], object], other: Callable[[], object], repeats: int
) -> tuple[float, float]:
    """The same of two calls in turns, so that a disturbance meets both; a slow one goes once."""
    seconds, others = [_seconds(call)], [_seconds(other)]
    for _ in range(repeats):
        seconds.append(_seconds(call))
        if others[0] < 1:
            others.append(_seconds(other))
    return min(seconds), min(others)


def on_files(folder: Path, repeats: int) -> list[dict[str, object]]:
    """Every file: exact search against the stated optimum, the reference and plain elimination."""
    rows = []
    for path in sorted(folder.glob("*.npz"), key=_by_model_and_size):
        begin = time.perf_counter()
        problem = read_problem(path)
        read_seconds = time.perf_counter() - begin
        solution, (plain_cost, _) = solve(problem), plain_elimination(problem)
        seconds, plain_seconds = timed_beside(
            lambda p=problem: solve(p), lambda p=problem: plain_elimination(p), repeats
        )
        stated = _stated_optimum(path)
        reference = REFERENCE_SECONDS.get(path.stem)
        rows.append(
            {
                "problem": path.stem,
                "vertices": len(problem),
                "most_choices": int(problem.sizes.max(initial=0)),
                "cost": solution.cost,
                "optimal": solution.is_optimal,
                "reference_cost": stated,
                "agrees": None if stated is None else abs(solution.cost / stated - 1) <= 1e-9,
                "agrees_with_plain": abs(solution.cost / plain_cost - 1) <= 1e-9,
                "read_seconds": read_seconds,
                "seconds": seconds,
                "plain_seconds": plain_seconds,
                "times_plain": plain_seconds / seconds,
                "reference_seconds": reference,
                "times_reference": None if reference is None else reference / seconds,
                "largest_table": solution.statistics.largest_table,
                "peak_bytes": solution.statistics.peak_bytes,
            }
        )
        print(_line(rows[-1]), flush=True)
    return rows


def _by_model_and_size(path: Path) -> tuple[str, int]:
    model, _, devices = path.stem.partition("_p")
    return model, int(devices) if devices.isdigit() else 0


def _stated_optimum(path: Path) -> float | None:
    with np.load(path, allow_pickle=False) as arrays:
        cost = float(arrays["ref_cost"]) if "ref_cost" in arrays.files else float("nan")
    return cost if np.isfinite(cost) else None


def _line(row: dict[str, object]) -> str:
    reference = row["times_reference"]
    beside = f"{reference:>9,.0f}x reference" if isinstance(reference, float) else ""
    return (
        f"{row['problem']:>18}  {1e3 * row['seconds']:8.2f} ms  "
        f"{row['times_plain']:6.1f}x plain  {beside:>20}  optimal {row['optimal']}"
    )


def on_orders(folder: Path) -> list[dict[str, object]]:
    """Predicted tables and work of every order, without folding, on the largest files."""
    rows = []
    for path in sorted(folder.glob("*_p64.npz")):
        factors = factors_of(read_problem(path))
        for order in ORDERS:
            plan = forecast(factors, order)
            rows.append(
                {
                    "problem": path.stem,
                    "order": order,
                    "takes": plan.name,
                    "largest_table": plan.largest,
                    "joint_entries": plan.work,
                }
            )
    return rows


def on_methods(files: Iterable[Path]) -> list[dict[str, object]]:
    """Time and gap to the optimum of every other method; MCMC starts from data parallelism."""
    rows = []
    for path in files:
        problem = read_problem(path)
        best = solve(problem)
        for method in ("breadth-first", "mcmc", "greedy", "random"):
            try:
                solution = solve(problem, method=method, start=data_parallel(path))
            except ShardfoldError as error:
                rows.append({"problem": path.stem, "method": method, "error": str(error)})
                continue
            rows.append(
                {
                    "problem": path.stem,
                    "method": method,
                    "seconds": solution.statistics.seconds,
                    "above_optimum": solution.cost / best.cost - 1,
                }
            )
            print(
                f"{path.stem:>18}  {method:>13}  {solution.statistics.seconds:8.3f} s  "
                f"{rows[-1]['above_optimum']:+.2%}",
                flush=True,
            )
        plan = data_parallel(path)
        if plan is not None:
            above = problem.total(plan) / best.cost - 1
            rows.append({"problem": path.stem, "method": "data parallel", "above_optimum": above})
    return rows


def data_parallel(path: Path) -> list[int] | None:
    """The choice that splits every vertex's first dimension, the batch, the most and no other."""
    with np.load(path, allow_pickle=False) as arrays:
        if "cfg_of" not in arrays.files:
            return None
        tables = [arrays[f"C{number}"] for number in arrays["cfg_of"].tolist()]
    plan = []
    for rows in tables:
        only_batch = (rows[:, 1:] == 1).all(axis=1)
        plan.append(int(np.argmax(np.where(only_batch, rows[:, 0], 0))))
    return plan


def on_cores(files: Sequence[Path], repeats: int) -> dict[str, float]:
    """All files read and solved one after another on one core, and shared by two processes."""
    one = _wall(lambda: [_solve_file(path) for path in files], repeats)
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        two = _wall(lambda: list(pool.map(_solve_file, files)), repeats)
    print(f"all files, reading included: {one:.3f} s on one core, {two:.3f} s on two")
    return {"one_core_seconds": one, "two_cores_seconds": two}


def _wall(call: Callable[[], object], repeats: int) -> float:
    """Least seconds by the clock."""
    seconds = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def _solve_file(path: Path) -> float:
    return solve(read_problem(path)).cost


def on_chains(repeats: int) -> list[dict[str, object]]:
    """Identical Transformer layers, 30 choices a vertex: time against depth."""
    rows = []
    for layers in (2, 10, 100, 1_000, 10_000):
        problem = encoder_chain(layers)
        seconds, solution = timed(lambda p=problem: solve(p), max(repeats, 15))
        assert isinstance(solution, Solution)
        plain = None
        if layers <= 100:
            plain, (cost, _) = timed(lambda p=problem: plain_elimination(p), 3)
            assert abs(solution.cost / cost - 1) < 1e-9
        rows.append(
            {
                "layers": layers,
                "vertices": len(problem),
                "seconds": seconds,
                "plain_seconds": plain,
                "cost": solution.cost,
                "optimal": solution.is_optimal,
            }
        )
        print(f"{layers:>7} layers  {1e3 * seconds:8.2f} ms", flush=True)
    return rows


def on_dense_blocks() -> list[dict[str, object]]:
    """Blocks whose exact tables fit no memory: proof or gap."""
    rows = []
    for vertices, choices, layouts in ((12, 40, 6), (24, 100, 8), (24, 200, 12)):
        problem = dense_block(vertices, choices, layouts)
        solution = solve(problem)
        entries = forecast(factors_of(problem), "auto").largest
        rows.append(
            {
                "vertices": vertices,
                "choices": choices,
                "largest_exact_table": entries,
                "seconds": solution.statistics.seconds,
                "optimal": solution.is_optimal,
                "gap": solution.gap,
                "peak_bytes": solution.statistics.peak_bytes,
            }
        )
        print(
            f"dense block {vertices} x {choices}: {solution.statistics.seconds:.2f} s, "
            f"gap {solution.gap:.2%}, exact table {entries:.1g} entries",
            flush=True,
        )
    return rows


def on_integer_program(
    problems: Iterable[tuple[str, Problem]], limit_seconds: float
) -> list[dict[str, object]]:
    """HiGHS on the same problems: whether it agrees, and how long it takes."""
    rows = []
    for name, problem in problems:
        seconds, solution = timed(lambda p=problem: solve(p), 9)
        assert isinstance(solution, Solution)
        begin = time.process_time()
        try:
            answer = ilp(problem, seconds=limit_seconds)
        except ShardfoldError as error:
            rows.append({"problem": name, "seconds": seconds, "ilp_error": str(error)})
            continue
        ilp_seconds = time.process_time() - begin
        if ilp_seconds < 1:
            ilp_seconds, _ = timed(lambda p=problem: ilp(p, seconds=limit_seconds), 3)
        cost = problem.total(answer.choice)
        rows.append(
            {
                "problem": name,
                "seconds": seconds,
                "ilp_seconds": ilp_seconds,
                "ilp_finished": answer.lower_bound is None,
                "ilp_above_optimum": cost / solution.cost - 1,
                "agrees": abs(cost / solution.cost - 1) <= 1e-9,
                "times_ilp": ilp_seconds / seconds,
            }
        )
        print(
            f"{name:>18}  HiGHS {ilp_seconds:8.2f} s, finished {rows[-1]['ilp_finished']}, "
            f"{rows[-1]['times_ilp']:,.0f}x, difference {rows[-1]['ilp_above_optimum']:.1e}",
            flush=True,
        )
    return rows


def on_memory_limits(
    problems: Iterable[tuple[str, Problem]], limit_seconds: float
) -> list[dict[str, object]]:
    """Limits a quarter, half and three quarters of the way from the smallest to the fastest."""
    rows = []
    for name, problem in problems:
        least = problem.total_bytes(solve(problem.blended(0.0, 1.0)).choice)
        most = problem.total_bytes(solve(problem).choice)
        for part in (0.25, 0.5, 0.75):
            limit = least + part * (most - least)
            solution = solve(problem, memory_limit=limit)
            row: dict[str, object] = {
                "problem": name,
                "part": part,
                "seconds": solution.statistics.seconds,
                "optimal": solution.is_optimal,
                "gap": solution.gap,
                "lower_bound": solution.lower_bound,
                "cost": solution.cost,
            }
            begin = time.perf_counter()
            answer = _ilp_within(problem, limit, limit_seconds)
            if answer is not None:
                row["ilp_seconds"] = time.perf_counter() - begin
                row["ilp_cost"] = answer
                row["above_ilp"] = solution.cost / answer - 1
                row["bound_is_below"] = solution.lower_bound <= answer * (1 + 1e-6)
            rows.append(row)
            print(
                f"{name:>18} at {part:.0%}  {solution.statistics.seconds:7.3f} s, gap "
                f"{solution.gap:.3%}, above HiGHS {row.get('above_ilp', float('nan')):+.1e}",
                flush=True,
            )
    return rows


def _ilp_within(problem: Problem, limit: float, seconds: float) -> float | None:
    """HiGHS's proven optimum within the limit, or None where it proves none in time."""
    try:
        answer = ilp(problem, memory_limit=limit, seconds=seconds)
    except ShardfoldError:
        return None
    return problem.total(answer.choice) if answer.lower_bound is None else None


def with_bytes(problem: Problem) -> Problem:
    """A problem of PaSE's tables, which carry no bytes, with made-up ones."""
    sizes = falling_bytes(problem.costs, seed=0)
    return Problem(problem.costs, problem.edges, problem.edge_costs, sizes, names=problem.names)


def sections(folder: Path | None, repeats: int, ilp_seconds: float, is_quick: bool) -> Sections:
    """Every comparison by name, to be run when its turn comes."""
    files = sorted(folder.glob("*.npz"), key=_by_model_and_size) if folder else []
    named = [(path.stem, read_problem(path)) for path in files]
    count = 3 if is_quick else 60
    graphs = [(f"random{seed}", random_graph(seed, 30 + seed % 31)) for seed in range(count)]
    small = [(name, p) for name, p in named if _entries(p) < 400_000][: 2 if is_quick else None]
    tiny = [(name, with_bytes(p)) for name, p in named if _entries(p) < 40_000]
    tiny = tiny[: 1 if is_quick else None]
    found: Sections = {
        "chains": lambda: on_chains(repeats),
        "dense_blocks": on_dense_blocks,
        "integer_program": lambda: on_integer_program(graphs + small, ilp_seconds),
        "memory_limits": lambda: on_memory_limits(graphs[:20] + tiny, ilp_seconds),
    }
    if folder is not None:
        found["files"] = lambda: on_files(folder, repeats)
        found["orders"] = lambda: on_orders(folder)
        found["cores"] = lambda: on_cores(files, repeats)
        found["methods"] = lambda: on_methods(files[:: 4 if is_quick else 1])
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparisons asked for and write what was measured, beside what was before."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, help="folder of .npz problem files")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/search.json"))
    parser.add_argument("--figure", type=Path, default=Path("docs/results/search.svg"))
    parser.add_argument("--ilp-seconds", type=float, default=60.0, help="time limit for HiGHS")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="few repeats, small problems only")
    parser.add_argument("--only", nargs="+", help="sections to run anew; the others are kept")
    options = parser.parse_args(arguments)
    repeats = 1 if options.quick else options.repeats
    every = sections(options.folder, repeats, options.ilp_seconds, options.quick)
    results: dict[str, object] = {}
    if options.only and options.out.exists():
        results = json.loads(options.out.read_text())
    results["environment"] = environment()
    print(json.dumps(results["environment"]))
    for name in options.only or every:
        results[name] = every[name]()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    if "files" in results:
        options.figure.parent.mkdir(parents=True, exist_ok=True)
        options.figure.write_text(draw(results))


def _entries(problem: Problem) -> int:
    """Variables of the integer program."""
    sizes = problem.sizes
    return int(sizes.sum() + (sizes[problem.ends[:, 0]] * sizes[problem.ends[:, 1]]).sum())


if __name__ == "__main__":
    main()
