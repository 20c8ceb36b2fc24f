"""What forward leaves behind, and its own backward functions, under any split: as in the model.

`check` runs the module itself in plain PyTorch, two steps on different batches.
"""

from __future__ import annotations

import logging

from shardfold.plans.files import dumps, loads
from shardfold.runtime.check import compare
from unit.capture import meanings

from .choices import Chooser
from .jobs import Case
from .ranks import Launch

NAMES = (
    "StraightThrough",
    "FunctionOfTwo",
    "FunctionInBlocks",
    "RunningMean",
    "Reassigned",
    "CountedInABuffer",
    "SliceOfABuffer",
    "UpdatedInBlocks",
    "Teacher",
    "Codebook",
    "UnusedNorm",
    "ConstantInForward",
    "NormUnread",
    "ReplacedInBlocks",
    "CtcLoss",
    "Thresholded",
    "MeansOfSelected",
    "RoundingIsLeft",
    "ComplexPut",
    "ComplexWeights",
    "ExpertsPassedOver",
    "OldChances",
    "BroadcastTogether",
)


def compared(rank: int, cases: list[Case]) -> list[str]:
    """For each case, what differs from the model itself, or that it was not run."""
    logging.getLogger("torch").setLevel(logging.ERROR)
    found = []
    for name, label, data in cases:
        model = getattr(meanings, name)()
        args, kwargs = model.steps()[0]
        outcome = compare(model, loads(data), args, kwargs)
        is_right = outcome.is_equal and not outcome.unlike
        found.append("" if is_right else f"{name} {label}: {outcome}")
    return found


def test_a_meaning_is_kept_under_any_plan(on_ranks: Launch) -> None:
    cases = []
    for name in NAMES:
        model = getattr(meanings, name)()
        chooser = Chooser(model, *model.steps()[0], "2xcpu", "2")
        plans = [*chooser.baselines(), *chooser.covering(3).values()]
        cases += [(name, str(k), dumps(plan).encode()) for k, plan in enumerate(plans)]
    found = on_ranks(compared, 2, cases)
    assert len(found[0]) == len(cases)
    for told in found:
        assert [line for line in told if line] == []
