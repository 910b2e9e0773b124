"""The distribution of the draws of the sampler for GPUs, per hop: 10^5 draws on a GPU, fewer in the interpreter."""

from __future__ import annotations

from itertools import combinations_with_replacement
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

from gnncompile.sampling.device import sample_neighbors

pytestmark = triton_regions.INTERPRETED
device_name = triton_regions.device

DEGREE, DRAWS = 6, 2
"""The neighbours of the node that draws, and how many it draws."""

WEIGHT = torch.tensor([2.0, 3.0, 3.0, 4.0, 4.0, 5.0])

HOWS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "with replacement": {"replace": True},
    "weighted": {"weight": WEIGHT},
    "weighted with replacement": {"weight": WEIGHT, "replace": True},
    "until a time": {"edge_time": torch.arange(DEGREE)},
    "until a time with replacement": {"edge_time": torch.arange(DEGREE), "replace": True},
}
LIMIT = 4
"""The time of all seeds, by which 5 of 6 neighbours may be drawn."""


def pairs_of(hop: int, number: int, where: str, **how: Any) -> Tensor:
    """Returns what each of `number` nodes has drawn in a hop, as the smaller and the larger of two neighbours.

    The sources 1 to 6 lead to node 0, and node 0 leads to node 7. The seeds are 0 or 7. Each has a subgraph of its own.
    """
    colptr = torch.tensor([0] + [DEGREE] * (DEGREE + 1) + [DEGREE + 1])
    row, more = torch.tensor([*range(1, DEGREE + 1), 0]), {}
    if "weight" in how:
        how["weight"] = torch.cat([how["weight"], torch.ones(1)]).to(where)
    if "edge_time" in how:
        how["edge_time"] = torch.cat([how["edge_time"], torch.zeros(1, dtype=torch.int64)]).to(where)
        more = {"seed_time": torch.full((number,), LIMIT, device=where)}
    seeds = torch.full((number,), 0 if hop == 0 else DEGREE + 1, device=where)
    fan_outs = [DRAWS] if hop == 0 else [1, DRAWS]
    found = sample_neighbors(
        colptr.to(where), row.to(where), seeds, fan_outs, disjoint=True, seed=hop + 5, **how, **more
    )
    assert found.edge is not None and found.num_sampled_edges is not None
    drawn = found.edge[-found.num_sampled_edges[-1] :].cpu().view(number, DRAWS)
    return drawn.sort(1).values


def chances(weights: list[float], replace: bool) -> dict[tuple[int, int], float]:
    """Returns the probability of each pair of neighbours, drawn one after the other in proportion to weights."""
    total, made = sum(weights), {}
    for i, j in combinations_with_replacement(range(len(weights)), 2):
        one, other = weights[i], weights[j]
        if replace:
            made[i, j] = one * other / total**2 * (1 if i == j else 2)
        elif i != j:
            made[i, j] = one * other / total * (1 / (total - one) + 1 / (total - other))
    assert abs(sum(made.values()) - 1) < 1e-12
    return made


def check(hop: int, name: str, number: int, where: str) -> None:
    """Compares the counts of pairs with their probabilities by Pearson's chi-square test. Seeds are fixed."""
    how = HOWS[name]
    weights = how.get("weight", torch.ones(LIMIT + 1 if "edge_time" in how else DEGREE)).tolist()
    pairs = pairs_of(hop, number, where, **how)
    expected = chances(weights, how.get("replace", False))
    counts = dict.fromkeys(expected, 0)
    for i, j in pairs.tolist():
        assert (i, j) in counts, f"edges {i} and {j} can't be drawn together"
        counts[i, j] += 1
    statistic = sum((counts[pair] - number * chance) ** 2 / (number * chance) for pair, chance in expected.items())
    assert 1e-4 < chi2.sf(statistic, len(expected) - 1) < 1 - 1e-4


@pytest.mark.parametrize("name", [name for name in HOWS if "weighted" not in name])
@pytest.mark.parametrize("hop", [0, 1])
def test_draws(hop: int, name: str, device_name: str):
    """The interpreter is too slow for draws by weight. They are compared word by word in test_device_sampling.py."""
    check(hop, name, 1500, device_name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(HOWS))
@pytest.mark.parametrize("hop", [0, 1])
def test_many_draws(hop: int, name: str):
    check(hop, name, 10**5 // DRAWS, "cuda")
