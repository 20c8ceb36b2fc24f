from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardfold.errors import ProblemError
from shardfold.search import Problem, read_problem, solve, write_problem

SAME = np.array([1.0, 2.0])
BETWEEN = np.array([[0.0, 3.0], [1.0, 0.0]])


@pytest.fixture
def problem() -> Problem:
    edges, tables = ((0, 1), (2, 1)), (BETWEEN, BETWEEN)
    return Problem((SAME, SAME, SAME + 1), edges, tables, names=("a", "b", "c"))


def save(path: Path, **changes: object) -> Path:
    arrays = {"n": 2, "vc_of": [0, 0], "V0": SAME, "edges": [[0, 1]], "ec_of": [0], "E0": BETWEEN}
    arrays |= changes
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
    return path


def test_what_is_written_is_read(tmp_path: Path, problem: Problem) -> None:
    write_problem(problem, tmp_path / "p.npz", meta={"model": "toy"})
    read = read_problem(tmp_path / "p.npz")
    assert read.edges == problem.edges
    assert read.names == problem.names
    assert all(np.array_equal(a, b) for a, b in zip(read.costs, problem.costs, strict=True))
    assert solve(read).choice == solve(problem).choice
    assert read.costs[0] is read.costs[1]


def test_bytes_are_carried(tmp_path: Path, problem: Problem) -> None:
    sizes, between = (SAME * 5,) * 3, (BETWEEN * 7,) * 2
    with_bytes = Problem(problem.costs, problem.edges, problem.edge_costs, sizes, between)
    write_problem(with_bytes, tmp_path / "p.npz")
    read = read_problem(tmp_path / "p.npz")
    assert read.total_bytes((1, 0, 1)) == with_bytes.total_bytes((1, 0, 1))


def test_a_minimal_file_of_another_writer_is_read(tmp_path: Path) -> None:
    read = read_problem(save(tmp_path / "p.npz"))
    assert read.total((1, 0)) == 2 + 1 + 1


def test_an_empty_problem_is_written_and_read(tmp_path: Path) -> None:
    write_problem(Problem(()), tmp_path / "p.npz")
    assert solve(read_problem(tmp_path / "p.npz")).choice == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"V0": None}, "vertex 0 refers to table V0"),
        ({"ec_of": [4]}, "edge 0 refers to table E4"),
        ({"vc_of": [0]}, "expected one number for each vertex, 2 in all"),
        ({"edges": [[0, 5]]}, "vertex 0 to vertex 5"),
        ({"edges": [0, 1, 1]}, "expected \\(m, 2\\)"),
        ({"n": None}, "has no array 'n'"),
        ({"E0": BETWEEN * np.nan}, "edge 0 from vertex 0 to vertex 1 holds nan"),
        ({"V0": np.array([object(), object()])}, "pickled objects"),
        ({"V0": np.array(["a", "b"])}, "must hold numbers"),
        ({"ec_of": [0.5]}, "must hold integers"),
    ],
)
def test_faults_are_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        read_problem(save(tmp_path / "p.npz", **changes))


def test_truncated_foreign_and_missing_files_are_refused(tmp_path: Path) -> None:
    whole = save(tmp_path / "p.npz").read_bytes()
    for length in (0, 10, len(whole) // 2, len(whole) - 30):
        (tmp_path / "cut.npz").write_bytes(whole[:length])
        with pytest.raises(ProblemError, match="truncated"):
            read_problem(tmp_path / "cut.npz")
    np.save(tmp_path / "pickled.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ProblemError, match="not a problem file"):
        read_problem(tmp_path / "pickled.npy")
    np.save(tmp_path / "plain.npy", SAME)
    with pytest.raises(ProblemError, match="not a problem file"):
        read_problem(tmp_path / "plain.npy")
    with pytest.raises(ProblemError, match="There is no file"):
        read_problem(tmp_path / "nowhere.npz")
