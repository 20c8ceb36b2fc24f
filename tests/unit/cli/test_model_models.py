from __future__ import annotations

import json

from shardfold.zoo import names


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
