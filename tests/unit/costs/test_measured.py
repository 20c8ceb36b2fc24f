"""What the host asks for: at once, or kernel by kernel where it waits inside."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from shardfold.cluster import Mesh, parse
from shardfold.cluster.mesh import Axis
from shardfold.costs.measured import (
    OTHERS,
    Asked,
    Measured,
    asked_for,
    check_profile,
    queued_seconds,
)
from shardfold.costs.model import Roofline, is_beside
from shardfold.costs.operator_steps import Tensors, operator_steps
from shardfold.costs.parameters import storages, sum_up_steps
from shardfold.costs.profile import CollectiveEntry, HostEntry, Profile, Table, load, sealed
from shardfold.costs.steps import Collective, Compute
from shardfold.errors import ProfileError
from shardfold.graph import Graph, Op, Operand, Tensor, TensorType
from shardfold.operators import Kernel, rules_of
from shardfold.sharding import find_subdims, space_of

H200 = Path(__file__).parents[3] / "benchmarks" / "profiles" / "h200.json"


@pytest.fixture(scope="module")
def profile() -> Profile:
    return load(H200)


def linear(dtype: str = "bfloat16", out: int = 4096) -> Graph:
    """Rows of 4096 to `out` features, read twice, summed."""
    tensors = (
        Tensor(("x",), TensorType((4096, 4096), dtype), "parameter", True),
        Tensor(("w",), TensorType((out, 4096), dtype), "parameter", True),
        Tensor(("y",), TensorType((4096, out), dtype), "activation", True),
        Tensor(("z",), TensorType((4096, out), dtype), "activation", True),
        Tensor(("loss",), TensorType((), dtype), "activation", True),
    )
    ops = (
        Op("y", "aten.linear", (Operand("input", 0), Operand("weight", 1)), (2,)),
        Op("z", "aten.mul", (Operand("self", 2), Operand("other", 2)), (3,)),
        Op("loss", "aten.sum", (Operand("self", 3),), (4,), {"dim": (), "keepdim": False}),
    )
    return Graph(tensors, ops, 4)


ALONE = Mesh(())


def steps(graph: Graph, index: int, mesh: Mesh = ALONE):
    subdims = find_subdims(graph, rules_of(graph))
    space = space_of(subdims.rules[index], mesh)
    return space, operator_steps(space, Tensors.of(graph, subdims, index), mesh).steps


def families(graph: Graph, index: int, phase: str) -> list[str]:
    _, found = steps(graph, index)
    (step,) = [s for s in found if s.phase == phase]
    return [kernel.family for kernel in step.work.kernels(phase)]


def test_a_linear_layer_is_one_product_forward_and_two_backward() -> None:
    assert families(linear(), 0, "forward") == ["matmul.nt"]
    assert families(linear(), 0, "backward") == ["matmul.nn", "matmul.tn"]
    assert families(linear(out=4097), 0, "forward") == ["matmul.nt.odd"]
    assert families(linear(out=4098), 0, "forward") == ["matmul.nt.even"]


def made(kind: str, operands: dict[str, tuple[int, ...]], result: tuple[int, ...], **attributes):
    """A graph of one operator on trained halves; what is called an index or label is none."""
    tensors, given = [], []
    for name, shape in operands.items():
        whole = name in ("expert", "target")
        dtype = "int64" if whole else "bfloat16"
        given.append(Operand(name, len(tensors)))
        tensors.append(Tensor((name,), TensorType(shape, dtype), "parameter", not whole))
    tensors.append(Tensor(("y",), TensorType(result, "bfloat16"), "activation", True))
    op = Op("y", kind, tuple(given), (len(given),), attributes)
    return Graph(tuple(tensors), (op,), len(given))


def kernels(graph: Graph, phase: str, mesh: Mesh, split: str):
    """The kernels of the operator where the mesh's one axis splits that factor, or nothing."""
    space, found = steps(graph, 0, mesh)
    (step,) = [s for s in found if getattr(s, "work", None) is not None and s.phase == phase]
    wanted = space.rule.factors.index(split) if split else -1
    row = next(k for k, config in enumerate(space.configs) if config.tolist() == [wanted])
    return [
        (
            k.family,
            k.is_awaited,
            [float(np.broadcast_to(s, len(space.configs))[row]) for s in k.sizes],
        )
        for k in step.work.kernels(phase)
    ]


TWO = Mesh((Axis("a", 2, 0),))


