"""The page holds its data safely, and the data are the plan's.

A plan shows itself in a notebook, and a model's names stay texts there.
"""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree

import msgspec
import pytest

import shardfold as sf
from shardfold.report.html import embedded, facts, to_html
from shardfold.report.summary_text import contenders
from shardfold.report.timeline import Piece, joined, simulated
from shardfold.simulate import Operator, Schedule, Segment, Task, timeline
from virtual.models import Language, tokens

HOSTILE = '</script><script>alert("x")</script><!-- \u2028 \ud83d\ude00 é & \' "'.encode(
    "utf-16", "surrogatepass"
).decode("utf-16")


@pytest.fixture(scope="module")
def plan() -> sf.Plan:
    return sf.plan(Language(), (tokens(),), {"labels": tokens()}, cluster="2x2xa100")


def renamed(plan: sf.Plan, text: str) -> sf.Plan:
    operators = tuple(
        msgspec.structs.replace(entry, name=f"{text}{k}", module=text, source=text)
        for k, entry in enumerate(plan.operators)
    )
    return msgspec.structs.replace(plan, operators=operators)


def data_of(page: str) -> dict:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(text)


def test_the_data_come_back(plan: sf.Plan) -> None:
    found = data_of(to_html(plan, model="language"))
    assert found["estimate"]["step"] == plan.estimate.step_seconds
    assert found["estimate"]["additive"] == plan.estimate.additive_seconds
    assert found["title"] == "language on 2x2xa100-80g"


def test_hostile_texts_stay_texts(plan: sf.Plan) -> None:
    page = to_html(renamed(plan, HOSTILE), title=HOSTILE)
    assert page.lower().count("<script") == 2  # the data and the program
    assert page.count("</script>") == 2
    assert "<script>alert" not in page
    assert data_of(page)["ops"][0]["source"] == HOSTILE


@pytest.mark.parametrize("text", ["</script>", "<!--", "&amp;", "\u2028", "\ud800", 'a"b\\'])
def test_embedded_data_are_ascii_without_markup(text: str) -> None:
    found = embedded({"a": text})
    assert found.isascii()
    assert not set("<>&") & set(found)
    assert json.loads(found) == {"a": text}


def test_half_a_character_can_be_written(plan: sf.Plan) -> None:
    page = to_html(renamed(plan, "a\ud800b"), title="a\ud800b")
    assert page.encode()


def test_the_page_asks_for_nothing(plan: sf.Plan) -> None:
    page = to_html(plan)
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#|data:,)""", page)
    assert "@import" not in page
    assert "url(" not in page
    # The one address in it is the name of SVG, which nobody fetches.
    assert set(re.findall(r"https?://[^\"'\s]+", page)) == {"http://www.w3.org/2000/svg"}


def test_times_add_up_to_the_step(plan: sf.Plan) -> None:
    found = facts(msgspec.structs.replace(plan, schedule=None), "t")
    total = math.fsum(op["total"] for op in found["ops"])
    assert total == pytest.approx(plan.estimate.additive_seconds, rel=1e-9)
    assert found["step"]["pieces"][-1][3] == pytest.approx(total, rel=1e-9)
    exposed = math.fsum(piece[4] for piece in found["step"]["pieces"])
    assert exposed == pytest.approx(plan.estimate.communication_seconds, rel=1e-9)


def test_a_plan_without_a_sketch_has_a_page(plan: sf.Plan) -> None:
    found = data_of(to_html(msgspec.structs.replace(plan, sketch=None)))
    assert found["faces"] == []
    assert len(found["ops"]) > 0


def test_a_plan_with_a_schedule_is_drawn_as_simulated(plan: sf.Plan) -> None:
    assert plan.schedule is not None
    found = facts(plan, "t")
    figures, _ = timeline(plan.schedule)
    ends = [piece[3] for piece in found["step"]["pieces"]]
    assert max(ends) == pytest.approx(figures.step_seconds, rel=1e-9)
    held = [sum(classes.values()) for _, classes in found["step"]["memory"]]
    assert max(held) == pytest.approx(figures.peak_bytes, rel=1e-9)


def test_a_comparison_adds_rivals_once(plan: sf.Plan) -> None:
    more = [
        {"name": "megatron", "seconds": 1.0, "bytes": 1.0},
        {"name": "data-parallel", "seconds": 9.0, "bytes": 9.0},
    ]
    bare = msgspec.structs.replace(plan, simulation=None, finalists=())
    names = [rival["name"] for rival in data_of(to_html(bare, rivals=more))["rivals"]]
    assert names == ["this plan", "data-parallel", "fsdp", "megatron"]


def test_pieces_too_short_to_be_seen_are_joined() -> None:
    pieces = [Piece("compute", "forward", k * 1e-3, (k + 1) * 1e-3, 0.0, "a") for k in range(9000)]
    found = joined(pieces, 9.0)
    assert len(found) <= 1800
    assert sum(piece.count for piece in found) == 9000
    assert found[-1].end_seconds == pytest.approx(9.0)


def test_to_html_is_the_plans_own(plan: sf.Plan) -> None:
    assert data_of(plan.to_html("mine"))["title"] == "mine"


def test_a_simulated_step_is_drawn_as_it_was() -> None:
    task = Task("forward", 1.0, takes={"activations": 8.0})
    back = Task("backward", 2.0, gives={"activations": 8.0})
    send = Task("all_reduce", 1.0, mode="behind", levels=(0,), bytes=4.0)
    block = Segment("block", (Operator("a", (task,), (back, send)),), 3)
    found = simulated(*timeline(Schedule(("gpu",), (block,), {"parameters": 2.0}, 1.0)))
    assert found.streams == ("compute", "gpu")
    work = [p.end_seconds - p.start_seconds for p in found.pieces if p.stream == "compute"]
    assert math.fsum(work) == pytest.approx(9.0)
    assert max(sum(held.values()) for _, held in found.memory) == 26.0
    assert sum(p.exposed_seconds for p in found.pieces) == pytest.approx(1.0)


def test_memory_keeps_its_peak_when_samples_are_left_out() -> None:
    task = Task("forward", 1.0, takes={"activations": 1.0})
    back = Task("backward", 1.0, gives={"activations": 1.0})
    blocks = tuple(Segment(f"b{k}", (Operator(f"o{k}", (task,), (back,)),)) for k in range(3000))
    found = simulated(*timeline(Schedule((), blocks, {}, 1.0)))
    assert len(found.memory) <= 702
    assert max(sum(held.values()) for _, held in found.memory) == 3000.0


def test_it_is_well_formed_and_has_the_totals(plan: sf.Plan) -> None:
    text = plan._repr_html_()
    root = ElementTree.fromstring(text.replace("<br>", "<br/>"))
    words = " ".join(root.itertext())
    for rival in contenders(plan):
        assert all(cell in words for cell in rival.words)


def test_names_are_escaped(plan: sf.Plan) -> None:
    operators = tuple(
        msgspec.structs.replace(entry, module="<script>alert(1)</script>")
        for entry in plan.operators
    )
    text = msgspec.structs.replace(plan, operators=operators)._repr_html_()
    assert "<script" not in text
    assert "&lt;script&gt;" in text
