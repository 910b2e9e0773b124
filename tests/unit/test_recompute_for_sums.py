"""What column sums read is computed for each reader only where that reads no more."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from gnncompile.passes.post_grad import recompute_for_sums

Rows = dict[str, Tensor]


def _rows() -> Rows:
    torch.manual_seed(0)
    names = {"x": (30, 4), "dy": (30, 4), "z": (30, 4), "scale": (4,), "shift": (4,), "mean": (4,), "right": (4, 4)}
    return {name: torch.randn(size) for name, size in names.items()}


def _gated(r: Rows) -> Tensor:
    """The gradient of a ReLU behind a batch norm."""
    return torch.where((r["x"] - r["mean"]) * r["scale"] + r["shift"] <= 0, 0.0, r["dy"] * r["shift"].abs())


def _norm(r: Rows) -> Tensor:
    g = _gated(r)
    return g - g.sum(0) - (r["x"] - r["mean"]) * (g * (r["x"] - r["mean"])).sum(0)


def _from_three(r: Rows) -> Tensor:
    g = _gated(r) * r["z"]
    return g - g.sum(0)


def _multiplied(r: Rows) -> Tensor:
    g = _gated(r)
    return g @ r["right"] - g.sum(0)


def _only_summed(r: Rows) -> Tensor:
    g = _gated(r)
    return g.sum(0) + (g * r["dy"]).sum(0)


def _of_few(r: Rows) -> Tensor:
    g = r["x"].relu() * r["dy"]
    return g - g.sum(0)


def _summed_in_rows(r: Rows) -> Tensor:
    g = _gated(r)
    return g - g.sum(1, keepdim=True)


def _returned(r: Rows) -> tuple[Tensor, Tensor]:
    g = _gated(r)
    return g, g.sum(0)


def _count(graph: fx.Graph) -> int:
    return len(graph.find_nodes(op="call_function", target=torch.ops.aten.where.self))


@pytest.mark.parametrize(
    ("function", "copies"),
    [
        (_norm, 3),
        *((f, 1) for f in (_from_three, _multiplied, _only_summed, _of_few, _summed_in_rows, _returned)),
    ],
)
def test_what_sums_read(function: Callable[[Rows], Tensor], copies: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GNNCOMPILE_KERNELS", "triton")
    rows = _rows()
    traced = make_fx(function, tracing_mode="fake")(rows)
    before = _count(traced.graph)
    recompute_for_sums.run(traced.graph)
    traced.graph.lint()
    traced.recompile()
    assert _count(traced.graph) == before * copies
    torch.testing.assert_close(traced(rows), function(rows), rtol=0, atol=0)


def test_cpus_are_left_alone():
    traced = make_fx(_norm, tracing_mode="fake")(_rows())
    recompute_for_sums.run(traced.graph)
    assert _count(traced.graph) == 1
