"""What the host asks for: at once, or kernel by kernel where it waits inside."""

from shardfold.cluster import Mesh, parse
from shardfold.costs.asking import asked_for
from shardfold.costs.measured import OTHERS, Measured

from .test_measured import linear, made, profile, steps

__all__ = ["profile"]


def asked(graph, profile, phase="forward"):
    model = Measured(parse("1xh200"), Mesh(()), profile)
    _, found = steps(graph, 0)
    (step,) = [s for s in found if s.phase == phase]
    return list(asked_for(step, model)), step, model


def test_an_operator_is_asked_for_at_once(profile):
    (one,), step, model = asked(linear(), profile)
    assert not one.waits
    assert one.device_seconds == model.device_seconds(step)[0]
    assert one.host_seconds == model.host_seconds(step)[0]


def test_experts_are_asked_for_one_by_one_after_a_wait(profile):
    shapes = {"x": (512, 64), "weight": (4, 96, 64), "expert": (512,)}
    found, step, model = asked(made("shardfold.expert_linear", shapes, (512, 96)), profile)
    waits = [each.waits for each in found]
    assert waits == [False, True, False, False, False, False, False, False]
    once = model.host_of([OTHERS], "forward")
    assert [each.host_seconds for each in found[2:]] == [once] * 6
    assert sum(each.device_seconds for each in found) == model.device_seconds(step)[0]
