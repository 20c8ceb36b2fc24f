"""The halo of a sliding window against the rows that its outputs read, one by one."""

from __future__ import annotations

from itertools import product

import pytest

from shardfold.operators.convolution import Window


def rows_read(window: Window, low: int, high: int) -> set[int]:
    """The input rows that outputs `low` to `high` read, without the padding."""
    rows = {
        i * window.stride - window.padding + k * window.dilation
        for i in range(low, high)
        for k in range(window.kernel)
    }
    return {row for row in rows if 0 <= row < window.before}


def outputs(before: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    return (before + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


GEOMETRIES = list(product((12, 13), (1, 2, 3, 5), (1, 2, 3), (0, 1, 2), (1, 2)))


@pytest.mark.parametrize(("before", "kernel", "stride", "padding", "dilation"), GEOMETRIES)
def test_parts_read_their_own_rows_and_the_halo(
    before: int, kernel: int, stride: int, padding: int, dilation: int
) -> None:
    after = outputs(before, kernel, stride, padding, dilation)
    window = Window("h", before, max(after, 0), kernel, stride, padding, dilation)
    if not window.aligned:
        return
    left, right = window.halo
    for low in range(after):
        own = set(range(low * stride, (low + 1) * stride))
        reach = range(low * stride - left, (low + 1) * stride + right)
        assert rows_read(window, low, low + 1) <= own | set(reach)
    middle = after // 2
    read = rows_read(window, middle, middle + 1)
    if kernel > 1:
        assert min(read) == middle * stride - left
    if right:
        assert max(read) == (middle + 1) * stride + right - 1


def test_some_geometries_align_and_some_do_not() -> None:
    found = {
        Window("h", b, outputs(b, k, s, p, d), k, s, p, d).aligned
        for b, k, s, p, d in GEOMETRIES
        if outputs(b, k, s, p, d) > 0
    }
    assert found == {True, False}
