"""What a set of priced rows comes to: errors, failures foretold, ranking and regret."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from published_rows import FAILED

Priced = Mapping[str, Any]
GROUP = ("source", "model", "seq", "gpu", "gpus", "global_batch")  # alike but for the strategy
FEWEST = 3  # rows of a group that is ranked


@dataclass(frozen=True, slots=True)
class Errors:
    """The sizes of relative errors."""

    rows: int
    median: float
    percentile90: float
    within10: float  # shares
    within20: float
    bias: float  # the median with its sign


@dataclass(frozen=True, slots=True)
class Summary:
    """One source, or all of them."""

    rows: int
    priced: int
    left_out: Mapping[str, int]
    step: Errors | None
    memory: Errors | None
    ran: int  # rows that ran, with a prediction of whether they fit
    ran_and_fit: int
    failed: int
    foretold: int  # of those that failed
    groups: int
    kendall: float | None  # of the median group
    regret: float | None

    def as_plain(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)


def summarise(rows: Sequence[Priced]) -> Summary:
    """The figures of some rows."""
    priced = [row for row in rows if "reason" not in row]
    failed = [row for row in priced if row["metric"] in FAILED]
    ran = [row for row in priced if row["metric"] not in FAILED]
    ranks = [ranked(group) for group in groups(priced)]
    return Summary(
        rows=len(rows),
        priced=len(priced),
        left_out=dict(Counter(row["reason"] for row in rows if "reason" in row).most_common()),
        step=errors(row["error"] for row in priced if "error" in row),
        memory=errors(row["memory_error"] for row in priced if "memory_error" in row),
        ran=len(ran),
        ran_and_fit=sum(row["fits"] for row in ran),
        failed=len(failed),
        foretold=sum(not row["fits"] for row in failed),
        groups=len(ranks),
        kendall=median([tau for tau, _ in ranks]),
        regret=median([regret for _, regret in ranks]),
    )


def by_source(rows: Sequence[Priced], name: Any) -> dict[str, list[Priced]]:
    """Rows by the name of their source, in order."""
    found: dict[str, list[Priced]] = defaultdict(list)
    for row in rows:
        found[name(row)].append(row)
    return dict(found)


def errors(values: Iterable[float]) -> Errors | None:
    """Sizes of errors, if there are any."""
    signed = list(values)
    sizes = sorted(map(abs, signed))
    if not sizes:
        return None
    return Errors(
        len(sizes),
        quantile(sizes, 0.5),
        quantile(sizes, 0.9),
        sum(size <= 0.1 for size in sizes) / len(sizes),
        sum(size <= 0.2 for size in sizes) / len(sizes),
        quantile(sorted(signed), 0.5),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of values in order, with a straight line between neighbours.

    >>> quantile([1.0, 2.0, 4.0], 0.75)
    3.0
    """
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def median(values: Sequence[float]) -> float | None:
    """The middle value, if there is one."""
    return quantile(sorted(values), 0.5) if values else None


def groups(rows: Sequence[Priced]) -> list[list[Priced]]:
    """Rows that ran, alike in model, devices and batch, where there are enough to rank."""
    found: dict[tuple[str, ...], list[Priced]] = defaultdict(list)
    for row in rows:
        if "error" in row:
            found[tuple(str(row[name]) for name in GROUP)].append(row)
    return [group for group in found.values() if len(group) >= FEWEST]


def ranked(group: Sequence[Priced]) -> tuple[float, float]:
    """Kendall's rank agreement, and the regret of the predicted best."""
    measured = [row["step_seconds"] for row in group]
    predicted = [row["predicted_step_seconds"] for row in group]
    best = min(range(len(group)), key=predicted.__getitem__)
    return kendall(measured, predicted), measured[best] / min(measured) - 1


def kendall(first: Sequence[float], second: Sequence[float]) -> float:
    """Kendall's tau-b: 1 where all pairs are in the same order, -1 where none is.

    >>> kendall([1, 2, 3], [1, 3, 2])
    0.3333333333333333
    """
    agree = ties_first = ties_second = pairs = 0
    for i, j in combinations(range(len(first)), 2):
        a, b = first[i] - first[j], second[i] - second[j]
        pairs += 1
        ties_first += a == 0
        ties_second += b == 0
        agree += (a * b > 0) - (a * b < 0)
    scale = math.sqrt((pairs - ties_first) * (pairs - ties_second))
    return agree / scale if scale else 1.0
