"""Every reduction in every dtype, on every awkward graph, against eager in float64: results and all gradients.

The rest (widths, layouts of features in memory, types of indices, messages, what runs the kernels) is combined such
that nearly any two settings of :data:`PAIRS` meet. Results are right to the rounding of their dtype.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing, global_mean_pool
from torch_geometric.utils import softmax

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

import gnncompile
from gnncompile.testing import awkward
from tests.harness import kernels

pytestmark = triton_regions.INTERPRETED
DTYPES = {"float64": 1e-9, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
WIDTHS = [(), (0,), (1,), (3,), (7,), (64,), (100,), (257,), (2, 3), (2, 3, 4)]

# -- layers -------------------------------------------------------------------------------------------------------

MESSAGES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "source": lambda x_i, x_j, w: x_j,
    "weighted": lambda x_i, x_j, w: x_j * w,
    "both ends": lambda x_i, x_j, w: torch.tanh(x_i * x_j) - w,
}


class Layer(MessagePassing):
    """Reduces messages, by a pool over destinations too, or attends to them; ``"edges"`` returns them."""

    def __init__(self, reduce: str, message: str) -> None:
        super().__init__(aggr=reduce if reduce in ("sum", "mean", "max", "min", "mul", "std") else "sum", node_dim=0)
        self.reduce, self.what = reduce, message

    def forward(self, x_src: Tensor, x_dst: Tensor, edge_index: Tensor, w: Tensor) -> Tensor:
        if self.reduce == "edges":
            return self.message(x_dst[edge_index[1]], x_src[edge_index[0]], w, edge_index[1], None, None)
        if self.reduce == "pool":
            made = self.message(x_dst[edge_index[1]], x_src[edge_index[0]], w, edge_index[1], None, None)
            return global_mean_pool(made, edge_index[1], x_dst.size(0))
        size = (x_src.size(0), x_dst.size(0))
        return self.propagate(edge_index, x=(x_src, x_dst), w=w, size=size)

    def message(
        self, x_i: Tensor, x_j: Tensor, w: Tensor, index: Tensor, ptr: Tensor | None, size_i: int | None
    ) -> Tensor:
        made = MESSAGES[self.what](x_i, x_j, w)
        if self.reduce == "attention":
            made = made * softmax((x_i + x_j) * 0.5, index, ptr, size_i)
        return made


REDUCTIONS = ("sum", "mean", "max", "min", "mul", "std", "attention", "edges", "pool")

# -- settings -----------------------------------------------------------------------------------------------------

SETTINGS: dict[str, list[Any]] = {
    "reduce": list(REDUCTIONS),
    "dtype": list(DTYPES),
    "width": WIDTHS,
    "message": list(MESSAGES),
    "memory": ["contiguous", "transposed", "every other", "expanded", "inside another"],
    "index": [torch.int64, torch.int32],
    "kernels": ["reference", "cpp", "cpp", "triton"],
}
PAIRS = [
    *[("dtype", other) for other in SETTINGS if other != "dtype"],
    *[("kernels", other) for other in ("reduce", "width", "message", "memory")],
    *[("message", "reduce"), ("memory", "width"), ("index", "reduce")],
]


def combinations() -> list[dict[str, Any]]:
    """Every reduction in every dtype; the rest as it meets most that it has not met before."""
    choose, met, found = random.Random(0), set[tuple[Any, ...]](), []
    for reduce, dtype in product(SETTINGS["reduce"], SETTINGS["dtype"]):
        candidates = []
        for _ in range(100):
            one = {name: choose.choice(values) for name, values in SETTINGS.items()}
            one |= {"reduce": reduce, "dtype": dtype}
            if reduce == "pool" and len(one["width"]) != 1:
                continue  # PyG pools the last axis but one
            candidates.append(one)
        best = max(candidates, key=lambda one: len(pairs(one) - met))
        met |= pairs(best)
        found.append(best)
    return found


def pairs(one: dict[str, Any]) -> set[tuple[Any, ...]]:
    return {(a, one[a], b, one[b]) for a, b in PAIRS}


COMBINATIONS = combinations()
RUNS = [one for one in COMBINATIONS if one["kernels"] != "triton" or not triton_regions.HAS_GPU]
if triton_regions.HAS_GPU:  # where it takes all of them
    RUNS += [pytest.param({**one, "kernels": "triton"}, marks=pytest.mark.gpu) for one in COMBINATIONS]


def test_most_pairs_meet():
    """All of a dtype and a reduction do, and of the others nine in ten."""
    met = set.union(*map(pairs, COMBINATIONS))
    wanted = {(a, v, b, w) for a, b in PAIRS for v, w in product(SETTINGS[a], SETTINGS[b])}
    assert not {p for p in wanted - met if p[0] == "dtype" and p[2] == "reduce"}
    assert len(wanted - met) <= 0.1 * len(wanted), wanted - met


# -- graphs and features ------------------------------------------------------------------------------------------


def graphs() -> dict[str, tuple[int, int, Tensor]]:
    """Numbers of sources and destinations, and edges; one graph also sorted."""
    found = {}
    for name, data in awkward(channels=None).items():
        if name == "bipartite":
            edge_index = data["source", "to", "destination"].edge_index
            found[name] = (3, 7, edge_index.flip(1))
        else:
            found[name] = (data.num_nodes, data.num_nodes, data.edge_index)
    sources, destinations, edge_index = found["unsorted, duplicates, hub"]
    found["sorted"] = (sources, destinations, edge_index[:, edge_index[1].argsort(stable=True)])
    return found


GRAPHS = graphs()
FEW = ("no edge", "one node, self loop", "unsorted, duplicates, hub", "bipartite")


def features(
    rows: int, width: tuple[int, ...], dtype: torch.dtype, memory: str, seed: int, device: str = "cpu"
) -> Tensor:
    """Random numbers that no rounding brings together, in another order in memory; a leaf."""
    generator = torch.Generator().manual_seed(seed)
    size = (rows, *width)
    if memory == "expanded":
        value = torch.randn(1, *width, generator=generator).to(device, dtype).expand(size)
        return value.detach().requires_grad_()
    value = torch.randn(size, generator=generator).to(device, dtype)
    if memory == "transposed" and width:
        value = value.transpose(0, -1).contiguous().transpose(0, -1)
    elif memory == "every other":
        value = torch.stack([value, value], -1)[..., 0]
    elif memory == "inside another":
        value = torch.cat([value, value])[:rows] if not rows else torch.cat([value[:1], value])[1:]
    return value.detach().requires_grad_()


def run(fn: Callable[..., Tensor], args: list[Tensor]) -> list[Tensor]:
    out = fn(*args)
    weight = torch.cos(torch.arange(out.numel(), dtype=torch.float64)).view_as(out).to(out)
    wanted = [a for a in args if a.requires_grad]
    found = torch.autograd.grad((out * weight).sum(), wanted, allow_unused=True) if out.requires_grad else [None] * 3
    return [out.detach(), *(torch.zeros_like(w) if g is None else g for w, g in zip(wanted, found, strict=True))]


@pytest.mark.parametrize("one", RUNS, ids=lambda one: "-".join(str(v) for v in one.values()))
def test_equals_eager_in_float64(one: dict[str, Any]):
    torch._dynamo.reset()
    dtype, width, limit = getattr(torch, one["dtype"]), one["width"], DTYPES[one["dtype"]]
    if one["reduce"] == "std" and dtype.itemsize < 8:
        limit = 1e-3 if dtype.itemsize == 4 else 1.0  # a difference of squares, which cancels
    layer = Layer(one["reduce"], one["message"])
    device = triton_regions.home(one["kernels"])
    with kernels(one["kernels"]):
        compiled = gnncompile.compile(layer, options={"inductor": False})
        for name in FEW if (one["kernels"], device) == ("triton", "cpu") else GRAPHS:
            sources, destinations, edge_index = GRAPHS[name]
            edge_index = edge_index.to(device)
            x_src = features(sources, width, dtype, one["memory"], 0, device)
            x_dst = features(destinations, width, dtype, one["memory"], 1, device)
            w = torch.rand(edge_index.size(1), *(1 for _ in width), generator=torch.Generator().manual_seed(2))
            args = [x_src, x_dst, w.to(device, dtype).requires_grad_()]
            exact = [a.detach().double().requires_grad_() for a in args]
            found = run(compiled, [*args[:2], edge_index.to(one["index"]), args[2]])
            expected = run(layer, [*exact[:2], edge_index, exact[2]])
            for what, ours, theirs in zip(("out", "x_src", "x_dst", "w"), found, expected, strict=True):
                assert ours.dtype == dtype and ours.shape == theirs.shape
                scale = max(1.0, float(theirs.abs().max())) if theirs.numel() else 1.0
                torch.testing.assert_close(
                    ours.double(),
                    theirs,
                    rtol=limit,
                    atol=limit * scale,
                    msg=lambda m, n=name, w=what: f"{n}, {w}: {m}",
                )
