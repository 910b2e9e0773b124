"""Dropout per edge: its bits, their distribution, kernels, gradients and whole layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.utils import softmax

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

import gnncompile.ops.region  # noqa: F401  (registers the op)
from gnncompile.codegen.cpp.kernel import CppKernel
from gnncompile.codegen.triton.tile import Tile
from gnncompile.ir import philox, rules
from gnncompile.ir.builder import Builder
from gnncompile.ir.printer import summary, to_text
from gnncompile.ir.reference import run
from gnncompile.ir.region import SEED, Output, Region, Space, parse
from gnncompile.ir.residuals import with_residuals
from gnncompile.ir.verify import verify
from gnncompile.ir.vjp import vjp
from gnncompile.runtime import launch
from tests.graphs import layout
from tests.harness import kernels

pytestmark = triton_regions.INTERPRETED
device = triton_regions.device

D, S, E, P = Space.DESTINATION, Space.SOURCE, Space.EDGE, Space.PARAMETER


# -- bits ---------------------------------------------------------------------------------------------------------


def by_hand(seed: int, edge: int, feature: int) -> int:
    """Philox-4x32-10 with Python's integers, as the paper states it."""
    word = 2**32 - 1
    counter, key = [edge, feature, 0, 0], [seed & word, seed >> 32]
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [second >> 32 ^ counter[1] ^ key[0], second & word, first >> 32 ^ counter[3] ^ key[1], first & word]
        key = [(key[0] + 0x9E3779B9) & word, (key[1] + 0xBB67AE85) & word]
    return counter[0]


def test_words_are_philox():
    assert by_hand(0, 0, 0) == 0x6627E8D5  # the first known answer that the authors publish
    for seed in (0, 1, 0x7123456789ABCDEF, philox.LARGEST_SEED - 1):
        edge, feature = torch.tensor([[0], [1], [77], [2**31 - 1], [2**32 - 1]]), torch.tensor([[0, 1, 511, 8191]])
        expected = [[by_hand(seed, int(e), int(f)) for f in feature[0]] for e in edge[:, 0]]
        assert philox.words(torch.tensor([seed]), edge, feature).tolist() == expected


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_distribution(p: float):
    """Mean and variance of the factors, and no correlation of neighbouring edges, features or seeds: 5 sigma."""
    edges, features = 20_000, 8
    edge, feature = torch.arange(edges).view(-1, 1), torch.arange(features).view(1, -1)
    masks = torch.stack(
        [philox.factors(torch.tensor([k]), edge, feature, p, torch.float64) for k in (5, 6, 5 + 2**32, 2**62)]
    )
    assert set(masks.unique().tolist()) == {0.0, 1 / (1 - p)}
    spread = (p / (1 - p)) ** 0.5
    z = (masks - 1) / spread  # of mean 0 and variance 1 if the share of kept values is 1 - p
    bound = 5 / (edges * features) ** 0.5
    assert z.mean((1, 2)).abs().max() < bound
    for one, other in ((z[:, 1:], z[:, :-1]), (z[:, :, 1:], z[:, :, :-1]), (z[1:], z[:-1])):
        assert (one * other).mean((1, 2)).abs().max() < 1.1 * bound
    assert (z.square().mean((1, 2)) - 1).abs().max() < bound * (1 / (p * (1 - p)) - 4) ** 0.5 + 1e-9


def test_threshold_of_any_probability():
    assert philox.threshold(0.5) == 2**31 and philox.threshold(1 - 1e-12) == 2**32 - 1 and philox.threshold(1e-12) == 0


# -- the operation in a region ------------------------------------------------------------------------------------


def masked_sum(by: Space, dtype: str, heads: int, channels: int, p: float = 0.3) -> Region:
    """The mask itself per edge, and the sum of the rows it leaves."""
    b = Builder(by)
    seed, x = b.input(0, P, (1, 1), SEED), b.input(1, by.opposite, (heads, channels), dtype)
    mask = b.dropout(seed, p, (heads, channels))
    outputs = [mask, b.reduce("sum", b.op("mul", x, mask))]
    return b.finish([Output(o, dtype, (heads, channels)) for o in outputs])


def test_text_and_string_form():
    region = masked_sum(D, "float32", 2, 3)
    verify(region)
    assert parse(region.spec) == region
    assert "v2: [edge, 2x3] = dropout(x0, 0.3)" in to_text(region)
    assert summary(region) == "dropout, sum of 2x3 from source"


def test_equal_calls_are_one_mask():
    b = Builder(D)
    first, second = (b.input(k, P, (1, 1), SEED) for k in (0, 1))
    assert b.dropout(first, 0.5, (2, 1)) == b.dropout(first, 0.5, (2, 1))
    others = {b.dropout(second, 0.5, (2, 1)), b.dropout(first, 0.25, (2, 1)), b.dropout(first, 0.5, (2, 3))}
    assert len(others | {b.dropout(first, 0.5, (2, 1))}) == 4


