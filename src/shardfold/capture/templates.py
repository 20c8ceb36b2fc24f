"""A block converted once, and copied wherever the block stands.

A template is a small graph with open inputs. Its tensors are numbered from 0; a copy renumbers
them, puts the given tensors for the inputs, and prefixes names with the block's path.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardfold.capture.program import Invocation, Source
from shardfold.graph import Op, Operand, Origin, Tensor


@dataclass(frozen=True, slots=True)
class Template:
    """The operators of a block, and which of its tensors are given and returned."""

    tensors: tuple[Tensor, ...]
    ops: tuple[Op, ...]
    calls: tuple[Invocation, ...]
    sources: dict[int, Source]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def copy(
        self,
        given: list[int],
        path: str,
        tensors: list[Tensor],
        ops: list[Op],
        calls: list[Invocation],
        sources: dict[int, Source],
    ) -> list[int]:
        """Append a copy of the block to a graph under construction; returns its outputs."""
        number = dict(zip(self.inputs, given, strict=True))
        for index, tensor in enumerate(self.tensors):
            if index in number:
                continue
            number[index] = len(tensors)
            tensors.append(replace(tensor, names=tuple(f"{path}.{n}" for n in tensor.names)))
            if index in self.sources:
                source = self.sources[index]
                sources[number[index]] = replace(source, name=f"{path}.{source.name}")
        for op in self.ops:
            ops.append(
                Op(
                    f"{path}.{op.name}",
                    op.kind,
                    tuple(Operand(o.name, number[o.tensor]) for o in op.operands),
                    tuple(number[r] for r in op.results),
                    op.attributes,
                    Origin(".".join(filter(None, (path, op.origin.module))), op.origin.source),
                )
            )
        calls.extend(self.calls)
        return [number[i] for i in self.outputs]
