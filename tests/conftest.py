"""What tests share (the packages of this folder are imported from it), and how much they draw.

`make test` draws the same examples in every run; `make fuzz` draws others, and says how to repeat
what it finds; `make quick` draws few, and skips a test where it would export a model or start a
process. What was skipped is named at the end with what it needs.
"""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Small tensors run fastest on one thread, and every core has a worker of its own. Torch and numpy
# read this once, when a test imports them.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

# Most of what is made is let go of without a search for cycles, which took a twelfth of the time.
gc.set_threshold(50_000, 20)

MOST_FILES = 6  # that are named for one reason to skip

# Other work on the machine makes single examples slow, and large ones are drawn on purpose.
LARGE = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large)
COMMON = {
    "deadline": None,
    "database": None,
    "print_blob": True,
    "suppress_health_check": LARGE,
}
settings.register_profile("test", derandomize=True, **COMMON)
settings.register_profile("quick", derandomize=True, **COMMON)
settings.register_profile("fuzz", derandomize=False, **COMMON)
settings.load_profile("test")


@pytest.fixture(autouse=True, scope="session")
def _quick() -> Iterator[None]:
    """What takes long is left to `make test`; the test itself need not say that it does it."""
    if settings.get_current_profile_name() != "quick":
        yield
        return
    import torch

    with pytest.MonkeyPatch.context() as patch:
        for owner, name, what in (
            (torch.export, "export", "to export a model"),
            (subprocess.Popen, "__init__", "to start a process"),
            (BaseProcess, "start", "to start a process"),
        ):
            patch.setattr(owner, name, _left_to_make_test(what))
        yield


@pytest.fixture(autouse=True, scope="session")
def captures_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of this run where what was captured is kept for all its processes."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "captures"
    folder.mkdir(exist_ok=True)
    if settings.get_current_profile_name() == "quick":  # which captures nothing
        yield folder
        return
    from captures import captured_once

    with captured_once(folder):
        yield folder


def pytest_collection_finish() -> None:
    """Modules and tests stay: nobody looks through them for cycles again."""
    gc.freeze()


def _left_to_make_test(what: str) -> Callable[..., None]:
    def skip(*args: object, **kwargs: object) -> None:
        pytest.skip(f"{what} is left to `make test`")

    return skip


def pytest_runtest_setup() -> None:
    """What a test draws does not depend on the tests before it."""
    if time.time() > float(os.environ.get("FUZZ_END", "inf")):
        pytest.skip("FUZZ_SECONDS are over")
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name what was skipped and what that needs; say how to repeat what fuzzing found."""
    _name_skipped(terminalreporter)
    seed = terminalreporter.config.getoption("--hypothesis-seed")
    failed = terminalreporter.stats.get("failed", [])
    if seed is not None and failed:
        terminalreporter.section("repeat what was found")
        options = f"--hypothesis-profile=fuzz --hypothesis-seed={seed}"
        for report in failed:
            terminalreporter.line(f".venv/bin/pytest {options} '{report.nodeid}'")


def _name_skipped(terminalreporter: pytest.TerminalReporter) -> None:
    reasons: dict[str, list[str]] = defaultdict(list)
    for report in terminalreporter.stats.get("skipped", []):
        reasons[report.longrepr[-1].removeprefix("Skipped: ")].append(report.nodeid)
    if reasons:
        terminalreporter.section("skipped")
    for reason, tests in sorted(reasons.items()):
        terminalreporter.line(f"{len(tests)} skipped: {reason}")
        files = sorted({test.partition("::")[0] for test in tests})
        for file in files[:MOST_FILES]:
            terminalreporter.line(f"    {file}")
        if len(files) > MOST_FILES:
            terminalreporter.line(f"    and {len(files) - MOST_FILES} more files")