def test_reference_numbers_edges_as_given():
    """Both walks, with masked edges and a duplicate: the mask belongs to the edge, not to its place in a layout."""
    row, col = torch.tensor([3, 0, 2, 0, 3, 3]), torch.tensor([6, 1, 2, 1, 3, 0])
    alive = torch.tensor([True, True, False, True, True, True])
    seed, x, y = torch.tensor([9]), torch.randn(7, 2, 3), torch.randn(4, 2, 3)
    expected = philox.factors(seed, torch.arange(6).view(-1, 1), torch.arange(6).view(1, -1), 0.3, torch.float32)
    expected = expected.view(6, 2, 3) * alive.view(-1, 1, 1)
    for by, tensor, walk in ((D, x, layout(row, col, 4, alive)), (S, y, layout(col, row, 7, alive))):
        mask, _ = run(masked_sum(by, "float32", 2, 3), [seed, tensor], walk)
        assert torch.equal(mask, expected)


# -- kernels ------------------------------------------------------------------------------------------------------


def filled(region: Region, g: triton_regions.Graph) -> list[Tensor]:
    """Outputs to write: nothing but zeros where edges are masked out."""
    rows = [g.row.numel() if region.per_edge(o) else g.num_rows for o in region.outputs]
    return [
        torch.zeros(n, *o.trailing, dtype=getattr(torch, o.dtype)) for n, o in zip(rows, region.outputs, strict=True)
    ]


@pytest.mark.parametrize(
    ("heads", "channels", "dtype"),
    [(1, 1, "float32"), (3, 1, "float16"), (1, 20, "float32"), (2, 5, "float64"), (4, 16, "float32")],
)
@pytest.mark.parametrize("by", [D, S])
def test_kernels_make_the_mask_of_the_reference(by: Space, heads: int, channels: int, dtype: str, device: str):
    """The same bits on awkward graphs, with a hub among them, and so the same sums."""
    region = masked_sum(by, dtype, heads, channels)
    compiled = CppKernel(region)
    for name, g in triton_regions.GRAPHS.items():
        x = torch.randn(g.num_cols, heads, channels).to(getattr(torch, dtype))
        tensors, walk = [torch.tensor([0x7123456789ABCDEF]), x], g.layout("cpu")
        expected = run(region, tensors, walk)
        found = filled(region, g)
        compiled(tensors, walk, found)
        for made in (found, triton_regions.launch(region, tensors, g, device)):
            assert torch.equal(made[0], expected[0]), name
            torch.testing.assert_close(made[1], expected[1], rtol=2e-3 if dtype == "float16" else 1e-5, atol=1e-3)


@pytest.mark.parametrize("tile", [Tile(2, 2, 4, 1), Tile(1, 1, 4, 1), Tile(1, 4, 2, 1)])
def test_mask_does_not_depend_on_the_tile(tile: Tile, device: str):
    """Several rows per program, one edge per step, channels over a second grid axis."""
    region, g = masked_sum(D, "float32", 3, 4), triton_regions.MIXED
    tensors = [torch.tensor([3]), torch.randn(g.num_cols, 3, 4)]
    expected = run(region, tensors, g.layout("cpu"))
    torch.testing.assert_close(triton_regions.launch(region, tensors, g, device, tile), expected)


# -- gradients ----------------------------------------------------------------------------------------------------

P_DROP = 0.4
SEEDS = (torch.tensor([11]), torch.tensor([2**60 + 1]))
GRAPHS = {
    "no edge": ([], [], 3, 2),
    "one node": ([0, 0], [0, 0], 1, 1),
    "unsorted, duplicates, an empty row": ([3, 0, 2, 0, 3, 3, 0, 2], [4, 1, 2, 1, 3, 0, 0, 4], 4, 5),
    "hubs": ([0] * 150 + [1, 2], [1] * 140 + [0] * 10 + [1, 1], 3, 2),
}


def mask(which: int, edges: int, *features: int) -> Tensor:
    """What eager computations multiply with."""
    feature = torch.arange(torch.Size(features).numel()).view(1, -1)
    made = philox.factors(SEEDS[which], torch.arange(edges).view(-1, 1), feature, P_DROP, torch.float64)
    return made.view(edges, *features)


def attention(b: Builder, dtype: str) -> int:
    """GAT with dropout of the attention weights of two heads, and of the messages."""
    logits = b.op("add", b.input(0, S, (2, 1), dtype), b.input(1, D, (2, 1), dtype))
    seeds = [b.input(k, P, (1, 1), SEED) for k in (4, 5)]
    alpha = b.op("mul", b.softmax(rules.leaky_relu(b, logits, 0.2)), b.dropout(seeds[0], P_DROP, (2, 1)))
    message = b.op("mul", b.op("mul", b.input(2, S, (2, 3), dtype), b.input(3, P, (2, 3), dtype)), alpha)
    return b.reduce("sum", b.op("mul", message, b.dropout(seeds[1], P_DROP, (2, 3))))


def attention_eager(x: list[Tensor], dst: Tensor, src: Tensor, rows: int) -> Tensor:
    logits = F.leaky_relu(x[0][src] + x[1][dst], 0.2)
    alpha = softmax(logits, dst, num_nodes=rows) * mask(0, len(dst), 2)
    message = x[2][src] * x[3] * alpha.unsqueeze(-1) * mask(1, len(dst), 2, 3)
    return message.new_zeros(rows, 2, 3).index_add(0, dst, message)


