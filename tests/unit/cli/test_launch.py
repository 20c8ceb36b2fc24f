"""`shardfold launch`: commands that a shell reads as they are meant."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardfold.cli import main


@pytest.fixture(scope="module")
def plans(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("plans")
    made = {}
    for cluster in ("2x4xa100", "4xa100"):
        made[cluster] = folder / f"{cluster}.json"
        run("plan", "alexnet-tiny", "--cluster", cluster, "--save", str(made[cluster]))
    return made


def run(*arguments: str, code: int = 0):
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == code, result.output
    return result


def as_run(command: str, folder: Path, **environment: str) -> list[list[str]]:
    """The arguments that torchrun gets when a shell runs `command`: a stub writes them down."""
    log = folder / "log"
    for name in ("torchrun", "scontrol", "srun"):
        stub = folder / name
        stub.write_text(STUBS[name])
        stub.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "LOG": str(log), **environment}
    subprocess.run(["bash", "-c", command], check=True, env=env)
    return [json.loads(line) for line in log.read_text().splitlines()]


STUBS = {
    "torchrun": "#!/usr/bin/env python3\nimport json, os, sys\n"
    "open(os.environ['LOG'], 'a').write(json.dumps(sys.argv[1:]) + '\\n')\n",
    "scontrol": "#!/bin/sh\necho first\necho second\n",
    "srun": '#!/bin/sh\nshift\nfor n in 0 1; do SLURM_NODEID=$n "$@"; done\n',
}


def test_one_node_needs_no_head(plans) -> None:
    result = run("launch", str(plans["4xa100"]), "--", "train.py", "--lr", "3e-4")
    assert result.stdout == "torchrun --standalone --nproc-per-node 4 train.py --lr 3e-4\n"


def test_a_line_a_node_with_its_rank(plans, tmp_path: Path) -> None:
    result = run("launch", str(plans["2x4xa100"]), "--hosts", "a1,a2", "--model", "alexnet-tiny")
    found = as_run(result.stdout, tmp_path)
    assert [words[words.index("--node-rank") + 1] for words in found] == ["0", "1"]
    for words in found:
        assert words[words.index("--nnodes") + 1] == "2"
        assert words[words.index("--nproc-per-node") + 1] == "4"
        assert words[words.index("--master-addr") + 1] == "a1"
        assert words[-6:-2] == ["-m", "shardfold", "train", "alexnet-tiny"]


HOSTILE = ("my script.py", "$(touch hacked)", "it's", '"; rm -rf /tmp/none; "', "é\n")


def test_values_are_quoted(plans, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("launch", str(plans["2x4xa100"]), "--hosts", "a 1,a2", "--", *HOSTILE)
    for words in as_run(result.stdout, tmp_path):
        assert tuple(words[-len(HOSTILE) :]) == HOSTILE
        assert words[words.index("--master-addr") + 1] == "a 1"
    assert not (tmp_path / "hacked").exists()


def test_the_sbatch_file_starts_the_same_processes(plans, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = tmp_path / "job.sh"
    arguments = ("--sbatch", str(job), "--time", "02:00:00", "--partition", "gpu")
    run("launch", str(plans["2x4xa100"]), *arguments, "--", *HOSTILE)
    text = job.read_text()
    for line in ("--nodes=2", "--gpus-per-node=4", "--time=02:00:00", "--partition=gpu"):
        assert f"#SBATCH {line}\n" in text
    found = as_run(shlex.quote(str(job)), tmp_path, SLURM_JOB_NODELIST="[1-2]")
    assert [words[words.index("--node-rank") + 1] for words in found] == ["0", "1"]
    for words in found:
        assert tuple(words[-len(HOSTILE) :]) == HOSTILE
        assert words[words.index("--master-addr") + 1] == "first"


def test_json_has_the_commands(plans) -> None:
    found = json.loads(run("launch", str(plans["2x4xa100"]), "--json", "--", "t.py").stdout)
    assert (found["nodes"], found["processes_per_node"]) == (2, 4)
    assert len(found["commands"]) == 2


def test_without_a_script_it_says_what_is_missing(plans) -> None:
    result = run("launch", str(plans["2x4xa100"]), "--nodes", "2")
    assert result.stdout.count("TRAIN.py") == 2
    assert "give it after --" in result.stderr


def test_other_nodes_than_planned_are_remarked(plans) -> None:
    result = run("launch", str(plans["2x4xa100"]), "--nodes", "4", "--", "t.py")
    assert "priced for 2 nodes of 4, not for 4 of 2" in result.stderr
    assert "--nproc-per-node 2" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--nodes", "3"), "8 processes, which 3 nodes cannot share evenly"),
        (("--nodes", "2", "--hosts", "a"), "2 nodes need 2 names"),
        (("--model", "gpt2", "--", "t.py"), "not both"),
        (("--time", "1:00"), "goes with --sbatch"),
        (("--sbatch", "no/such/x.sh"), "does not exist"),
        (("--sbatch", "x.sh", "--partition", "a\nb"), "cannot stand in an sbatch file"),
    ],
)
def test_refusals(plans, arguments, message, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in run("launch", str(plans["2x4xa100"]), *arguments, code=2).output