def test_a_device_s_own_features_say_how_a_product_reads_them() -> None:
    graph = made("aten.linear", {"input": (512, 1024), "weight": (30522, 1024)}, (512, 30522))
    whole = {k[0]: k[2][0] for k in kernels(graph, "forward", TWO, "")}
    assert whole["matmul.nt.even"] == 512
    assert whole["matmul.nt.odd"] == 0  # that of the other configurations
    split = {k[0]: k[2][0] for k in kernels(graph, "forward", TWO, "n")}
    assert split["matmul.nt.odd"] == 512  # 15,261 classes each
    assert split["matmul.nt.even"] == 0


def test_experts_sort_their_rows_and_take_a_product_each() -> None:
    shapes = {"x": (512, 64), "weight": (4, 96, 64), "expert": (512,)}
    graph = made("shardfold.expert_linear", shapes, (512, 96))
    whole = kernels(graph, "forward", TWO, "")
    assert [k[0] for k in whole] == ["vector", "lookup.forward", "matmul.nt", "lookup.forward"]
    assert [k[1] for k in whole] == [True, False, False, False]  # the host waits for the order
    assert whole[2][2] == [128, 96, 64]
    again = kernels(graph, "backward", TWO, "")
    assert not any(k[1] for k in again)  # nor again for it
    parts = kernels(graph, "forward", TWO, "e")
    assert parts[1][2] == [256, 64]  # the rows of this device's experts
    assert parts[2][2] == [128, 96, 64]


def test_batch_norm_of_a_part_has_a_table_of_its_own() -> None:
    shapes = {"input": (8, 4, 6, 6), "weight": (4,), "bias": (4,)}
    graph = made("aten.batch_norm", shapes, (8, 4, 6, 6), training=True, eps=1e-5)
    busy = {
        split: [k[0] for k in kernels(graph, "backward", TWO, split) if k[2][0]]
        for split in ("", "b", "c")
    }
    assert busy == {
        "": ["batch_norm.backward"],
        "b": ["split_norm.backward"],
        "c": ["batch_norm.backward"],
    }
    forward = [k[0] for k in kernels(graph, "forward", TWO, "b") if k[2][0]]
    assert forward == ["split_norm.forward", "vector"]  # and the running statistics


def test_a_loss_over_classes_in_parts_is_passes_in_float32() -> None:
    graph = made(
        "aten.cross_entropy_loss",
        {"self": (64, 1000), "target": (64,)},
        (),
        reduction=1,
        ignore_index=-100,
        label_smoothing=0.0,
    )
    whole = [k[0] for k in kernels(graph, "forward", TWO, "") if k[2][0]]
    parts = [k for k in kernels(graph, "forward", TWO, "c") if k[2][0]]
    assert whole == ["loss.forward"]
    assert [k[0] for k in parts] == ["cast", "strided", "vector", "sum_rows", "sum_rows"]
    assert parts[1][2] == [2 * 4 * 64 * 500]


def test_the_update_of_a_dtensor_takes_the_host_longer(profile: Profile) -> None:
    dear = HostEntry("update.parts", 1e-3, 1e-3)
    known = sealed(msgspec.structs.replace(profile, host=(*profile.host, dear)))
    zeros = np.zeros(1)
    step = Compute("update", "vector", "bfloat16", zeros, zeros, 1, None, zeros + 8, "adamw")
    eight = parse("8xh200")
    assert Measured(eight, eight.meshes()[0], known).host_seconds(step)[0] == 1e-3
    assert Measured(eight, ALONE, known).host_seconds(step)[0] < 1e-3


def test_two_readers_add_up_their_gradients() -> None:
    graph = linear()
    _, found = steps(graph, 1)
    (step,) = [s for s in found if s.phase == "backward"]
    passes = step.work.kernels("backward")
    assert sum(kernel.times for kernel in passes) == 3.0  # two products, one addition


def test_a_large_product_runs_near_the_best_rate_measured(profile: Profile) -> None:
    model = Measured(parse("1xh200"), Mesh(()), profile)
    _, found = steps(linear(), 0)
    seconds = float(model.device_seconds(found[0])[0])
    rate = 2 * 4096**3 / seconds
    assert 0.7 < rate / profile.rates.flops["bfloat16"] <= 1.0
    assert model.notes == set()


def test_a_small_operator_adds_the_devices_time_and_the_host_is_slower(profile: Profile) -> None:
    model = Measured(parse("1xh200"), Mesh(()), profile)
    _, found = steps(linear(out=8), 0)
    assert model.compute_seconds(found[0])[0] == model.device_seconds(found[0])[0]
    assert model.host_seconds(found[0])[0] > model.device_seconds(found[0])[0]  # simulated


