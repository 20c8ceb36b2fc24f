from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from shardfold.errors import ProblemError
from shardfold.search import Problem, read_problem, solve, write_problem
from shardfold.search.interning import Kinds

TWO, THREE = np.array([1.0, 2.0]), np.array([1.0, 2.0, 3.0])
BETWEEN = np.arange(6.0).reshape(2, 3)


def test_total_sums_vertices_and_edges() -> None:
    problem = Problem((TWO, THREE), ((0, 1), (1, 0)), (BETWEEN, BETWEEN.T))
    assert problem.total((1, 2)) == 2 + 3 + 5 + 5


def test_total_is_the_same_for_few_and_for_many_vertices() -> None:
    random = np.random.default_rng(0)
    n = 3_000
    costs = tuple(random.random(3) for _ in range(n))
    edges = tuple((v, v + 1) for v in range(n - 1))
    tables = tuple(random.random((3, 3)) for _ in edges)
    choice = random.integers(0, 3, n)
    by_hand = sum(c[x] for c, x in zip(costs, choice, strict=True))
    by_hand += sum(t[choice[u], choice[v]] for t, (u, v) in zip(tables, edges, strict=True))
    assert Problem(costs, edges, tables).total(choice) == pytest.approx(by_hand)


def test_equal_arrays_are_one_kind_whether_shared_or_copied() -> None:
    problem = Problem((TWO, TWO, TWO.copy(), THREE))
    assert problem.vertex_kinds.of.tolist() == [0, 0, 0, 1]


def test_an_empty_problem_costs_nothing() -> None:
    assert Problem(()).total(()) == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((np.array([1.0, np.nan]),),), r"vertex 0 holds nan at choice 1"),
        (((TWO, np.array([np.inf])),), r"vertex 1 holds inf at choice 0"),
        (((TWO, np.zeros(0)),), r"Vertex 1 has no choices"),
        (((TWO, np.zeros((2, 2))),), r"vertex 1 have shape \(2, 2\)"),
        (((TWO, THREE), ((0, 2),), (BETWEEN,)), r"vertex 0 to vertex 2.*only vertices 0 to 1"),
        (((TWO, THREE), ((0, -1),), (BETWEEN,)), r"vertex 0 to vertex -1"),
        (((TWO, THREE), ((0, 0),), (BETWEEN,)), r"joins vertex 0 to itself"),
        (((TWO, THREE), ((1, 0),), (BETWEEN,)), r"edge 0 from vertex 1 to vertex 0 has shape"),
        (((TWO, THREE), ((0, 1),), (TWO,)), r"edge 0 .*expected two dimensions"),
        (((TWO, THREE), ((0, 1),), ()), r"1 edges but 0 edge tables"),
        (((TWO, THREE), ((0, 1, 1),), (BETWEEN,)), r"pair of vertex numbers"),
        (((TWO, THREE), ((0, 1),), (BETWEEN + np.inf,)), r"edge 0 from vertex 0 to vertex 1 holds"),
        (((TWO,), (), (), (THREE,)), r"byte table of vertex 0 has shape \(3,\) for 2 choices"),
        (((TWO,), (), (), (TWO, TWO)), r"2 byte tables for 1 vertices"),
        (((TWO,), (), (), (TWO * np.nan,)), r"byte table of vertex 0 holds nan"),
        (((TWO, THREE), ((0, 1),), (BETWEEN,), None, (BETWEEN.T,)), r"byte table of edge 0"),
        (((TWO,), (), (), None, None, ("a", "b")), r"2 names for 1 vertices"),
    ],
)
def test_wrong_tables_are_refused_by_name(arguments: tuple, message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        Problem(*arguments)


def test_messages_use_the_names_of_vertices() -> None:
    with pytest.raises(ProblemError, match=r"vertex 1 \(fc2\) holds nan"):
        Problem((TWO, np.array([np.nan])), names=("fc1", "fc2"))


def test_a_wrong_choice_is_refused_by_name() -> None:
    problem = Problem((TWO, THREE))
    with pytest.raises(ProblemError, match="Choice 3 of vertex 1 is not among its 3"):
        problem.total((0, 3))
    with pytest.raises(ProblemError, match="1 choices for 2 vertices"):
        problem.total((0,))


def test_blended_weighs_cost_and_bytes() -> None:
    problem = Problem((TWO, THREE), ((0, 1),), (BETWEEN,), (TWO * 10, THREE * 10), (BETWEEN * 7,))
    choice = (1, 2)
    blend = problem.blended(2.0, 3.0)
    expected = 2 * problem.total(choice) + 3 * problem.total_bytes(choice)
    assert blend.total(choice) == pytest.approx(expected)


SAME = np.array([1.0, 2.0])
STORED = np.array([[0.0, 3.0], [1.0, 0.0]])


@pytest.fixture
def problem() -> Problem:
    edges, tables = ((0, 1), (2, 1)), (STORED, STORED)
    return Problem((SAME, SAME, SAME + 1), edges, tables, names=("a", "b", "c"))


def save(path: Path, **changes: object) -> Path:
    arrays = {"n": 2, "vc_of": [0, 0], "V0": SAME, "edges": [[0, 1]], "ec_of": [0], "E0": STORED}
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
    sizes, between = (SAME * 5,) * 3, (STORED * 7,) * 2
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
        ({"E0": STORED * np.nan}, "edge 0 from vertex 0 to vertex 1 holds nan"),
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


@pytest.mark.parametrize("rows", [3, 260], ids=["laid end to end", "looked up apart"])
def test_totals_of_many_positions_are_their_entries_added_up(rows: int) -> None:
    rng = np.random.default_rng(0)
    tables = [rng.random((rows, rows)) for _ in range(4)]
    kinds = Kinds.find([tables[k] for k in rng.integers(0, 4, 2_500)])
    choice = rng.integers(0, rows, 2_500)
    ends = np.stack([np.arange(2_500), rng.permutation(2_500)], axis=1)
    pairs = zip(kinds.of, choice[ends], strict=True)
    entries = [kinds.tables[k][a, b] for k, (a, b) in pairs]
    assert kinds.total(choice, ends) == pytest.approx(math.fsum(entries), rel=1e-12)
