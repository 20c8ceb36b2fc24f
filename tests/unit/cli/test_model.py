from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from shardfold.cli.model import load_model
from shardfold.errors import ModelError
from shardfold.zoo import names

NONE = {"batch": None, "seq": None, "layers": None, "hidden": None}


@pytest.fixture(autouse=True)
def same_path(monkeypatch) -> None:
    """Loading a file changes what Python searches, as running the file would."""
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_a_zoo_name_is_built_without_weights() -> None:
    example = load_model("alexnet-tiny", {**NONE, "batch": 4})
    assert next(example.module.parameters()).is_meta
    assert example.args[0].shape[0] == 4


def test_a_function_in_a_file_is_called_with_the_sizes_given(model_file) -> None:
    assert load_model(f"{model_file}:make", NONE).args[0].shape == (8, 16)
    assert load_model(f"{model_file}:make", {**NONE, "batch": 4}).args[0].shape == (4, 16)


def test_a_module_of_the_working_folder_is_found(model_file, monkeypatch) -> None:
    monkeypatch.chdir(model_file.parent)
    assert load_model("of_mine:make", NONE).args[0].shape == (8, 16)


def test_rules_come_with_the_file(model_file) -> None:
    model_file.write_text(model_file.read_text() + "\nRULES = {'mine.op': lambda call: None}\n")
    assert list(load_model(f"{model_file}:make", NONE).rules) == ["mine.op"]


def test_a_file_is_run_once_and_again_when_it_changes(model_file) -> None:
    """Else torch would free an operator that the file registers, under models that call it."""
    first, again = (load_model(f"{model_file}:make", NONE).module for _ in range(2))
    assert type(first) is type(again)
    model_file.write_text(model_file.read_text() + "\nRULES = {'mine.op': lambda call: None}\n")
    changed = load_model(f"{model_file}:make", NONE)
    assert type(changed.module) is not type(first)
    assert list(changed.rules) == ["mine.op"]


def test_a_file_may_import_its_neighbours(model_file) -> None:
    (model_file.parent / "neighbour.py").write_text("width = 16\n")
    model_file.write_text("import neighbour\n" + model_file.read_text())
    assert load_model(f"{model_file}:make", NONE).args[0].shape == (8, neighbour_width())


def neighbour_width() -> int:
    return int(sys.modules["neighbour"].width)


def test_a_hugging_face_configuration(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    path.write_text(
        json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes})
    )
    example = load_model(f"hf:{path}", {**NONE, "batch": 4, "seq": 8})
    assert example.kwargs["input_ids"].shape == (4, 8)
    with pytest.raises(ModelError, match="--hidden does not go with hf:"):
        load_model(f"hf:{path}", {**NONE, "hidden": 8})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("raises", r"raises\(\) of .* raised KeyError: 'weights of mine' \(of_mine.py, line \d+\)"),
        ("maek", "has no function 'maek'. Did you mean make?"),
        ("returns_three", r"must return \(module, args, kwargs\).* it returned int"),
        ("returns_a_bare_tensor", r"it returned \(Loss, Tensor, dict\)"),
    ],
)
def test_what_a_function_does_wrong_is_said(model_file, function: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(f"{model_file}:{function}", NONE)


def test_a_size_that_the_function_does_not_take(model_file) -> None:
    with pytest.raises(ModelError, match="takes no seq: leave --seq out"):
        load_model(f"{model_file}:make", {**NONE, "seq": 4})


def test_a_file_that_is_not_there_or_not_named_in_full(model_file) -> None:
    with pytest.raises(ModelError, match=r"There is no file .*of_mien.py. Did you mean .*of_mine"):
        load_model(f"{model_file.parent / 'of_mien.py'}:make", NONE)
    with pytest.raises(ModelError, match="name the function that builds it"):
        load_model(str(model_file), NONE)
    with pytest.raises(ModelError, match=r"write hf:config\.json"):
        load_model("config.json", NONE)
    with pytest.raises(ModelError, match="There is no module no_such_package"):
        load_model("no_such_package.models:make", NONE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nothing_there", r"ModuleNotFoundError: .*nothing_there.* \(broken.py, line 1\)"),
        ("x = (", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("RULES = [1]\ndef make(): ...", "must return"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(ModelError, match=message):
        load_model(f"{path}:make", NONE)


def test_rules_of_the_wrong_type(model_file) -> None:
    model_file.write_text(model_file.read_text() + "\nRULES = ['mine.op']\n")
    with pytest.raises(ModelError, match=r"RULES in .* must map operator names"):
        load_model(f"{model_file}:make", NONE)


def test_the_table_lists_the_full_models_within_80_columns(run) -> None:
    lines = run("models").output.splitlines()
    assert max(map(len, lines)) <= 80
    listed = {line.split()[0] for line in lines if line.strip()}
    assert {name for name in names() if not name.endswith("-tiny")} <= listed
    assert "shardfold[hf]" in run("models").output


def test_json_lists_every_model(run) -> None:
    entries = json.loads(run("models", "--json").stdout)
    assert [entry["name"] for entry in entries] == list(names())
    assert entries[0]["batch"] == 128
