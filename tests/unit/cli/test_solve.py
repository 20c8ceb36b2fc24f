from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from shardfold.cli.solve import solve as command
from shardfold.errors import InfeasibleError, ProblemError
from shardfold.search import Problem, solve, write_problem


@pytest.fixture
def file(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    edges = tuple((v, v + 1) for v in range(29))
    problem = Problem(
        tuple(random.random(3) for _ in range(30)),
        edges,
        tuple(random.random((3, 3)) for _ in edges),
        tuple(random.integers(1, 9, 3) * 2.0**20 for _ in range(30)),
        names=tuple(f"layer{v}" for v in range(30)),
    )
    write_problem(problem, tmp_path / "toy.npz")
    return tmp_path / "toy.npz"


def run(*arguments: object) -> str:
    result = CliRunner().invoke(command, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_answer_is_printed_with_its_proof(file: Path) -> None:
    output = run(file)
    for line in ("cost", "proven optimal", "lower bound", "largest table", "peak memory"):
        assert line in output
    assert "layer0" in output
    assert "and 10 more" in output
    assert "layer29" in run(file, "--all")


def test_json_holds_every_fact(file: Path) -> None:
    facts = json.loads(run(file, "--json", "--memory-limit", "0.1G"))
    assert facts["optimal"] is True
    assert facts["bytes"] <= 0.1 * 2**30
    assert len(facts["choice"]) == 30


@pytest.mark.parametrize("method", ["ilp", "greedy"])
def test_other_methods_and_orders_are_at_hand(file: Path, method: str) -> None:
    best = json.loads(run(file, "--json", "--order", "generate-seq"))
    other = json.loads(run(file, "--json", "--method", method))
    assert other["cost"] >= best["cost"] - 1e-9
    assert other["optimal"] is (method == "ilp")


def test_bad_input_is_an_error_of_ours(file: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.npz").write_bytes(file.read_bytes()[:100])
    with pytest.raises(ProblemError, match="truncated"):
        run(tmp_path / "cut.npz")
    with pytest.raises(InfeasibleError, match="smallest needs"):
        run(file, "--memory-limit", "1MiB")
    result = CliRunner().invoke(command, [str(file), "--memory-limit", "lots"])
    assert result.exit_code == 2
    assert "is not a size" in result.output


def test_the_help_teaches_by_example() -> None:
    assert "shardfold solve gpt2.npz --memory-limit 40GiB" in run("--help")


def test_the_file_solves_like_the_problem(file: Path) -> None:
    from shardfold.search import read_problem

    assert json.loads(run(file, "--json"))["cost"] == solve(read_problem(file)).cost
