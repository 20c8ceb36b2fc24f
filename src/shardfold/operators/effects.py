"""What capture makes of a step's effects: writes to buffers, and functions with their own backward.

Both run whole on every device: the one by its nature, the other as it has no rule.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardfold.operators.call import Call
from shardfold.operators.notation import Rule
from shardfold.operators.operator import Operator, aten


def _whole(call: Call) -> Rule:
    return call.undescribed()


TABLE: Mapping[str, Operator] = {
    "shardfold.write": Operator(_whole, "own form"),
    "shardfold.function": Operator(local="own form"),
    # Checks of a trace, which capture leaves out.
    **aten(
        "_assert_tensor_metadata _assert_async _assert_scalar sym_constrain_range "
        "sym_constrain_range_for_size",
        Operator(left_out="check"),
    ),
}
