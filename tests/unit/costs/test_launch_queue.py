"""What the host asks for: at once, or kernel by kernel where it waits inside."""

import msgspec
import numpy as np
import pytest

from shardfold.cluster import Mesh, parse
from shardfold.cluster.mesh import Axis
from shardfold.costs.launch_queue import asked_for
from shardfold.costs.models.measured import OTHERS, Measured
from shardfold.costs.profile.profile import HostEntry, sealed
from shardfold.costs.steps import Collective

from .models.test_measured import linear, made, profile, steps

__all__ = ["profile"]


def asked(graph, profile, phase="forward"):
    model = Measured(parse("1xh200"), Mesh(()), profile)
    _, found = steps(graph, 0)
    (step,) = [s for s in found if s.phase == phase]
    return list(asked_for(step, model)), step, model


def lacking(profile, *kinds):
    """The profile with these of the host's times for collectives and experts, and no others."""
    beside = ("shardfold.", "all_", "reduce_")
    host = [entry for entry in profile.host if not entry.kind.startswith(beside)]
    return sealed(msgspec.structs.replace(profile, host=(*host, *kinds)))


def test_an_operator_is_asked_for_at_once(profile):
    (one,), step, model = asked(linear(), profile)
    assert not one.waits
    assert one.device_seconds == model.device_seconds(step)[0]
    assert one.host_seconds == model.host_seconds(step)[0]


def test_experts_are_asked_for_one_by_one_after_a_wait(profile):
    shapes = {"x": (512, 64), "weight": (4, 96, 64), "expert": (512,)}
    graph = made("shardfold.expert_linear", shapes, (512, 96))
    found, step, model = asked(graph, lacking(profile))
    waits = [each.waits for each in found]
    assert waits == [False, True, False, False, False, False, False, False]
    once = model.host_of([OTHERS], "forward")
    assert [each.host_seconds for each in found[2:]] == [once] * 6
    assert sum(each.device_seconds for each in found) == model.device_seconds(step)[0]


def test_experts_that_were_measured_take_what_they_took(profile):
    shapes = {"x": (512, 64), "weight": (4, 96, 64), "expert": (512,)}
    kind = "shardfold.expert_linear"
    entries = [
        HostEntry(kind, 1e-3, 2e-3),
        HostEntry(f"{kind}.each", 1e-4, 2e-4),
        HostEntry(f"{kind}.sort", 3e-4, 3e-4),
    ]
    known = lacking(profile, *entries)
    found, step, model = asked(made(kind, shapes, (512, 96)), known)
    assert found[0].host_seconds == pytest.approx(3e-4)
    assert found[1].waits
    assert sum(each.host_seconds for each in found[2:]) == pytest.approx(1e-3 + 4 * 1e-4)
    assert model.host_seconds(step)[0] == pytest.approx(3e-4 + 1e-3 + 4 * 1e-4)


def test_a_collective_is_asked_for_as_it_was_measured(profile):
    entries = [
        HostEntry("all_gather", 1e-4, 2e-4),
        HostEntry("all_gather.shared", 1e-6, 2e-6),
        HostEntry("all_reduce", 3e-4, 3e-4),
        HostEntry("all_reduce.shared", 1e-5, 1e-5),
        HostEntry("all_to_all", 0.0, 0.0),
    ]
    known = lacking(profile, *entries)
    model = Measured(parse("8xh200"), Mesh((Axis("a", 8, 0),)), known)

    def host(kind, phase, size):
        rows = np.zeros(1, dtype=np.intp)
        step = Collective(phase, kind, (0,), rows, np.array([float(size)]))
        (one,) = asked_for(step, model)
        return one.host_seconds

    assert host("all_gather", "forward", 8 << 20) == 1e-4
    assert host("all_gather", "backward", 8 << 20) == 2e-4
    assert host("all_gather", "forward", 1024) == 1e-6  # in a bucket with others
    assert host("all_reduce", "backward", 1024) == 1e-5  # in a bucket with others
    assert host("all_reduce", "backward", 8 << 20) == 3e-4
    assert host("all_reduce", "forward", 1024) == 3e-4
    assert host("all_to_all", "forward", 1024) == 0.0  # measured as nothing
    once = model.host_of([OTHERS], "forward")
    assert host("reduce_scatter", "backward", 1024) == 10 * once  # not measured
