"""Pooling: batch and channels split freely, space where windows align with parts.

`b c h w -> b c h w`, h and w being the output's; a window wider than its stride exchanges a halo.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from shardfold.operators.call import Call
from shardfold.operators.kernels import Access, Kernel, KernelMaker, LocalWork, memory_pass, way
from shardfold.operators.notation import Rule
from shardfold.operators.operator import Extra, Operator
from shardfold.operators.windows import SPATIAL, each, halos, windows


def _lead(call: Call, rank: int) -> list[str]:
    return ["b", "c"][rank + 2 - len(call.inputs[0].shape) :]


def _pool(call: Call, rank: int, *, space: bool, **properties: Any) -> Rule:
    """A pool with windows over the last `rank` dims; `space` says whether they may split."""
    before = call.inputs[0].shape
    kernel = each(call.attribute("kernel_size"), rank)
    dims = windows(call, before, kernel)
    lead = _lead(call, rank)
    sizes = dict(zip(lead, before, strict=False)) | {d.factor: d.after for d in dims}
    split = [dim for dim in dims if space and dim.aligned]
    ins = [dim.factor if dim in split else "." for dim in dims]
    return call.rule(
        {call.op.operands[0].name: " ".join([*lead, *ins])},
        " ".join([*lead, *(dim.factor for dim in dims)]),
        sizes=sizes,
        flops=float(math.prod(kernel)),
        whole=frozenset(dim.factor for dim in dims if dim not in split),
        exchanges=halos(dims, lead, sizes, call.inputs[0].item_bytes) if space else (),
        least={dim.factor: dim.least for dim in dims},
        saves=(call.op.operands[0].name,),
        backward=1.0,
        **properties,
    )


def _max(rank: int) -> Callable[[Call], Rule]:
    # Autograd keeps where each maximum was; positions count in the whole plane, so an operator
    # that returns them does not split space.
    return lambda call: _pool(call, rank, space=len(call.results) == 1, saves_results=True)


def _average(rank: int) -> Callable[[Call], Rule]:
    return lambda call: _pool(call, rank, space=True, linear=(0,))


def _adaptive(call: Call, rank: int, *, mean: bool) -> Rule:
    """To size 1 it is a mean over the dim; to a divisor of the size, windows without overlap."""
    before, after = call.inputs[0].shape, call.results[0].shape
    lead = _lead(call, rank)
    sizes = dict(zip(lead, before, strict=False))
    ins, outs, whole, flops = list(lead), list(lead), set(), 1.0
    for factor, n, m in zip(SPATIAL[-rank:], before[-rank:], after[-rank:], strict=True):
        sizes[factor] = n if m == 1 else m
        ins.append(factor if n % m == 0 else ".")
        outs.append("." if m == 1 else factor)
        flops *= 1.0 if m == 1 else n / m
        if not mean or n % m:
            whole.add(factor)
    return call.rule(
        {call.op.operands[0].name: " ".join(ins)},
        " ".join(outs),
        sizes=sizes,
        flops=flops,
        whole=frozenset(whole),
        linear=(0,) if mean else (),
        saves=() if mean and set(after[-rank:]) == {1} else (call.op.operands[0].name,),
        saves_results=not mean,
        backward=1.0,
    )


def _adaptive_pool(rank: int, *, mean: bool) -> Callable[[Call], Rule]:
    return lambda call: _adaptive(call, rank, mean=mean)


def _unsupported(call: Call) -> frozenset[str]:
    """Space where windows are rounded up, or where an average does not count its padding."""
    padded = any(each(call.attribute("padding", 0), 1))
    uncounted = not call.attribute("count_include_pad", True) or bool(
        call.attribute("divisor_override", 0)
    )
    rounds_up = bool(call.attribute("ceil_mode", False))
    return frozenset(SPATIAL if rounds_up or (padded and uncounted) else ())


def _kernels(kind: str) -> KernelMaker:
    def make(work: LocalWork, phase: str) -> list[Kernel]:
        size = work.operand_bytes(0) + work.result_bytes(0)
        return [memory_pass(size, work.dtype, f"{kind}_pool.{way(phase)}")]

    return make


def _places(call: Call, access: Access) -> tuple[Extra, ...]:
    """Where each maximum was, where that is no result."""
    return (Extra(-1, 8.0),) if len(call.results) == 1 else ()


POOL = Operator(local="own form", unsupported=_unsupported)
MAXIMUM = replace(POOL, saves_beside=True, extras=_places)


def _pools(rank: int) -> dict[str, Operator]:
    return {
        f"aten.max_pool{rank}d": replace(MAXIMUM, rule=_max(rank)),
        f"aten.max_pool{rank}d_with_indices": replace(MAXIMUM, rule=_max(rank)),
        f"aten.avg_pool{rank}d": replace(POOL, rule=_average(rank)),
        f"aten.adaptive_avg_pool{rank}d": replace(POOL, rule=_adaptive_pool(rank, mean=True)),
        f"aten.adaptive_max_pool{rank}d": replace(MAXIMUM, rule=_adaptive_pool(rank, mean=False)),
    }


PLANES = _pools(2)  # windows in a plane have been measured, others have not
TABLE: Mapping[str, Operator] = {
    **_pools(1),
    **PLANES,
    **_pools(3),
    "aten.max_pool2d": replace(PLANES["aten.max_pool2d"], kernels=_kernels("max")),
    "aten.avg_pool2d": replace(
        PLANES["aten.avg_pool2d"], kernels=_kernels("avg"), launched_as="aten.max_pool2d"
    ),
    "aten.adaptive_avg_pool2d": replace(
        PLANES["aten.adaptive_avg_pool2d"], kernels=_kernels("avg")
    ),
}
