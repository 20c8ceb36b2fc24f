"""Splits that a rule describes but the runner cannot run yet: the planner does not offer them.

The rules stay as the operators are, and are tested so; what is priced must be what is run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardfold.operators.call import Call
from shardfold.operators.notation import Rule

RECURRENT = {"aten.lstm", "aten.gru", "aten.rnn_tanh", "aten.rnn_relu"}
WRITES_ROWS = {
    f"aten.{name}"
    for name in ("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_put")
}
ROWS = frozenset({"v", *(f"v{k}" for k in range(8))})  # of what is written to, by any of its dims

# Whether it concerns a call, and the factors that then stay whole.
HELD_BACK: tuple[tuple[Callable[[Call], bool], frozenset[str]], ...] = (
    (lambda call: call.op.kind in RECURRENT - {"aten.lstm"}, frozenset({"e"})),
    (
        lambda call: call.op.kind in RECURRENT and call.attribute("dropout", 0.0) > 0,
        frozenset({"b", "e"}),
    ),
    (lambda call: call.op.kind.startswith("aten.conv_transpose"), frozenset({"g"})),
    (lambda call: bool(call.attribute("ceil_mode", False)), frozenset({"t", "h", "w"})),
    (
        lambda call: (
            call.op.kind == "aten.cross_entropy_loss"
            and call.has("weight")
            and call.attribute("label_smoothing", 0.0) > 0
        ),
        frozenset({"c"}),
    ),
    (lambda call: call.op.kind in WRITES_ROWS, ROWS),
)


def offered(rule: Rule, call: Call) -> Rule:
    """The rule with every factor whole that the runner could not split for this call."""
    held = frozenset().union(*(factors for concerns, factors in HELD_BACK if concerns(call)))
    known = held & set(rule.sizes)
    return replace(rule, whole=rule.whole | known) if known - rule.whole else rule
