"""A saved plan loads equal; what is damaged, newer or for another model is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draws import draws
from shardfold.capture import capture
from shardfold.errors import PlanError
from shardfold.graph import Graph
from shardfold.operators import rules_of
from shardfold.plans import Estimate, Plan, check, dumps, loads
from shardfold.plans.plan import CollectiveEntry, OperatorEntry, ParameterEntry, TensorEntry
from shardfold.plans.read import decisions_of
from shardfold.sharding import find_subdims
from virtual.models import Language, tokens


def changed(plan: Plan, **fields: Any) -> bytes:
    return json.dumps(json.loads(dumps(plan)) | fields).encode()


def test_a_saved_plan_loads_equal(plan: Plan, graph: Graph, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert Plan.load(tmp_path / "plan.json", graph) == plan


NUMBERS = st.floats(0, 1e30, allow_nan=False)
NAMES = st.text(max_size=20)


@given(
    st.builds(
        Estimate, *[NUMBERS] * 3, st.booleans(), *[NUMBERS] * 8, st.integers(0, 2**50), NUMBERS
    ),
    st.lists(
        st.builds(
            OperatorEntry,
            *[NAMES] * 4,
            st.lists(NAMES, max_size=3).map(tuple),
            st.dictionaries(NAMES, st.integers(1, 64), max_size=3),
            NUMBERS,
            st.lists(
                st.builds(
                    CollectiveEntry,
                    NAMES,
                    NAMES,
                    st.lists(NAMES, max_size=2).map(tuple),
                    NUMBERS,
                    st.integers(1, 9),
                    NUMBERS,
                ),
                max_size=2,
            ).map(tuple),
        ),
        max_size=3,
    ).map(tuple),
    st.lists(st.builds(TensorEntry, NAMES, st.lists(NAMES).map(tuple)), max_size=2).map(tuple),
    st.lists(
        st.builds(
            ParameterEntry,
            st.lists(NAMES, min_size=1, max_size=2).map(tuple),
            st.lists(st.integers(0, 10**9), max_size=3).map(tuple),
            st.lists(NAMES).map(tuple),
            st.booleans(),
        ),
        max_size=2,
    ).map(tuple),
)
@draws(60)
def test_any_plan_loads_equal(
    plan: Plan, estimate: Any, operators: Any, tensors: Any, parameters: Any
) -> None:
    other = msgspec.structs.replace(
        plan,
        estimate=estimate,
        operators=operators,
        tensors=tensors,
        parameters=parameters,
        sketch=None,  # which has a row for every operator
    )
    assert loads(dumps(other).encode()) == other


def test_a_diff_shows_one_operator_a_line(plan: Plan) -> None:
    lines = dumps(plan).splitlines()
    for entry in plan.operators:
        start = f'"name": "{entry.name}", "kind": "{entry.kind}"'
        assert sum(start in line for line in lines) == 1
    first = plan.operators[0]
    other = msgspec.structs.replace(
        plan,
        operators=(
            msgspec.structs.replace(first, split={"batch": 4}, seconds=1.0),
            *plan.operators[1:],
        ),
    )
    differing = [a for a, b in zip(lines, dumps(other).splitlines(), strict=True) if a != b]
    assert len(differing) == 1


def test_it_is_plain_json(plan: Plan) -> None:
    assert json.loads(dumps(plan)) == msgspec.json.decode(msgspec.json.encode(plan))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.999])
def test_a_truncated_file_is_refused(plan: Plan, share: float) -> None:
    data = dumps(plan).rstrip().encode()
    with pytest.raises(PlanError, match=r"a\.json is not complete JSON .*truncated"):
        loads(data[: int(share * len(data))], "a.json")


@pytest.mark.parametrize("data", [b"hello", b"\x80\x04K\x01.", b"\xff\xfe", b"import os", b"[1,"])
def test_what_is_not_json_is_refused(data: bytes) -> None:
    with pytest.raises(PlanError, match="not complete JSON"):
        loads(data)


@pytest.mark.parametrize("data", [b"[]", b"3", b"null", b"{}", b'{"format": "other"}'])
def test_json_that_is_no_plan_is_refused(data: bytes) -> None:
    with pytest.raises(PlanError, match="not a shardfold plan"):
        loads(data)


@pytest.mark.parametrize("version", [3, 99, "1", None, 1.5])
def test_a_newer_version_is_refused_before_anything_else(plan: Plan, version: Any) -> None:
    with pytest.raises(PlanError, match=r"plan version .*reads up to 2.*Upgrade"):
        loads(changed(plan, version=version, operators="something new"))


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"surprise": 1}, "surprise"),
        ({"cluster": 3}, "cluster"),
        ({"operators": [{"name": "x"}]}, "operators"),
        ({"estimate": {}}, "estimate"),
        ({"mesh": [{"name": "x", "size": "8", "level": "gpu"}]}, "mesh"),
    ],
)
def test_a_field_that_is_wrong_is_named(plan: Plan, fields: dict[str, Any], where: str) -> None:
    with pytest.raises(PlanError, match=rf"damaged: .*{where}"):
        loads(changed(plan, **fields))


def test_a_missing_field_is_named(plan: Plan) -> None:
    plain = json.loads(dumps(plan))
    del plain["mesh"]
    with pytest.raises(PlanError, match=r"damaged: .*mesh"):
        loads(json.dumps(plain).encode())


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"Cannot read the plan .*absent\.json: No such file"):
        Plan.load(tmp_path / "absent.json")


def test_a_folder_that_is_not_there(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"folder .*absent does not exist"):
        plan.save(tmp_path / "absent" / "plan.json")


def test_a_failed_save_leaves_the_old_file(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "plan.json"
    target.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(PlanError, match=r"Cannot write .*No space left"):
        plan.save(target)
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("options", "batch", "expected"),
    [
        ({"layers": 2}, 8, "it has 4[0-9] operators|its operator|no parameter"),
        ({"hidden": 64}, 8, r"has shape \(32,\), the model's has \(64,\)"),
        ({"vocabulary": 128}, 8, r"has shape \(64, 32\), the model's has \(128, 32\)"),
        ({"tied": True}, 8, "no parameter"),
        ({"layers": 4}, 8, "no parameter blocks.3"),
        ({}, 4, "another batch size"),
        ({"heads": 8}, 8, "another batch size|constants"),
    ],
)
def test_a_plan_for_another_model_says_what_differs(
    plan: Plan, options: dict[str, Any], batch: int, expected: str
) -> None:
    other = capture(Language(**options), (tokens(batch),), {"labels": tokens(batch)})
    with pytest.raises(PlanError, match=rf"for another model: .*({expected}).*Plan again"):
        check(plan, other)


def test_another_dtype_is_another_model(plan: Plan) -> None:
    other = capture(Language(), (tokens(),), {"labels": tokens()}, dtype="bf16")
    with pytest.raises(PlanError, match="dtype"):
        check(plan, other)


def test_another_operator_is_named(plan: Plan, graph: Graph) -> None:
    entry = msgspec.structs.replace(plan.operators[3], kind="aten.other")
    operators = (*plan.operators[:3], entry, *plan.operators[4:])
    provenance = msgspec.structs.replace(plan.provenance, graph="sha256:0")
    other = msgspec.structs.replace(plan, operators=operators, provenance=provenance)
    with pytest.raises(PlanError, match=rf"{entry.name} is aten.other, the model has aten"):
        check(other, graph)


def test_a_plan_of_version_1_says_how_it_is_made_anew(plan: Plan) -> None:
    made = {"cost": "measured", "optimizer": "sgd", "dtype": "bf16"}
    old = changed(
        plan,
        version=1,
        cluster="2x4xa100",
        provenance=made,
        pinned={"pins": [{"pattern": "fc*", "split": "out/2 batch/4"}], "free_seconds": 1.0},
    )
    found = (
        r"old\.json has plan version 1; this shardfold reads from 2 on\. Make it anew: "
        r"shardfold plan MODEL --cluster 2x4xa100 --dtype bf16 --optimizer sgd "
        r"--profile PROFILE\.json --pin 'fc\*=out/2 batch/4' --save plan\.json; .*--memory-limit"
    )
    with pytest.raises(PlanError, match=found):
        loads(old, "old.json")
    for odd in ({"provenance": 3, "pinned": [1]}, {"pinned": {"pins": [2, {}]}}, {"cluster": [1]}):
        with pytest.raises(PlanError, match="Make it anew: shardfold plan MODEL"):
            loads(changed(plan, version=1, **odd))


def test_a_plan_by_a_cost_model_of_ones_own_loads(plan: Plan) -> None:
    found = loads(edited(plan, "provenance", "request", "cost", value="mine"))
    assert found.provenance.request.cost == "mine"


AXIS = {"name": "gpu", "size": 4, "level": "gpu"}


def edited(plan: Plan, *path: Any, value: Any) -> bytes:
    """The plan's file with one value deep within it replaced."""
    plain = json.loads(dumps(plan))
    at = plain
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return json.dumps(plain).encode()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("mesh",), [{**AXIS, "size": -1}]),
        (("mesh",), [{**AXIS, "size": 10**12}]),
        (("mesh",), [{**AXIS, "size": 1, "name": f"gpu{k}"} for k in range(20)]),
        (("mesh",), [{**AXIS, "size": 2, "name": f"gpu{k}"} for k in range(8)]),
        (("mesh",), [{**AXIS, "level": "moon"}]),
        (("micro_batches",), 10**9),
        (("micro_batches",), 0),
        (("micro_batches",), -4),
        (("micro_batches",), 1.5),
        (("parameters", 0, "shape"), [-3, 4]),
        (("parameters", 0, "shape"), [10**30]),
        (("recompute",), [[-1, 5]]),
        (("recompute",), [[0, 10**9]]),
        (("inputs", 0, "cut"), -1),
        (("schedule", "segments", 0, "count"), 10**12),
        (("schedule", "segments", 0, "count"), -1),
        (("schedule", "passes"), 10**9),
        (("schedule", "segments", 0, "operators", 0, "forward", 0, "levels"), [7]),
        (("sketch", "pieces"), [[[0], 10**12]]),
        (("sketch", "pieces"), [[[-5], 1]]),
        (("sketch", "rows", 0, "face"), 10**6),
        (("provenance", "cluster"), {}),
        (("provenance", "cluster", "levels", 0, "size"), 10**9),
        (("provenance", "request", "micro_batches"), 10**9),
        (("provenance", "request", "memory_limit"), -1.0),
        (("provenance", "request", "optimizer"), "none of these"),
        (("provenance", "request", "pins"), ["no split"]),
    ],
)
def test_a_strangers_figures_are_refused_as_they_are_read(
    plan: Plan, path: tuple[Any, ...], value: Any, graph: Graph, tmp_path: Path
) -> None:
    (tmp_path / "odd.json").write_bytes(edited(plan, *path, value=value))
    with pytest.raises(PlanError, match=r"odd\.json|none of the model's repeated blocks"):
        decisions_of(Plan.load(tmp_path / "odd.json"), graph, find_subdims(graph, rules_of(graph)))


@pytest.mark.parametrize(
    "text", ["NaN", "Infinity", "-Infinity", "1e999", "[" * 100_000, '{"a":' * 100_000]
)
def test_numbers_that_json_has_not_and_deep_nests_are_refused(plan: Plan, text: str) -> None:
    whole = dumps(plan)
    assert whole.count('"micro_batches": "auto"') == 1
    with pytest.raises(PlanError, match=r"not complete JSON|damaged"):
        loads(whole.replace('"micro_batches": "auto"', f'"micro_batches": {text}').encode())


def test_bytes_that_are_no_text_are_refused(plan: Plan) -> None:
    whole = bytearray(dumps(plan).encode())
    for place in (0, 3, len(whole) // 2, len(whole) - 2):
        with pytest.raises(PlanError, match=r"not complete JSON|damaged"):
            loads(bytes([*whole[:place], 0xB5, *whole[place + 1 :]]))