def test_a_split_product_is_priced_by_its_part(profile: Profile) -> None:
    mesh = Mesh((Axis("gpu", 8, 0),))
    model = Measured(parse("8xh200"), mesh, profile)
    space, found = steps(linear(), 0, mesh)
    seconds = model.device_seconds(found[0])
    whole = seconds[(space.configs[:, 0] == -1).argmax()]
    parts = seconds[space.configs[:, 0] >= 0]
    assert np.all(parts < whole / 4)
    assert np.all(parts > whole / 12)


def test_a_profile_of_another_device_is_refused(profile: Profile) -> None:
    with pytest.raises(ProfileError, match=r"is of NVIDIA H200.*has H100"):
        Measured(parse("8xh100"), Mesh(()), profile)
    with pytest.raises(ProfileError, match=r"has generic CPU"):
        Measured(parse("4xcpu"), Mesh(()), profile)


def test_a_dtype_that_was_not_measured_is_refused(profile: Profile) -> None:
    check_profile(profile, parse("1xh200"), linear())
    with pytest.raises(ProfileError, match=r"no products in float64; it has bfloat16, float32"):
        check_profile(profile, parse("1xh200"), linear("float64"))


def test_a_collective_that_was_not_measured_is_priced_by_the_links_and_noted(
    profile: Profile,
) -> None:
    mesh = Mesh((Axis("gpu", 8, 0),))
    model = Measured(parse("8xh200"), mesh, profile)
    step = Collective("forward", "all_reduce", (0,), np.zeros(1, np.intp), np.array([1e9]))
    assert model.collective_seconds(step)[0] > 0
    assert any("all_reduce on 8 devices was not measured" in note for note in model.notes)


def test_a_measured_collective_is_interpolated_and_grows_beyond(profile: Profile) -> None:
    import msgspec

    entry = CollectiveEntry("all_reduce", 8, 1, (1e3, 1e6), (1e-5, 1e-3))
    known = sealed(msgspec.structs.replace(profile, collectives=(entry,)))
    mesh = Mesh((Axis("gpu", 8, 0),))
    model = Measured(parse("8xh200"), mesh, known)
    sizes = np.array([1e3, 10**4.5, 1e6, 4e6])
    step = Collective("forward", "all_reduce", (0,), np.arange(4), sizes)
    assert model.collective_seconds(step) == pytest.approx([1e-5, 1e-4, 1e-3, 4e-3])
    assert model.notes == set()


def test_rows_and_columns_are_those_of_the_part() -> None:
    """A normalisation split by rows keeps its columns."""
    kind = TensorType((4096, 1024), "bfloat16")
    one = TensorType((1024,), "bfloat16")
    tensors = (
        Tensor(("x",), kind, "parameter", True),
        Tensor(("w",), one, "parameter", True),
        Tensor(("b",), one, "parameter", True),
        Tensor(("y",), kind, "activation", True),
        Tensor(("loss",), TensorType((), "bfloat16"), "activation", True),
    )
    names = ("input", "weight", "bias")
    operands = tuple(Operand(name, k) for k, name in enumerate(names))
    ops = (
        Op("y", "aten.layer_norm", operands, (3,), {"normalized_shape": (1024,)}),
        Op("loss", "aten.sum", (Operand("self", 3),), (4,), {"dim": (), "keepdim": False}),
    )
    mesh = Mesh((Axis("gpu", 8, 0),))
    space, found = steps(Graph(tensors, ops, 4), 0, mesh)
    (kernel,) = found[0].work.kernels("forward")
    by_rows = [space.rule.base(f) == "i0" if f >= 0 else False for f in space.configs[:, 0]]
    rows, columns = (size[by_rows] for size in kernel.sizes)
    assert rows == pytest.approx([512.0])
    assert columns == pytest.approx([1024.0])


def test_gradients_of_passes_are_added_up_as_a_pass_over_memory(profile: Profile) -> None:
    """As long as an addition of as many elements, and no note that anything is unknown."""
    notes: set[str] = set()
    kind, mesh = TensorType((4096, 4096), "bfloat16"), ALONE
    storage = storages([np.zeros((1, 0), dtype=np.int8)], (4096, 4096), (0, 1), mesh)
    (step,) = sum_up_steps(storage, (4096, 4096), kind, mesh).steps
    model = Measured(parse("1xh200"), mesh, profile, notes)
    added = Kernel("vector", "bfloat16", (np.array([3.0 * 2 * 4096**2]),))
    assert model.device_seconds(step)[0] == pytest.approx(model.kernel_seconds(added)[0])
    assert not notes


def on_cpu(profile: Profile, processes: int) -> Profile:
    machine = msgspec.structs.replace(profile.machine, kind="cpu", processes=processes)
    return sealed(msgspec.structs.replace(profile, machine=machine))


