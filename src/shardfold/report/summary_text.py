"""A plan's totals in sentences: proof, memory, meshes, and what stayed unsplit."""

from __future__ import annotations

from dataclasses import dataclass

from shardfold.plans.plan import MeshEntry, Plan
from shardfold.report.units import number, seconds, size

MOST_MESHES = 6
MOST_KINDS = 4


def heading(plan: Plan, model: str | None = None) -> list[str]:
    """What was planned, on what, and under which assumptions."""
    made = plan.provenance
    axes = " x ".join(f"{axis.name}={axis.size}" for axis in plan.mesh) or "one device"
    dtype = "" if made.request.dtype is None else f", {made.request.dtype}"
    parts = f", {plan.micro_batches} micro-batches" if plan.micro_batches > 1 else ""
    return [
        f"{model or 'Plan'} on {plan.cluster}, mesh {axes}",
        f"{number(made.parameters)} parameters, {made.operators:,} operators, "
        f"{made.request.optimizer}{dtype}, {made.request.cost} costs{parts}",
    ]


def proof(plan: Plan) -> str:
    """How sure the search is that nothing is better."""
    e = plan.estimate
    if e.optimal:
        best = "optimal" if plan.fits else "the fastest if memory did not count,"
        return f"proven {best} under this cost model"
    gap = 1 - e.lower_bound_seconds / e.step_seconds
    return f"at most {gap:.2%} above the best (lower bound {seconds(e.lower_bound_seconds)})"


def parts(plan: Plan) -> str:
    """Where the step's time goes."""
    e = plan.estimate
    named = {
        "compute": e.compute_seconds,
        "communication": e.communication_seconds,
        "update": e.update_seconds,
    }
    return ", ".join(f"{name} {seconds(value)}" for name, value in named.items())


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to split, as words: its step, how many times the plan's that is, its memory."""

    name: str
    step: str
    ratio: str
    memory: str
    fits: bool


def comparison(plan: Plan) -> list[Contender]:
    """The plan itself, then the strategies that it is held against."""
    e = plan.estimate
    known = {entry.name: entry.simulated_seconds for entry in plan.finalists}
    own = e.step_seconds if plan.simulation is None else plan.simulation.step_seconds
    rivals = [
        (
            "data parallel",
            known.get("data-parallel", e.data_parallel_seconds),
            e.data_parallel_bytes,
        ),
        ("fully sharded", known.get("zero-3", e.fully_sharded_seconds), e.fully_sharded_bytes),
    ]
    this = Contender("this plan", seconds(own), "", size(e.peak_bytes), plan.fits)
    return [this] + [
        Contender(
            name,
            seconds(time),
            f"{time / own:.2f}x",
            size(peak),
            peak <= e.limit_bytes,
        )
        for name, time, peak in rivals
    ]


def memory(plan: Plan) -> str:
    """The limit that memory is held against."""
    return f"limit {size(plan.estimate.limit_bytes)}"


def simulated(plan: Plan) -> list[str]:
    """The step with overlap, and by how much it wins over the best strategy by hand that fits."""
    found = plan.simulation
    if found is None:
        return []
    sent = found.communication_seconds
    hidden = (sent - found.exposed_seconds) / sent if sent else 0.0
    share = f", {hidden:.0%} of communication hidden"
    lines = [
        f"Simulated with overlap: {seconds(found.step_seconds)} a step, MFU {found.mfu:.1%}"
        f"{share if sent else ''}; the peak of {size(found.peak_bytes)} "
        f"is reached at {found.peak_at}."
    ]
    hands = [f for f in plan.finalists if not f.name.startswith("search")]
    fitting = [f for f in hands if f.peak_bytes <= plan.estimate.limit_bytes]
    if fitting:
        best = min(fitting, key=lambda f: f.simulated_seconds)
        wins = best.simulated_seconds / found.step_seconds - 1
        won = f"{wins:.1%} faster than" if wins >= 5e-4 else "as fast as"
        lines.append(
            f"It is {won} {best.name}, the best of {len(hands)} strategies by hand that fits."
        )
    elif hands:
        lines.append(f"None of {len(hands)} strategies by hand fits.")
    return lines


