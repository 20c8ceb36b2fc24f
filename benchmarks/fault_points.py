"""`shardfold train` in a process that is killed at a chosen moment; benchmarks/faults.py starts it.

    torchrun ... benchmarks/fault_points.py FAULTS LOG train MODEL --plan ...

FAULTS is a JSON list; the n-th start of the processes suffers the n-th entry: at which point, on
which rank, and at which of its passes there. LOG gets a line for every start, step and kill.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardfold.cli import main

POINTS = ("forward", "backward", "collective", "write", "index", "rename", "prune")
OPERATORS = 5  # of a forward pass, after which it is left


class Fault:
    """Counts passes of one point, and kills this process at the one that was chosen."""

    def __init__(self, entry: dict[str, Any] | None, log: Callable[..., None]) -> None:
        self.entry, self.log, self.left = entry, log, entry["after"] if entry else 0
        self.step = -1

    def passed(self, point: str) -> None:
        """Here is `point`."""
        if self.entry is None or self.entry["point"] != point:
            return
        if self.entry["rank"] != int(os.environ["RANK"]):
            return
        if self.left == 0:
            self._strike()
        self.left -= 1

    def _strike(self) -> None:
        assert self.entry is not None
        self.log("fault", **self.entry, step=self.step)
        if self.entry.get("sleep"):
            time.sleep(self.entry["sleep"])
        else:
            os.kill(os.getpid(), signal.SIGKILL)


def arm(fault: Fault) -> None:
    """Put the points where they belong."""
    import torch
    import torch.distributed as dist

    from shardfold.runtime import training
    from shardfold.runtime.checkpoint import folders, storage
    from shardfold.runtime.module import Parallel

    def before(owner: Any, name: str, point: str) -> None:
        whole = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            fault.passed(point)
            return whole(*args, **kwargs)

        setattr(owner, name, call)

    for name in [n for n in dir(dist) if n.startswith(("all_", "reduce_scatter"))]:
        before(dist, name, "collective")
    before(storage.zlib, "crc32", "write")  # between two tensors of a part
    before(sys.modules["shardfold.runtime.checkpoint.save_load"], "encode", "index")
    before(folders.Path, "rename", "rename")
    before(sys.modules["shardfold.runtime.checkpoint.save_load"].folders, "prune", "prune")
    _arm_passes(fault, Parallel, torch)
    _count_steps(fault, training)


def _arm_passes(fault: Fault, module: Any, torch: Any) -> None:
    """In the middle of forward, after some operators; of backward, at a parameter's gradient."""
    from torch.utils._python_dispatch import TorchDispatchMode

    whole = module.forward

    class Counted(TorchDispatchMode):  # type: ignore[misc]
        count = 0

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.count += 1
            if self.count == OPERATORS:
                fault.passed("forward")
            return function(*args, **(kwargs or {}))

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if fault.entry is None or fault.entry["point"] not in ("forward", "backward"):
            return whole(self, *args, **kwargs)
        if fault.entry["point"] == "forward":
            with Counted():
                return whole(self, *args, **kwargs)
        loss = whole(self, *args, **kwargs)
        if not getattr(self, "_is_armed", False):
            self._is_armed = True
            middle = list(self.parameters())[1]
            middle.register_hook(lambda gradient: fault.passed("backward"))
        return loss

    module.forward = forward


def _count_steps(fault: Fault, training: Any) -> None:
    whole = training.advance

    def advance(state: Any, *args: Any, **kwargs: Any) -> float:
        fault.step = state.step
        found: float = whole(state, *args, **kwargs)
        fault.log("step", step=fault.step, loss=found)
        return found

    training.advance = advance


def begin() -> None:
    """Read what this start suffers, and train."""
    faults, path = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))

    def log(kind: str, **facts: Any) -> None:
        line = {"kind": kind, "time": time.time(), "start": start, "pid": os.getpid()}
        line |= {"rank": int(os.environ["RANK"]), "world": int(os.environ["WORLD_SIZE"]), **facts}
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    log("start")
    arm(Fault(faults[start] if start < len(faults) else None, log))
    main(sys.argv[3:], prog_name="shardfold")


if __name__ == "__main__":
    begin()