def dropped_first(b: Builder, dtype: str) -> int:
    """Dropout of edge features, of which a product with both ends' rows is then dropped."""
    weight = b.op("mul", b.input(3, E, (1, 1), dtype), b.dropout(b.input(4, P, (1, 1), SEED), P_DROP, (1, 1)))
    message = b.op("mul", b.op("add", b.input(0, S, (1, 3), dtype), b.input(1, D, (1, 3), dtype)), weight)
    message = rules.silu(b, b.op("mul", message, b.dropout(b.input(5, P, (1, 1), SEED), P_DROP, (1, 3))))
    return b.reduce("sum", b.op("mul", message, b.input(2, S, (1, 1), dtype)))


def dropped_first_eager(x: list[Tensor], dst: Tensor, src: Tensor, rows: int) -> Tensor:
    weight = x[3] * mask(0, len(dst), 1)
    message = F.silu((x[0][src] + x[1][dst]) * weight * mask(1, len(dst), 3)) * x[2][src]
    return message.new_zeros(rows, 3).index_add(0, dst, message)


CASES = {
    "attention": (attention, attention_eager, (2, 3), ("cols", 2), ("rows", 2), ("cols", 2, 3), (2, 3)),
    "edge weights": (dropped_first, dropped_first_eager, (3,), ("cols", 3), ("rows", 3), ("cols", 1), ("edges", 1)),
}


def problem(name: str, on: str, dtype: str = "float64") -> tuple[Region, list[Tensor], list[Tensor], Any]:
    """The region, its tensors without seeds, both walks, and the eager function of the tensors."""
    made, eager, trailing, *shapes = CASES[name]
    row, col, rows, cols = GRAPHS[on]
    dst, src = (torch.tensor(ends, dtype=torch.long) for ends in (row, col))
    b = Builder(D)
    region = b.finish([Output(made(b, dtype), dtype, trailing)])
    generator, sizes = torch.Generator().manual_seed(1), {"rows": rows, "cols": cols, "edges": len(dst)}
    lengths = [[sizes.get(n, n) if isinstance(n, str) else n for n in shape] for shape in shapes]
    tensors = [torch.randn(n, generator=generator, dtype=torch.float64).requires_grad_() for n in lengths]
    walks = [*layout(dst, src, rows), *layout(src, dst, cols)]
    return with_residuals(region), tensors, walks, lambda x: eager(x, dst, src, rows)


def weighted(out: Tensor) -> Tensor:
    return (out * torch.cos(torch.arange(out.numel(), device=out.device)).view_as(out)).sum()


@pytest.mark.parametrize("on", GRAPHS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("which", ["reference", "cpp", "triton"])
def test_gradient_takes_the_mask_of_the_forward(which: str, name: str, on: str, device: str):
    """Against torch's gradient of an eager computation with the mask of the reference."""
    dtype = "float64" if which == "reference" else "float32"
    region, tensors, walks, eager = problem(name, on, dtype)
    at = device if which == "triton" else "cpu"
    ours = [t.detach().to(at, getattr(torch, dtype)).requires_grad_() for t in tensors]
    with kernels(which):
        given = [*ours, *(s.to(at) for s in SEEDS)]
        out = torch.ops.gnncompile.region(given, [t.to(at) for t in walks], region.spec)[0]
        found = torch.autograd.grad(weighted(out), ours)
        assert launch.fallbacks == {}
    expected = eager(tensors)
    wanted = torch.autograd.grad(weighted(expected), tensors)
    for one, other in zip((out, *found), (expected, *wanted), strict=True):
        tolerance = 1e-10 if which == "reference" else 3e-5
        torch.testing.assert_close(one.cpu().double(), other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_second_gradient(name: str):
    region, tensors, walks, _ = problem(name, "unsorted, duplicates, an empty row")
    with kernels("reference"):
        assert torch.autograd.gradgradcheck(
            lambda *x: torch.ops.gnncompile.region([*x, *SEEDS], walks, region.spec)[0], tensors, fast_mode=True
        )


def test_dropped_attention_costs_no_walk_more():
    """By source: the cotangent (2x3), and logit, maximum, sum and dot product of two heads; never a value per edge."""
    region, *_ = problem("attention", "hubs", "float32")
    wanted, given = (True, True, True, False, False, False), (True, *(False for _ in region.outputs[1:]))
    stages = vjp(region, wanted, given).stages
    assert [(s.region.by, s.region.walks_edges) for s in stages] == [(D, False), (S, True), (D, False)]
    for stage in stages:
        verify(stage.region)
        assert all(n.space is not E for n in stage.region.nodes if n.op == "input")


def test_op():
    region, tensors, walks, _ = problem("attention", "unsorted, duplicates, an empty row")
    torch.library.opcheck(torch.ops.gnncompile.region.default, ([*tensors, *SEEDS], walks, region.spec))
