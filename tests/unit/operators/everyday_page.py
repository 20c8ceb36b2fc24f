"""The page of everyday functions: how each can be split, and by what it is.

Run `python -m operators.everyday_page` in `tests/unit` to write it again.
"""

from __future__ import annotations

from pathlib import Path

from .everyday import LISTED
from .test_everyday import LACKING, setting_of

SECTION = "## Llama"
COLUMNS = "| function |"
PAGE = Path(__file__).parents[3] / "docs" / "results" / "operators.md"
HEAD = """# Everyday operators

{total} functions of `torch`, `torch.nn.functional` and `Tensor`, and the splits that each of them
has, written down before any was tried. A letter is a factor that can be split: the devices'
parts, by the same function, give parts of the result, or its summands, or their shares of a mean;
or a small exchange makes up what they lack. A dot is a dim that must be whole, a number a count
that stays in place.

{split} of {total} are split in every one of these ways ({share:.1%}): {rules} by written rules
alone, {experiments} with splits that were [found by experiment](../explanation/sharding.md). Each
function was captured as a model is; for each factor two devices ran their parts, forward and
backward, and the results and gradients, put together, were those of torch's own call to 1e-9
(where a rule exchanges sums inside an operator, tests with processes do that). The tests in
`tests/unit/operators/test_everyday.py` repeat it.

| function | can be split | by |
|---|---|---|
"""


def row(number: int) -> tuple[str, bool]:
    """A function's line, and whether an experiment had a part in it."""
    each, setting = LISTED[number], setting_of(number)
    found = [
        op.kind.removeprefix("aten.")
        for op, rule in zip(setting.made.graph.ops, setting.subdims.rules, strict=True)
        if rule.rule.found
    ]
    how = f"experiment ({', '.join(dict.fromkeys(found))})" if found else "rule"
    if each.name in LACKING:
        how = f"in part only: {LACKING[each.name]}"
    return f"| {each.name} | `{each.splits.strip()}` | {how} |", bool(found)


def page() -> str:
    """The whole page."""
    rows = [row(number) for number in range(len(LISTED))]
    good = [e for (_, e), each in zip(rows, LISTED, strict=True) if each.name not in LACKING]
    head = HEAD.format(
        total=len(LISTED),
        split=len(good),
        share=len(good) / len(LISTED),
        rules=good.count(False),
        experiments=good.count(True),
    )
    return head + "\n".join(line for line, _ in rows) + "\n"


def main() -> None:
    """Write the page again; what stands before the functions' table stays."""
    before, _, _ = PAGE.read_text().partition(COLUMNS)
    _, about, _ = before.partition(SECTION)
    head, columns, rows = page().partition(COLUMNS)
    PAGE.write_text(head + SECTION + about + columns + rows)


if __name__ == "__main__":
    main()