def recomputed(plan: Plan) -> list[str]:
    """Which activations are dropped and made again."""
    if not plan.recompute:
        return []
    blocks = len(plan.recompute)
    return [f"Recomputed in backward to save memory: {blocks} blocks."]


def accumulated(plan: Plan) -> list[str]:
    """In how many passes a step takes its batch."""
    if plan.micro_batches == 1:
        return []
    return [
        f"A step takes its batch in {plan.micro_batches} micro-batches to save memory, and adds "
        "their gradients up. Operators are as in one of them; times are of all, and the bound is "
        "for that many."
    ]


def too_large(plan: Plan) -> list[str]:
    """What to try where no plan fits."""
    if plan.fits:
        return []
    smallest = plan.estimate.min_feasible_bytes
    needs = "" if smallest is None else f"; the smallest plan needs {size(smallest)}"
    return [f"No plan fits in memory{needs}. Try more devices, a smaller batch or bf16."]


def meshes(plan: Plan) -> str:
    """Which meshes were tried, and by how much the winner won."""
    shape = "x".join(str(axis.size) for axis in plan.mesh) or "1"
    found = plan.simulation
    others = [entry for entry in plan.meshes if entry.mesh != shape]
    if not others:
        return f"One mesh was tried: {shape}."
    won = plan.estimate.step_seconds if found is None else found.step_seconds
    steps = {
        entry.mesh: entry.step_seconds if found is None else entry.simulated_seconds or 0.0
        for entry in others
    }
    others.sort(key=lambda entry: (not steps[entry.mesh], steps[entry.mesh]))
    listed = ", ".join(_behind(entry, steps[entry.mesh], won) for entry in others[:MOST_MESHES])
    more = f" and {len(others) - MOST_MESHES} more" if len(others) > MOST_MESHES else ""
    return f"Meshes tried: {shape} is best; {listed}{more}."


def _behind(entry: MeshEntry, step: float, won: float) -> str:
    behind = step / won - 1
    if abs(behind) < 5e-4:
        return f"{entry.mesh} is as good"
    return f"{entry.mesh} +{behind:.1%}" if behind > 0 else f"{entry.mesh} does not fit"


def pinned(plan: Plan) -> list[str]:
    """What the user fixed, and what that costs against the best without it."""
    if plan.pinned is None:
        return []
    listed = ", ".join(
        f"{pin.pattern}={pin.split} ({pin.operators} operator{'s' * (pin.operators != 1)})"
        for pin in plan.pinned.pins
    )
    free, step = plan.pinned.free_seconds, plan.estimate.step_seconds
    price = f"The pins cost {seconds(step - free)} ({step / free - 1:.2%})."
    if not plan.fits:
        price = f"Without the pins the best step is {seconds(free)}."
    return [f"Pinned: {listed}.", price]


def unsplit(plan: Plan) -> list[str]:
    """The operators that every device computes in full, and why."""
    lines = [
        f"No rule for {entry.kind} ({entry.count} of them): planned unsplit, at least "
        f"{entry.share:.2%} of the step, as its arithmetic is unknown. "
        "See docs/how-to/add-a-rule.md."
        for entry in plan.unsplit
        if entry.reason == "no rule"
    ]
    rest = [entry for entry in plan.unsplit if entry.reason != "no rule"]
    if rest:
        count, share = sum(u.count for u in rest), sum(u.share for u in rest)
        names = list(dict.fromkeys(u.kind.rpartition(".")[2] for u in rest))
        kinds = ", ".join(names[:MOST_KINDS]) + (", ..." if len(names) > MOST_KINDS else "")
        what = "operator has" if count == 1 else "operators have"
        lines.append(
            f"{count} {what} nothing to split ({kinds}): computed on every device, "
            f"{share:.2%} of the step."
        )
    return lines or ["Every operator could be split."]


def effort(plan: Plan) -> str:
    """How long the planning took."""
    made = plan.provenance
    return (
        f"Captured in {seconds(made.capture_seconds)}, searched in {seconds(made.search_seconds)}."
    )
