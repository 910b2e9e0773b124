"""Two products over the same rows become one call where no matrix has to be kept for it, and give what they gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from gnncompile.passes.post_grad import fuse_gemm_pairs

own = torch.ops.gnncompile


def tensors(*rows: int) -> list[Tensor]:
    return [torch.randn(count, 4, dtype=torch.float64) for count in rows]


def at_once(dy: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
    dw = own.product_over_rows(dy, x).relu()
    dv, total = own.product_and_sums_over_rows(dy, y)
    return [dw + 1, dv, total.reshape(1, 4)]


def one_layer_behind_another(dy: Tensor, h: Tensor, x: Tensor) -> list[Tensor]:
    dv, total = own.product_and_sums_over_rows(dy, h)
    total, seen = total.reshape(1, 4), dv.reshape(-1)
    dh = own.product(dy, x[:4], None, h, False, False)
    return [dv, total, seen, own.product_over_rows(dh, x)]


def with_itself(dy: Tensor, x: Tensor) -> list[Tensor]:
    return [own.product_over_rows(dy, dy), own.product_over_rows(x, x)]


def sums_nobody_wants(dy: Tensor, x: Tensor) -> list[Tensor]:
    return [own.product_and_sums_over_rows(dy, x)[0], *own.product_and_sums_over_rows(x, dy)]


def three(dy: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
    return [own.product_over_rows(dy, x), own.product_over_rows(dy, y), own.product_over_rows(x, y)]


def of_other_rows(dy: Tensor, x: Tensor, dz: Tensor, z: Tensor) -> list[Tensor]:
    return [own.product_over_rows(dy, x), own.product_over_rows(dz, z), own.product_over_rows(x, dy)]


def kept_for_nothing_else(dy: Tensor, h: Tensor, x: Tensor) -> list[Tensor]:
    """To wait for the second product, h would have to be kept."""
    return [own.product_over_rows(dy, h), own.product_over_rows(dy.relu(), x)]


def kept_for_later(dy: Tensor, h: Tensor, x: Tensor) -> list[Tensor]:
    """The first product may wait, since h is read later anyway."""
    first = own.product_over_rows(dy, h)
    return [first, own.product_over_rows(dy.relu(), x), h.exp()]


def used_before(dy: Tensor, h: Tensor, x: Tensor) -> list[Tensor]:
    dv = own.product_over_rows(dy, h)
    dh = own.product(dy, x[:4], None, h, False, False)
    return [dv.reshape(2, 8).exp(), own.product_over_rows(dh, x)]


def of_the_first(dy: Tensor, x: Tensor) -> list[Tensor]:
    dv = own.product_over_rows(dy, x)
    return [dv, own.product_over_rows(dy @ dv, x)]


def added(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
    total = own.product(x, w, b, None, False, False)
    return own.product(y, w, total, y, True, True)


def added_to_a_written_sum(x: Tensor, w: Tensor, y: Tensor, z: Tensor) -> Tensor:
    total = own.product(x, w, y + z, None, False, True)
    return own.product(y, w, total, None, False, True)


def added_late(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """No wider than what it is of."""
    total = own.product(x.cos(), w, None, None, False, False)
    return own.product(y.relu(), w, total, None, False, True)


def added_late_of_wide_rows(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """Twice as wide rows would have to wait for the second product."""
    total = own.product(torch.cat([x, x], 1), torch.cat([w, w]), None, None, False, False)
    return own.product(y.relu(), w, total, None, False, True)


def added_late_of_rows_that_are_kept(x: Tensor, w: Tensor, y: Tensor) -> list[Tensor]:
    wide = torch.cat([x, x], 1)
    total = own.product(wide, torch.cat([w, w]), None, None, False, False)
    return [own.product(y.relu(), w, total, None, False, True), wide]


def clamped_before(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    total = own.product(x, w, None, None, True, False)
    return own.product(y, w, total, None, False, True)


def masked_before(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    total = own.product(x, w, None, y, False, False)
    return own.product(y, w, total, None, False, True)


def read_twice(x: Tensor, w: Tensor, y: Tensor) -> list[Tensor]:
    total = own.product(x, w, None, None, False, False)
    return [own.product(y, w, total, None, False, False), total]


SUMS: dict[str, tuple[Callable[..., Any], Sequence[int], bool]] = {
    "added": (added, (7, 4, 7, 7), True),
    "added to a written sum": (added_to_a_written_sum, (7, 4, 7, 7), True),
    "added late": (added_late, (7, 4, 7), True),
    "added late, of wide rows": (added_late_of_wide_rows, (7, 4, 7), False),
    "added late, of rows that are kept": (added_late_of_rows_that_are_kept, (7, 4, 7), True),
    "clamped before": (clamped_before, (7, 4, 7), False),
    "masked before": (masked_before, (7, 4, 7), False),
    "read twice": (read_twice, (7, 4, 7), False),
}
"""Graphs, the rows of their inputs, and whether their two products become one call."""


@pytest.mark.parametrize("name", SUMS)
def test_sums(name: str) -> None:
    function, rows, becomes_one = SUMS[name]
    given = tensors(*rows)
    gm = make_fx(function, tracing_mode="symbolic")(*given)
    expected = gm(*given)
    fuse_gemm_pairs.run(gm.graph)
    gm.graph.lint()
    gm.recompile()
    torch.testing.assert_close(gm(*given), expected)
    targets = [node.target for node in gm.graph.nodes]
    assert targets.count(own.sum_of_products.default) == becomes_one
    assert targets.count(own.product.default) == (0 if becomes_one else 2)


CASES: dict[str, tuple[Callable[..., Any], Sequence[int], int, int]] = {
    "at once": (at_once, (7, 7, 7), 1, 0),
    "one layer behind another": (one_layer_behind_another, (7, 7, 7), 1, 0),
    "with itself": (with_itself, (7, 7), 1, 0),
    "sums nobody wants": (sums_nobody_wants, (7, 7), 1, 0),
    "three": (three, (7, 7, 7), 1, 1),
    "of other rows": (of_other_rows, (7, 7, 9, 9), 1, 1),
    "kept for nothing else": (kept_for_nothing_else, (7, 7, 7), 0, 2),
    "kept for later": (kept_for_later, (7, 7, 7), 1, 0),
    "used before": (used_before, (7, 7, 7), 0, 2),
    "of the first": (of_the_first, (7, 7), 0, 2),
}
"""Graphs, the rows of their inputs, how many pairs become of their products, and how many are left alone."""


@pytest.mark.parametrize("name", CASES)
def test_pairs(name: str) -> None:
    function, rows, expected_pairs, alone = CASES[name]
    given = tensors(*rows)
    gm = make_fx(function, tracing_mode="symbolic")(*given)
    expected = gm(*given)
    fuse_gemm_pairs.run(gm.graph)
    gm.graph.lint()
    gm.recompile()
    torch.testing.assert_close(gm(*given), expected)
    targets = [node.target for node in gm.graph.nodes]
    assert targets.count(own.two_products_over_rows.default) == expected_pairs
    singles = (own.product_over_rows.default, own.product_and_sums_over_rows.default)
    assert sum(map(targets.count, singles)) == alone


def test_products_on_two_gpus_stay_apart() -> None:
    with FakeTensorMode():
        given = [torch.empty(7, 4, device=f"cuda:{k}") for k in (0, 0, 1, 1)]
        gm = make_fx(lambda a, b, c, d: [own.product_over_rows(a, b), own.product_over_rows(c, d)])(*given)
    fuse_gemm_pairs.run(gm.graph)
    assert not gm.graph.find_nodes(op="call_function", target=own.two_products_over_rows.default)


def test_products_of_two_dtypes_stay_apart() -> None:
    given = [torch.randn(7, 4, dtype=dtype) for dtype in (torch.float32, torch.float32, torch.bfloat16, torch.bfloat16)]
    gm = make_fx(lambda a, b, c, d: [own.product_over_rows(a, b), own.product_over_rows(c, d)])(*given)
    fuse_gemm_pairs.run(gm.graph)
    assert not gm.graph.find_nodes(op="call_function", target=own.two_products_over_rows.default)


def test_sizes_that_happen_to_be_equal_are_not_the_same() -> None:
    given = tensors(7, 7, 9, 9)
    gm = make_fx(of_other_rows, tracing_mode="symbolic")(*given)
    fuse_gemm_pairs.run(gm.graph)
    gm.recompile()
    other = tensors(5, 5, 6, 6)
    torch.testing.assert_close(gm(*other), of_other_rows(*other))
