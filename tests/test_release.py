"""What is published: built from its own sources, installed alone, and used as a new user does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import shardfold

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BUILD = (
    "import sys; from hatchling.build import build_sdist, build_wheel; "
    "print(getattr(sys.modules['hatchling.build'], sys.argv[1])(sys.argv[2]))"
)
pytestmark = pytest.mark.slow


def built(kind: str, source: Path, folder: Path) -> Path:
    """A distribution of the sources, by the project's own backend."""
    command = [sys.executable, "-c", BUILD, f"build_{kind}", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, from the sources that are published."""
    folder = tmp_path_factory.mktemp("built")
    archive = built("sdist", ROOT, folder)
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return built("wheel", folder / archive.name.removesuffix(".tar.gz"), folder)


def test_a_version_is_the_same_everywhere() -> None:
    assert PROJECT["version"] == shardfold.__version__
    released = re.findall(r"^## (\d+\.\d+\.\d+) - \d{4}-\d\d-\d\d$", _changes(), re.MULTILINE)
    assert released[0] == shardfold.__version__


def _changes() -> str:
    return (ROOT / "CHANGELOG.md").read_text()


def test_the_wheel_has_what_the_package_reads(wheel: Path) -> None:
    assert wheel.name == f"shardfold-{PROJECT['version']}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as files:
        names = set(files.namelist())
    sources = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src/shardfold").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "shardfold/py.typed" in sources
    assert sources <= names
    assert not {name for name in names - sources if ".dist-info/" not in name}


def test_a_new_user_installs_it_and_plans(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own; what it depends on is taken from this one."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    install += ["--no-deps", "--no-index", "--disable-pip-version-check", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    (packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (packages / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}

    def ran(*command: str) -> str:
        done = subprocess.run(
            [str(python.parent / command[0]), *command[1:]],
            cwd=tmp_path,
            env=clean,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = ran("python", "-c", "import shardfold; print(shardfold.__file__)").strip()
    assert Path(where) == packages / "shardfold" / "__init__.py"
    assert ran("shardfold", "--version").split()[-1] == PROJECT["version"]
    plan = ran("shardfold", "plan", "gpt2", "--cluster", "8xh100", "--save", "plan.json")
    assert "gpt2 on 8xh100" in plan
    assert (tmp_path / "plan.json").is_file()
