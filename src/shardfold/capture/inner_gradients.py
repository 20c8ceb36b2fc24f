"""Gradients that forward asks for itself (a gradient penalty, forces of an energy), traced.

A trace keeps operators as they are called, while autograd works on those that they are made of:
`linear` is a transpose and a product, and the gradient reads the transpose, which no trace has. So
a model that calls `torch.autograd.grad` is traced once more, in the operators that autograd knows.
What it computes for a gradient is then traced like anything else, and has gradients of its own.

Autograd keeps some results by itself (that of tanh, say): the same memory as a tensor of the
trace, but another object. It is taken for that tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree as pytree


class GradientAskedError(Exception):
    """Forward asks for a gradient: it must be traced in the operators that autograd knows."""


@contextmanager
def in_autograds_operators() -> Iterator[None]:
    """Within this, a trace is of what composite operators are made of."""
    call = proxy_tensor.proxy_call
    known: dict[Any, Tensor] = {}  # traced, by their memory

    def called(mode: Any, function: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        def traced(tensor: Tensor) -> Tensor:
            if proxy_tensor.has_proxy_slot(tensor, mode.tracer):
                return tensor
            return known.get(_memory(tensor), tensor)

        args, kwargs = pytree.tree_map_only(Tensor, traced, (args, kwargs))
        found = call(mode, function, False, args, kwargs)
        leaves = pytree.tree_leaves(found)
        known.update({_memory(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)})
        return found

    with patch.object(proxy_tensor, "proxy_call", called):
        yield


def _memory(tensor: Tensor) -> Any:
    where = tensor.untyped_storage()._cdata, tensor.storage_offset()
    return where, tensor.shape, tensor.stride(), tensor.dtype
