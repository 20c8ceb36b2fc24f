"""The page on rules, done as it says: an operator of one's own is described, planned and run."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

import shardfold
from shardfold.capture import capture
from shardfold.cli import main
from shardfold.cluster import mesh_from_text, parse
from shardfold.costs.activations import extras
from shardfold.costs.operator_steps import Tensors, operator_steps
from shardfold.operators import rules_of
from shardfold.plans.files import save
from shardfold.sharding import find_subdims, space_of

from .choices import Chooser

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "add-a-rule.md").read_text()
EXAMPLE = ROOT / "examples" / "own_rule.py"
KIND = "mine.low_rank"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE.parent))
        return importlib.import_module(EXAMPLE.stem)


def test_the_page_shows_the_example() -> None:
    assert len(blocks("python")) == 2
    for block in blocks("python"):
        assert block.strip() in EXAMPLE.read_text()


def test_the_lines_of_the_page_run(example: ModuleType, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for line in "".join(blocks("sh")).splitlines():
        result = CliRunner().invoke(main, shlex.split(line)[1:])
        assert result.exit_code == 0, f"{line}: {result.output}"


def test_the_description_is_priced(example: ModuleType) -> None:
    model, args, kwargs = example.make()
    graph = capture(model, args, kwargs)
    subdims = find_subdims(graph, rules_of(graph, example.RULES))
    index = next(i for i, op in enumerate(graph.ops) if op.kind == KIND)
    mesh = mesh_from_text("2", parse("2xa100"))
    space = space_of(subdims.rules[index], mesh)
    steps = operator_steps(space, Tensors.of(graph, subdims, index), mesh).steps
    kernels = {step.phase: step.work.kernels(step.phase) for step in steps if step.work}
    assert [len(kernels[phase]) for phase in ("forward", "backward")] == [2, 5]
    assert all(kernel.family == "matmul.nt" for kernel in kernels["forward"])
    (extra,) = extras(graph, subdims, index)
    assert extra.per_item == 512 * 4
    assert {subdims.rules[index].factors[f] for f in space.configs[:, 0] if f >= 0} == {"i0", "r"}


@pytest.mark.parametrize("factor", ["i0", "r"])
def test_every_split_of_it_runs(example: ModuleType, tmp_path: Path, factor: str) -> None:
    chooser = Chooser(*example.small(), "2xcpu", "2", rules=example.RULES)
    choice = [0] * len(chooser.tables.vertices)
    for v, vertex in enumerate(chooser.tables.vertices):
        if vertex.space is not None and chooser.graph.ops[vertex.index].kind == KIND:
            wanted = vertex.space.rule.factors.index(factor)
            choice[v] = vertex.space.configs[:, 0].tolist().index(wanted)
    save(chooser.plan(tuple(choice)), tmp_path / "plan.json")
    line = ["check", f"{EXAMPLE}:small", "--plan", str(tmp_path / "plan.json"), "--local", "2"]
    found = CliRunner().invoke(main, line)
    assert found.exit_code == 0, found.output


def test_a_rule_alone_is_enough(example: ModuleType) -> None:
    model, args, kwargs = example.make()
    alone = {KIND: example.low_rank_rule}
    plan = shardfold.plan(model, args, kwargs, cluster="8xa100", rules=alone)
    assert not [op for op in plan.operators if op.kind == KIND and not any(op.config)]
