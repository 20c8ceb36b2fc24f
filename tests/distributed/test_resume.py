"""Saved under one plan on four ranks, resumed under others on two and on one: the same losses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardfold.plans.files import dumps
from shardfold.runtime.checkpoint import load
from shardfold.runtime.checkpoint.index import read_index

from .choices import Chooser
from .ranks import Launch
from .resume import Case, resumed_runs, tied, whole_runs

MODELS = ("llama3-8b-tiny", "rnnlm-tiny", "planes")
STEPS = 4


def cases(cluster: str, mesh: str, root: Path, seed: int) -> list[Case]:
    """Any legal plan of each model."""
    found = []
    for name in MODELS:
        chooser = Chooser(*tied(name), cluster, mesh)
        plan = chooser.best() if mesh == "1" else chooser.random(seed)
        found.append(Case(name, dumps(plan).encode(), root / name))
    return found


def test_training_goes_on_under_other_plans(tmp_path: Path, on_ranks: Launch) -> None:
    whole = on_ranks(whole_runs, 4, cases("4xcpu", "2x2", tmp_path, 3), STEPS)
    two = on_ranks(resumed_runs, 2, cases("2xcpu", "2", tmp_path, 5), STEPS)
    one = on_ranks(resumed_runs, 1, cases("1xcpu", "1", tmp_path, 0), STEPS)
    assert whole[0] == whole[3]
    for k, name in enumerate(MODELS):
        expected = whole[0][k][STEPS:]
        assert expected[-1] < whole[0][k][0], name
        for found in (two[0][k], one[0][k]):
            assert found == pytest.approx(expected, rel=1e-6), name
        # Nothing was gathered: the bytes are spread, and no tensor is written twice.
        index = read_index(tmp_path / name / f"step-{STEPS:08d}")
        assert len(index.files) == 4
        assert max(index.files.values()) < 0.6 * sum(index.files.values())
        state = load(None, None, tmp_path / name).state_dict()
        expected_state = tied(name)[0].state_dict()
        assert set(state) == set(expected_state)
        assert all(state[n].shape == t.shape for n, t in expected_state.items())
        assert all(torch.isfinite(t).all() for t in state.values())
