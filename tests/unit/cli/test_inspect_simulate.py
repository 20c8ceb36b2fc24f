from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest


@pytest.fixture
def saved(run, model_file: Path) -> Path:
    path = model_file.parent / "plan.json"
    arguments = ("--cluster", "2x2xh100", "--dtype", "bf16", "--save", path)
    assert run("plan", f"{model_file}:make", *arguments).exit_code == 0
    return path


def test_a_plan_is_simulated_from_its_file_alone(run, saved) -> None:
    shown = run("simulate", saved).stdout
    assert "MFU" in shown
    assert "Peak" in shown
    figures = json.loads(run("simulate", saved, "--json").stdout)
    assert figures["step_seconds"] > 0
    assert figures["fits"] is True
    assert set(figures["utilisation"]) == {"compute", "node", "gpu"}
    planned = json.loads(saved.read_text())["simulation"]
    assert figures["step_seconds"] == pytest.approx(planned["step_seconds"])
    assert figures["peak_bytes"] == pytest.approx(planned["peak_bytes"])


def test_a_trace_has_the_whole_step(run, saved) -> None:
    path = saved.parent / "trace.json"
    assert run("simulate", saved, "--trace", path).exit_code == 0
    step = json.loads(run("simulate", saved, "--json").stdout)["step_seconds"]
    events = json.loads(path.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(step * 1e6)
    assert {e["cat"] for e in spans} >= {"forward", "backward", "update"}
    by_track: dict[int, list[tuple[float, float]]] = {}
    for e in spans:
        by_track.setdefault(e["tid"], []).append((e["ts"], e["ts"] + e["dur"]))
    for track in by_track.values():  # one thing at a time on every stream
        ordered = sorted(track)
        assert all(start >= end - 1e-6 for (_, end), (start, _) in pairwise(ordered))
    assert any(event["ph"] == "C" for event in events)


def test_a_plan_without_a_schedule_is_refused(refused, saved) -> None:
    plan = json.loads(saved.read_text())
    del plan["schedule"]
    saved.write_text(json.dumps(plan))
    assert "holds no schedule" in refused("simulate", saved)


def test_a_trace_needs_a_folder(refused, saved) -> None:
    missing = saved.parent / "nowhere" / "trace.json"
    assert "does not exist" in refused("simulate", saved, "--trace", missing)
