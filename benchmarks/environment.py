"""Where a benchmark ran: machine, versions and date, to stand beside its figures."""

from __future__ import annotations

import datetime
import os
import platform
from importlib import metadata
from pathlib import Path


def environment() -> dict[str, object]:
    """Facts about this machine and the packages that matter."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": int(os.environ.get("OMP_NUM_THREADS", "0")) or None,
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        **{name: _version(name) for name in ("numpy", "scipy", "shardfold")},
    }


def _version(package: str) -> str | None:
    """The version of a package, if it is installed: a checkout may run as it is."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
