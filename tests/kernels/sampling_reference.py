"""A sampler of neighbours in plain Python, fed by the same random words as the kernels."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gnncompile.ir import philox


@dataclass
class Reference:
    """What :func:`sample` has found, as lists. See :class:`gnncompile.sampling.neighborhood.Neighborhood`."""

    node: list[int] = field(default_factory=list)
    row: list[int] = field(default_factory=list)
    col: list[int] = field(default_factory=list)
    edge: list[int] = field(default_factory=list)
    batch: list[int] = field(default_factory=list)
    num_sampled_nodes: list[int] = field(default_factory=list)
    num_sampled_edges: list[int] = field(default_factory=list)


def words(seed: int, local: int, draws: int) -> list[int]:
    """Returns the random words of the first draws of a destination."""
    return philox.words(torch.tensor([seed]), torch.tensor(local), torch.arange(draws)).tolist()


def floyd(random: Sequence[int], size: int, fan_out: int) -> list[int]:
    """Returns `fan_out` different numbers below `size`, which is larger."""
    chosen: list[int] = []
    for word, top in zip(random, range(size - fan_out, size), strict=True):
        drawn = word * (top + 1) >> 32
        chosen.append(top if drawn in chosen else drawn)
    return chosen


def lightest(random: Sequence[int], weights: Sequence[float], fan_out: int) -> list[int]:
    """Returns `fan_out` different indices by weight (Efraimidis and Spirakis); weights of 0 come last."""
    uniform = [(word + 0.5) / 2**32 for word in random]
    keys = [-math.log(1 - u) / w if w else math.inf for u, w in zip(uniform, weights, strict=True)]
    rounded = torch.tensor(keys, dtype=torch.float64).float().tolist()
    return sorted(range(len(weights)), key=lambda at: (rounded[at], at))[:fan_out]


def by_thresholds(random: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Returns an index for each word, by weight."""
    sums = torch.tensor(weights, dtype=torch.float64).cumsum(0).tolist()
    return [bisect.bisect_right(sums, (word + 0.5) / 2**32 * sums[-1]) for word in random]


def sample(
    colptr: Tensor,
    row: Tensor,
    seeds: Tensor,
    num_neighbors: Sequence[int],
    *,
    node_time: Tensor | None = None,
    edge_time: Tensor | None = None,
    seed_time: Tensor | None = None,
    weight: Tensor | None = None,
    replace: bool = False,
    disjoint: bool = False,
    temporal_strategy: str = "uniform",
    seed: int,
) -> Reference:
    """Samples as :func:`gnncompile.sampling.device.sample_neighbors` does."""
    pointers, sources = colptr.tolist(), row.tolist()
    times = edge_time.tolist() if edge_time is not None else None
    if node_time is not None:
        times = node_time[row].tolist()
        seed_time = node_time[seeds] if seed_time is None else seed_time
    weights = None if weight is None else weight.double().tolist()
    made = Reference(node=seeds.tolist(), batch=list(range(len(seeds))), num_sampled_nodes=[len(seeds)])
    local: dict[tuple[int, int], int] = {}
    for at, node in enumerate(made.node):
        local.setdefault((at if disjoint else 0, node), at)
    begin = 0
    for fan_out in num_neighbors:
        end, edges = len(made.node), len(made.edge)
        for at in range(begin, end):
            first, last = pointers[made.node[at]], pointers[made.node[at] + 1]
            if times is not None:
                assert seed_time is not None
                last = bisect.bisect_right(times, int(seed_time[made.batch[at]]), first, last)
                if temporal_strategy == "last" and fan_out >= 0:
                    first = max(first, last - fan_out)
            size = last - first
            if not size or not fan_out:
                continue
            if fan_out < 0 or (size <= fan_out and not replace):
                chosen = list(range(size))
            elif weights is not None and replace:
                chosen = by_thresholds(words(seed, at, fan_out), weights[first:last])
            elif weights is not None:
                chosen = lightest(words(seed, at, size), weights[first:last], fan_out)
            elif replace:
                chosen = [word * size >> 32 for word in words(seed, at, fan_out)]
            else:
                chosen = floyd(words(seed, at, fan_out), size, fan_out)
            for edge in (first + one for one in chosen):
                key = made.batch[at] if disjoint else 0, sources[edge]
                if key not in local:
                    local[key] = len(made.node)
                    made.node.append(sources[edge])
                    made.batch.append(made.batch[at])
                made.row.append(local[key])
                made.col.append(at)
                made.edge.append(edge)
        begin = end
        made.num_sampled_nodes.append(len(made.node) - end)
        made.num_sampled_edges.append(len(made.edge) - edges)
    return made
