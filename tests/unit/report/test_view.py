"""One view of a plan: the terminal, `print`, a notebook and the page write it, none leaves out."""

from __future__ import annotations

import io
import itertools
import json
import re
from html import unescape

import msgspec
import pytest
from rich.console import Console

from shardfold.plans import Plan
from shardfold.plans.plan import InputEntry
from shardfold.report import notebook_html, plan_view, to_html, view
from shardfold.report.summary_text import contenders, proof, sentences, throughput
from shardfold.report.terminal import breaks

from ..plans.made import FINALISTS, SIMULATION, full, made

TEXT = """\
A plan on 4x8xh100, mesh node=4 x gpu0=2 x gpu1=4
8.03B parameters, 14 operators, adamw, bf16, kernels costs

operator                  split           collectives                      share
--------------------------------------------------------------------------------
layers.* (2 times)                                                         30.0%
  attention.query, key    batch/4 heads/8 bwd all-reduce node 4.0 MiB      20.0%
    linear
  norm pow, mul           batch/4                                           2.0%
  add                     unsplit                                           8.0%
head linear               batch/4 vocab/8 fwd all-gather all 8.0 MiB       69.8%
                                          bwd reduce-scatter gpu 16.0 MiB
3 small operators                                                           0.2%
fwd, bwd: forward, backward; sizes are of one operator on one device. share: of
the additive cost. Collectives of under 5% of their row are left out (shardfold
show --all has them).

                  step             memory   limit 72.0 GiB
------------------------------------------------------------------------------
this plan       1.00 s           60.0 GiB   fits
data-parallel   2.50 s   2.50x   90.0 GiB   DOES NOT FIT without recomputation
fsdp            1.50 s   1.50x   20.0 GiB   fits

No rule for mine.op (2 of them): planned unsplit, at least 2.00% of the cost, as
  its arithmetic is unknown. See docs/how-to/add-a-rule.md.
Step: 1.00 s: the additive cost, as kernels costs know no overlap.
Precision: bf16 throughout, no other master weights.
Additive cost, without overlap: 1.00 s (compute 600 ms, communication 300 ms,
  update 100 ms); proven optimal.
Meshes tried: 4x2x4 is best; 2x2x8 +25.0%.
1 operator has nothing to split (arange): computed on every device, 0.00% of the
  cost.
Captured in 1.50 s, searched in 250 ms."""


def drawn(plan: Plan, width: int = 80, **options: object) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width, highlight=False)
    console.print(plan_view(view(plan, **options), width))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def page(plan: Plan) -> str:
    """The words that the page is given to set, in its order."""
    (text,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', to_html(plan), re.S
    )
    shown = json.loads(text)["view"]
    rows = [" ".join(row[2:]) for row in shown["rows"]]
    beside = [" ".join(each) for each in shown["contenders"]]
    says = [text for text, _ in shown["sentences"]]
    return " ".join([shown["facts"], *rows, shown["legend"], *beside, *says])


def words(text: str) -> str:
    return " ".join(text.split())


def notebook(plan: Plan) -> str:
    return unescape(re.sub(r"<[^>]+>", " ", notebook_html(plan)))


