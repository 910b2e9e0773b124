"""Dropout per edge: its bits, their distribution, kernels, gradients and whole layers."""

from __future__ import annotations

import pytest
import torch

from gnncompile.ir import philox
from gnncompile.ir.builder import Builder
from gnncompile.ir.printer import summary, to_text
from gnncompile.ir.reference import run
from gnncompile.ir.region import SEED, Output, Region, Space, parse
from gnncompile.ir.verify import verify
from tests.graphs import layout

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
