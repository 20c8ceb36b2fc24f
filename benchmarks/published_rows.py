"""Rows of published runs: read from a CSV, checked, and their figures turned into a step's seconds.

Errors name the row (the first below the header is row 1, as in `--rows`) and the column.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TEXTS = ("source", "model", "gpu", "dtype", "zero", "recompute", "sequence_parallel", "notes")
COUNTS = (
    *("layers", "hidden", "heads", "kv_heads", "vocab", "seq", "gpus", "gpus_per_node"),
    *("global_batch", "micro_batch", "tp", "pp", "vp", "dp", "cp", "ep"),
)
COLUMNS = (*TEXTS, *COUNTS, "ffn", "metric", "value", "memory_gib")
NEEDED = ("source", "model", "gpus", "gpu", "metric")
FAILED = ("oom", "failed_or_oom")
RATES = ("tokens_per_s_per_gpu", "samples_per_s", "step_time_s")
FLOPS = ("model_tflops_per_gpu", "hw_tflops_per_gpu")
METRICS = (*RATES, *FLOPS, *FAILED, "memory_only")


class RowError(ValueError):
    """What is wrong with a file of runs, by row and column."""


@dataclass(frozen=True, slots=True)
class Row:
    """One run as it was published; None is what was not."""

    number: int
    columns: Mapping[str, str]
    counts: Mapping[str, int | None]
    ffn: float | None
    value: float | None  # None where the run failed
    memory_gib: float | None

    def __getattr__(self, name: str) -> str:
        """A column as it is written: `row.source`."""
        try:
            return self.columns[name]
        except KeyError:
            raise AttributeError(name) from None

    def count(self, name: str, default: int | None = None) -> int | None:
        """A whole number, or the default where none was published."""
        found = self.counts[name]
        return default if found is None else found

    @property
    def has_failed(self) -> bool:
        """Whether it ran out of memory, or failed in some way."""
        return self.columns["metric"] in FAILED

    def said(self, pattern: str) -> int | None:
        """A whole number of the notes, such as `micro_num 4`."""
        found = re.search(pattern + r"\s+(\d+)", self.columns["notes"])
        return int(found[1]) if found else None


def read_rows(path: Path) -> list[Row]:
    """All rows of a file; an error lists everything that is wrong with it."""
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        absent = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if absent:
            raise RowError(f"{path.name}: missing column {', '.join(absent)}.")
        lines = list(reader)
    errors: list[str] = []
    rows = [_row(number, line, errors) for number, line in enumerate(lines, 1)]
    if errors:
        raise RowError(f"{path.name}: {len(errors)} errors.\n" + "\n".join(errors[:50]))
    if not rows:
        raise RowError(f"{path.name}: no rows.")
    return rows


def _row(number: int, line: Mapping[str | None, str | None], errors: list[str]) -> Row:
    columns = {name: (line.get(name) or "").strip() for name in COLUMNS}

    def wrong(column: str, what: str) -> None:
        errors.append(f"row {number}, column {column}: {what}, got {columns[column]!r}.")

    if None in line or any(value is None for value in line.values()):
        errors.append(f"row {number}: it has not as many columns as the header.")
    for name in NEEDED:
        if not columns[name]:
            wrong(name, "it must be given")
    counts = {name: _count(columns[name], name, wrong) for name in COUNTS}
    metric, value = columns["metric"], None
    if metric and metric not in METRICS:
        wrong("metric", f"the unit must be one of {', '.join(METRICS)}")
    elif metric not in FAILED:
        value = _number(columns["value"], "value", wrong)
        if value is None and not columns["value"]:
            wrong("value", f"a run with the metric {metric} needs one")
    ffn = _product(columns["ffn"], wrong)
    memory = _number(columns["memory_gib"], "memory_gib", wrong)
    return Row(number, columns, counts, ffn, value, memory)


def _count(text: str, column: str, wrong: object) -> int | None:
    assert callable(wrong)
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        wrong(column, "it must be a whole number, 1 or more")
        return None
    return int(text)


def _number(text: str, column: str, wrong: object) -> float | None:
    assert callable(wrong)
    if not text:
        return None
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        wrong(column, "it must be a positive number without a unit")
        return None
    return found


def _product(text: str, wrong: object) -> float | None:
    """Inner features: a number, or a ratio of one as in `8/3*4096`."""
    found = re.fullmatch(r"(\d+)/(\d+)\*(\d+)", text)
    if found and int(found[2]):
        return int(found[1]) / int(found[2]) * int(found[3])
    return _number(text, "ffn", wrong)


def step_seconds(row: Row) -> float | None:
    """The step that a published figure means; None where none is published."""
    if row.value is None or row.metric == "memory_only":
        return None
    if row.metric == "step_time_s":
        return row.value
    return in_metric(row, row.value)


def in_metric(row: Row, figure: float) -> float:
    """A step's seconds as the row's figure, and the other way round: all are work over time."""
    if row.metric == "step_time_s":
        return figure
    return _work(row) / figure


def _work(row: Row) -> float:
    """What a step does, in the metric's own unit."""
    batch, gpus = row.count("global_batch"), row.count("gpus")
    if batch is None or gpus is None:
        raise RowError(f"row {row.number}, column global_batch: {row.metric} needs it.")
    if row.metric == "samples_per_s":
        return batch
    seq = row.count("seq")
    if seq is None:
        raise RowError(f"row {row.number}, column seq: {row.metric} needs it.")
    if row.metric == "tokens_per_s_per_gpu":
        return batch * seq / gpus
    return batch * megatron_flops(row, 96.0 if row.metric.startswith("hw") else 72.0) / gpus / 1e12


def megatron_flops(row: Row, factor: float) -> float:
    """FLOP of a sequence by Megatron-LM's formula: 96 B s l h^2 (1 + s/6h + V/16lh).

    The factor 96 counts a recomputed forward, 72 does not. Alpa and BLOOM publish the former.
    """
    seq, layers, hidden = (row.count(name) for name in ("seq", "layers", "hidden"))
    vocab = row.count("vocab")
    if seq is None or layers is None or hidden is None or vocab is None:
        raise RowError(f"row {row.number}: {row.metric} needs seq, layers, hidden and vocab.")
    ratio = 1 + seq / (6 * hidden) + vocab / (16 * layers * hidden)
    return factor * seq * layers * hidden**2 * ratio


def chosen(rows: Sequence[Row], numbers: str, source: str) -> Iterator[Row]:
    """The rows `A:B` (from A up to B, both included) whose source has a text in it."""
    first, last = 1, len(rows)
    if numbers:
        found = re.fullmatch(r"(\d*):(\d*)", numbers)
        if not found:
            raise RowError(f"--rows {numbers}: write A:B, such as 1:20.")
        first, last = int(found[1] or 1), int(found[2] or len(rows))
    return (r for r in rows if first <= r.number <= last and source.lower() in r.source.lower())