@pytest.mark.parametrize(("cluster", "level"), [("2xcpu", 0), ("2x2xcpu", 0), ("2x2xcpu", 1)])
@pytest.mark.parametrize("processes", [1, 2])
def test_sending_within_a_machine_takes_the_processor(profile, cluster, level, processes) -> None:
    target = parse(cluster)
    mesh = Mesh((Axis("a", 2, level),))
    rows = np.zeros(1, dtype=np.intp)
    step = Collective("backward", "all_reduce", (0,), rows, np.array([1e6]))
    within = level == len(target.levels) - 1
    model = Measured(target, mesh, on_cpu(profile, processes))
    assert model.takes_processor(step) == (within and processes > 1)
    assert is_beside(model, step) != model.takes_processor(step)
    assert is_beside(Roofline(target, mesh), step)


def test_a_cpu_updates_one_parameter_after_the_other(profile) -> None:
    grid = (8.0 * 1024, 8.0 * 2**20)
    table = Table("update.adamw", "float32", (grid,), (8e-6, 8e-2))
    others = tuple(t for t in profile.tables if t.family != "update.adamw")
    known = msgspec.structs.replace(on_cpu(profile, 2), tables=(*others, table))
    model = Measured(parse("2xcpu"), TWO, sealed(known))
    items = np.array([1024.0, 2.0**20])
    step = Compute("update", "vector", "float32", items, items, optimizer="adamw", items=items)
    # What the smallest takes is the asking, which is counted by itself.
    assert model.device_seconds(step) == pytest.approx([0.0, (8e-2 - 8e-6) / 8])


__all__ = ["profile"]


def asked(graph, profile, phase="forward", grouped=True):
    cluster = parse("1xh200")
    cluster = replace(cluster, device=replace(cluster.device, grouped_products=grouped))
    model = Measured(cluster, Mesh(()), profile)
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


@pytest.mark.parametrize(("grouped", "products"), [(False, 4), (True, 1)])
def test_experts_are_asked_for_one_by_one_or_at_once_after_a_wait(profile, grouped, products):
    shapes = {"x": (512, 64), "weight": (4, 96, 64), "expert": (512,)}
    graph = made("shardfold.expert_linear", shapes, (512, 96))
    found, step, model = asked(graph, lacking(profile), grouped=grouped)
    waits = [each.waits for each in found]
    assert waits == [False, True, *[False] * (products + 2)]
    once = model.host_of([OTHERS], "forward")
    assert [each.host_seconds for each in found[2:]] == [once] * (products + 2)
    whole = model.device_seconds(step)[0]
    assert sum(each.device_seconds for each in found) == pytest.approx(whole)


@pytest.mark.parametrize(("grouped", "products"), [(False, 4), (True, 1)])
def test_experts_that_were_measured_take_what_they_took(profile, grouped, products):
    shapes = {"x": (512, 64), "weight": (4, 96, 64), "expert": (512,)}
    kind = "shardfold.expert_linear"
    entries = [
        HostEntry(kind, 1e-3, 2e-3),
        HostEntry(f"{kind}.each", 1e-4, 2e-4),
        HostEntry(f"{kind}.sort", 3e-4, 3e-4),
    ]
    known = lacking(profile, *entries)
    found, step, model = asked(made(kind, shapes, (512, 96)), known, grouped=grouped)
    assert found[0].host_seconds == pytest.approx(3e-4)
    assert found[1].waits
    each_seconds = products * 1e-4
    assert sum(each.host_seconds for each in found[2:]) == pytest.approx(1e-3 + each_seconds)
    assert model.host_seconds(step)[0] == pytest.approx(3e-4 + 1e-3 + each_seconds)


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


def test_a_slow_host_and_a_slow_device() -> None:
    assert queued_seconds([Asked(3.0, 1.0)] * 4) == 13.0  # the host's, and the last kernel
    assert queued_seconds([Asked(1.0, 3.0)] * 4) == 13.0  # the first launch, and the device's


def test_the_host_runs_ahead_of_a_long_kernel() -> None:
    small, large = Asked(1.0, 0.5), Asked(1.0, 10.0)
    assert queued_seconds([large, *[small] * 5]) == 13.5
    assert queued_seconds([*[small] * 5, large]) == 16.0


def test_waiting_brings_both_together() -> None:
    assert queued_seconds([Asked(1.0, 5.0), Asked(0.0, 2.0, waits=True), Asked(1.0, 1.0)]) == 10.0


def test_nothing_takes_no_time() -> None:
    assert queued_seconds([]) == 0.0
