"""What a captured graph keeps: whole operators, roles, origins, ties, and nothing that is dead."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardfold.capture import capture
from shardfold.errors import ModelError
from shardfold.graph import Graph


def kinds(graph: Graph) -> list[str]:
    return [op.kind for op in graph.ops]


def named(graph: Graph, name: str) -> int:
    return next(i for i, t in enumerate(graph.tensors) if name in t.names)


class Everything(nn.Module):
    """One of each operator that must stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.norm = nn.LayerNorm(16)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens))
        x = x + self.bn(self.conv(x.unsqueeze(1))).mean(1)
        y = x.unflatten(-1, (2, 8)).transpose(1, 2)
        x = F.scaled_dot_product_attention(y, y, y).transpose(1, 2).flatten(2)
        x, _ = self.lstm(F.dropout(x, 0.1, self.training))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


TOKENS = torch.zeros(4, 8, dtype=torch.int64)


@pytest.fixture(scope="module")
def everything() -> Graph:
    return capture(Everything().eval(), (TOKENS,), {"labels": TOKENS})


@pytest.mark.parametrize(
    "kind",
    "embedding conv2d batch_norm layer_norm lstm linear scaled_dot_product_attention "
    "cross_entropy_loss dropout".split(),
)
def test_operators_stay_whole(everything: Graph, kind: str) -> None:
    assert kinds(everything).count(f"aten.{kind}") == 1


def test_a_model_in_eval_mode_is_captured_in_training_mode(everything: Graph) -> None:
    norm = next(op for op in everything.ops if op.kind == "aten.batch_norm")
    assert norm.attributes["training"] is True


def test_buffers_are_read_without_gradient(everything: Graph) -> None:
    for name in ("bn.running_mean", "bn.running_var"):
        tensor = everything.tensors[named(everything, name)]
        assert (tensor.role, tensor.requires_grad) == ("buffer", False)
    assert not any("num_batches_tracked" in t.name for t in everything.tensors)


def test_inputs_keep_their_names_and_types(everything: Graph) -> None:
    inputs = {t.name: str(t.type) for t in everything.tensors if t.role == "input"}
    assert inputs == {"tokens": "int64[4, 8]", "labels": "int64[4, 8]"}


def test_the_loss_is_the_last_result(everything: Graph) -> None:
    assert everything.loss == everything.ops[-1].results[0]
    assert everything.tensors[everything.loss].type.shape == ()


def test_attributes_have_their_defaults_filled_in(everything: Graph) -> None:
    loss = everything.ops[-1]
    assert loss.attributes["ignore_index"] == -100
    assert loss.attributes["reduction"] == 1


def test_an_operator_knows_its_module_and_line(everything: Graph) -> None:
    conv = next(op for op in everything.ops if op.kind == "aten.conv2d")
    assert conv.origin.module == "conv"
    attention = next(op for op in everything.ops if "attention" in op.kind)
    line = everything.ops[-1].origin.source
    assert attention.origin.source.startswith("test_capture.py:")
    assert line.startswith("test_capture.py:")
    assert attention.origin.source != line


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight
        self.spare = nn.Linear(3, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        unused = self.head(self.embed(tokens)).argmax(-1) + 1  # noqa: F841
        return F.cross_entropy(self.head(self.embed(tokens)).flatten(0, 1), tokens.flatten())


def test_a_tied_parameter_is_one_tensor_with_all_its_names() -> None:
    graph = capture(Tied(), (TOKENS,))
    weights = [t for t in graph.tensors if "embed.weight" in t.names or "head.weight" in t.names]
    assert [set(t.names) for t in weights] == [{"embed.weight", "head.weight"}]
    readers = graph.readers()[named(graph, "head.weight")]
    assert [graph.ops[i].kind for i, _ in readers] == ["aten.embedding", "aten.linear"]


def test_what_the_loss_does_not_need_is_dropped_but_parameters_stay_listed() -> None:
    graph = capture(Tied(), (TOKENS,))
    assert "aten.argmax" not in kinds(graph)
    assert kinds(graph).count("aten.linear") == 1
    assert named(graph, "spare.weight") in graph.parameters()


def test_frozen_parameters_have_no_gradient_and_stop_none() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].requires_grad_(False)
    graph = capture(model, (torch.zeros(2, 4),), loss=lambda y: y.sum())
    grads = {t.name: t.requires_grad for t in graph.tensors if t.role == "parameter"}
    assert grads == {
        "model.0.weight": True,
        "model.0.bias": True,
        "model.1.weight": False,
        "model.1.bias": False,
    }
    assert all(graph.tensors[op.results[0]].requires_grad for op in graph.ops)


def test_a_no_grad_region_gives_no_gradient() -> None:
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.linear(x)
            return F.mse_loss(self.linear(x), target)

    graph = capture(Region(), (torch.zeros(2, 4),))
    first, second = (op.results[0] for op in graph.ops if op.kind == "aten.linear")
    assert [graph.tensors[t].requires_grad for t in (first, second)] == [False, True]


def test_a_write_through_an_alias_with_a_no_grad_region_is_refused_by_name() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = self.linear(x).abs()
            y = self.linear(x)
            y.as_strided((4,), (1,)).add_(1.0)
            return (y * scale).sum()

    with pytest.raises(ModelError, match=r"add_.*writes in place.*no_grad"):
        capture(Both(), (torch.zeros(2, 4),))


def test_equal_models_have_equal_digests_and_others_do_not() -> None:
    def digest(width: int, batch: int, dtype: str | None = None) -> str:
        model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))
        return capture(model, (torch.zeros(batch, 4),), dtype=dtype, loss=torch.sum).digest()

    assert digest(8, 2) == digest(8, 2)
    assert len({digest(8, 2), digest(9, 2), digest(8, 3), digest(8, 2, "bf16")}) == 4


def test_a_dtype_holds_for_parameters_and_floating_inputs() -> None:
    graph = capture(nn.Linear(4, 4), (torch.zeros(2, 4),), dtype="bf16", loss=torch.sum)
    assert {t.type.dtype for t in graph.tensors} == {"bfloat16"}
    graph = capture(Tied(), (TOKENS,), dtype="fp16")
    assert {t.type.dtype for t in graph.tensors} == {"float16", "int64"}


@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: {"loss": v}, lambda v: (v, v * 2)])
def test_a_loss_may_come_alone_in_a_dict_or_first(wrap) -> None:  # type: ignore[no-untyped-def]
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> object:
            return wrap(self.linear(x).sum())

    graph = capture(Model(), (torch.zeros(2, 4),))
    assert kinds(graph) == ["aten.linear", "aten.sum"]


class Targets(nn.Module):
    """Distributions broadcast what they are asked with what they are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        chances = torch.distributions.Bernoulli(logits=self.up(x).expand(3, -1, -1))
        return -chances.log_prob((x.sum(-1, keepdim=True) > 0).to(x.dtype)).mean()


def test_what_is_broadcast_beside_a_gradient_has_none() -> None:
    graph = capture(Targets(), (torch.zeros(4, 4),))
    (loss,) = (op for op in graph.ops if "binary_cross_entropy" in op.kind)
    flows = {o.name: graph.tensors[o.tensor].requires_grad for o in loss.operands}
    assert flows == {"self": True, "target": False}