WRITERS = {
    "print": str,
    "terminal": lambda plan: drawn(plan, 110),
    "notebook": notebook,
    "page": page,
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("plan", [made(), made(fits=False), full()], ids=["plain", "large", "full"])
def test_every_writer_writes_every_row_and_every_sentence_in_order(writer: str, plan: Plan) -> None:
    shown = view(plan)
    found = words(WRITERS[writer](plan))
    for row in shown.rows:
        for cell in row.cells:
            assert all(word in found for word in cell.split())
    for each in shown.contenders:
        assert words(" ".join(each.words)) in found
    assert words(shown.legend) in found
    places = [found.index(words(each.text)) for each in shown.sentences]
    assert places == sorted(places)


def test_a_plan_prints_itself() -> None:
    assert str(made()) == TEXT


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("plan", [made(), full()], ids=["plain", "full"])
def test_the_table_fits_its_width(width: int, plan: Plan) -> None:
    assert max(map(len, drawn(plan, width).splitlines())) <= width


def test_the_table_shows_blocks_splits_collectives_and_shares() -> None:
    text = drawn(made(), model="mine.py:make")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "mine.py:make on 4x8xh100, mesh node=4 x gpu0=2 x gpu1=4"
    assert "layers.* (2 times) 30.0%" in lines
    text = " ".join(lines)
    assert "attention.query, key batch/4 heads/8 bwd all-reduce node 4.0 MiB 20.0% linear" in text
    assert "head linear batch/4 vocab/8 fwd all-gather all 8.0 MiB 69.8%" in lines
    assert "data-parallel 2.50 s 2.50x 90.0 GiB DOES NOT FIT without recomputation" in lines
    assert "Meshes tried: 4x2x4 is best; 2x2x8 +25.0%." in lines


def test_everything_is_shown_on_demand() -> None:
    assert "small operators" in drawn(made())
    assert "small operators" not in drawn(made(), everything=True)
    assert "bwd all-reduce node 1.0 KiB" in drawn(made(), everything=True)


def test_a_word_for_a_dim_without_a_name_has_a_legend() -> None:
    plan = full()
    assert "v1_0" not in view(plan).legend
    named = [msgspec.structs.replace(op, split={"v1_0": 4}) for op in plan.operators]
    assert "v1_0: dims" in view(msgspec.structs.replace(plan, operators=tuple(named))).legend


def test_a_plan_that_does_not_fit_says_so_first_and_what_to_try() -> None:
    first, *rest = sentences(made(fits=False))
    assert first.text.startswith("No plan fits in memory; the smallest plan needs 55.0 GiB. Try")
    assert first.tone == "alarm"
    assert "proven the least if memory did not count" in " ".join(each.text for each in rest)
    assert contenders(made(fits=False))[0].fits is False


def test_a_plan_that_is_not_proven_states_its_gap() -> None:
    """The bound is below the additive cost, which it bounds, and is said to; never a step's."""
    assert proof(made(optimal=False)) == "at most 2.00% above the least (lower bound 980 ms)"
    (said,) = [each.text for each in sentences(full()) if "lower bound" in each.text]
    assert said.startswith("Additive cost, without overlap: 1.00 s (compute 600 ms,")


def test_the_simulated_step_is_told_with_its_rate() -> None:
    step = next(each.text for each in sentences(full()) if each.text.startswith("Step:"))
    assert step == (
        "Step: 800 ms, simulated with overlap, 20,480 tokens/s, MFU 50.0%, 67% of communication "
        "hidden; the peak of 60.0 GiB is reached at head backward."
    )


@pytest.mark.parametrize(
    ("dtype", "shape", "rate"),
    [
        ("int64", (8, 1024), ["8,192 tokens/s"]),
        ("int64", (8,), ["8 samples/s"]),
        ("float32", (8, 3, 224, 224), ["8 samples/s"]),
        ("float32", (), []),
    ],
)
def test_rates_are_of_tokens_or_of_samples(dtype: str, shape: tuple[int, ...], rate) -> None:
    entry = InputEntry("x", shape, (), dtype=dtype)
    assert list(throughput(msgspec.structs.replace(made(), inputs=(entry,)))) == rate


def test_hidden_is_never_less_than_nothing() -> None:
    simulation = msgspec.structs.replace(SIMULATION, exposed_seconds=0.3 * (1 + 1e-15))
    text = str(msgspec.structs.replace(full(), simulation=simulation))
    assert ", 0% of communication hidden" in words(text)


def test_baselines_are_told_apart_from_searches() -> None:
    assert (
        "It is 50.0% faster than fsdp, the fastest baseline that fits in memory (of 2 tried)."
        in words(str(full()))
    )
    large = tuple(msgspec.structs.replace(f, peak_bytes=90 * 2**30) for f in FINALISTS)
    said = words(str(msgspec.structs.replace(full(), finalists=large)))
    assert "None of the 2 baselines fits in memory." in said


def test_a_baseline_that_does_not_fit_says_whether_it_recomputes() -> None:
    again = msgspec.structs.replace(made().estimate, data_parallel_recomputes=True)
    text = words(str(msgspec.structs.replace(made(), estimate=again)))
    assert "data-parallel 2.50 s 2.50x 90.0 GiB DOES NOT FIT with recomputation" in text


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("short", 20, ["short"]),
        ("pre_feedforward_layernorm mul", 20, ["pre_feedforward_", "layernorm mul"]),
        ("a longer sentence of words", 12, ["a longer", "sentence of", "words"]),
        ("model.layers.post_attention", 10, ["model.", "layers.", "post_", "attention"]),
    ],
)
def test_lines_break_between_words_or_after_a_dot(text: str, width: int, lines: list[str]) -> None:
    at = [0, *breaks(text, width), len(text)]
    assert [text[a:b].rstrip() for a, b in itertools.pairwise(at)] == lines


def test_no_word_is_broken_in_the_table() -> None:
    plan = made()
    longer = msgspec.structs.replace(plan.operators[5], module="model.layers.0.pre_feed_layernorm")
    operators = (*plan.operators[:5], longer, *plan.operators[6:])
    text = drawn(msgspec.structs.replace(plan, operators=operators))
    assert "pre_feed_layernorm" in text.replace("\n", "")
