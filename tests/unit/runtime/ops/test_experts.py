"""Rows are sorted once for all operators of a block, and for their backward."""

from __future__ import annotations

import torch

from shardfold import zoo
from shardfold.capture import capture_program
from shardfold.operators import rules_of
from shardfold.runtime.lower import alone
from shardfold.runtime.ops import matrix
from shardfold.runtime.ops.experts import Sorted
from shardfold.runtime.parallelize import Settings, assemble
from shardfold.sharding import find_subdims


def test_a_block_of_experts_sorts_its_rows_once(monkeypatch):
    model, args, kwargs = zoo.build("mixtral-8x7b-tiny", device="cpu")
    program = capture_program(model, args, kwargs)
    lowered = alone(program, find_subdims(program.graph, rules_of(program.graph)))
    module = assemble(model, program, lowered, Settings())
    calls = []

    class Counted(Sorted):
        @classmethod
        def of(cls, expert, experts):
            calls.append(experts)
            return Sorted.of(expert, experts)

    monkeypatch.setattr(matrix, "Sorted", Counted)
    operators = [op for op in program.graph.ops if op.kind == "shardfold.expert_linear"]
    for _ in range(2):  # each step anew
        calls.clear()
        loss = module(*args, **kwargs)
        loss.backward()
        assert len(calls) == len({op.inputs[2] for op in operators}) < len(operators)
    torch.testing.assert_close(loss, model(*args, **kwargs))
