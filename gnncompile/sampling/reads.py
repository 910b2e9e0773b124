"""Estimates how often a sampler reads each node, to choose the rows that a cache holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gnncompile.exc import ArgumentError, ArgumentTypeError, IndexOutOfRangeError
from gnncompile.sampling.arguments import UNKNOWN, check_hops, check_types, numbers_of_nodes, vector
from gnncompile.sampling.neighborhood import EdgeType

STEP = 2**26
"""Edges that are looked at together, which bounds the memory."""


def expected_reads(
    colptr: Tensor, row: Tensor, num_neighbors: Sequence[int], *, batch_size: int, seeds: Tensor | None = None
) -> Tensor:
    r"""Returns how often a mini-batch is expected to draw each node, float32 ``[num_nodes]``.

    Mini-batches of seeds drawn uniformly. A node :math:`u` is in hop :math:`k` with probability :math:`p_k(u)`, and
    each of its :math:`d_u` edges is drawn with probability :math:`\min(1, f_k / d_u)`. So :math:`v` is drawn
    :math:`r_{k+1}(v) = \sum_{v \to u} p_k(u) \min(1, f_k / d_u)` times, and :math:`p_{k+1}(v) = 1 - e^{-r_{k+1}(v)}`.
    This follows T. Kaler et al., Communication-Efficient Graph Neural Networks with Probabilistic Neighborhood
    Expansion Analysis and Caching (SALIENT++), MLSys 2023. Weights and times of edges are not regarded.

    Args:
        colptr: The first edge of each destination in CSC order, int32 or int64 ``[num_nodes + 1]``.
        row: The source of each edge, int32 or int64 ``[num_edges]``.
        num_neighbors: For each hop, the most neighbours of a node; a negative number takes all.
        batch_size: The seeds of a mini-batch.
        seeds: The nodes that seeds are drawn from, an integer, ``[num_seeds]``; None takes all nodes.

    Raises:
        IndexError: A seed or a source is outside the graph.
        TypeError: A tensor has another dtype.
        ValueError: A size does not fit, or `batch_size` is not positive.
    """
    device = colptr.device
    colptr = vector("colptr", colptr, (torch.int32, torch.int64), None, device)
    row = vector("row", row, (torch.int32, torch.int64), None, device)
    _check(colptr, row, colptr.numel() - 1)
    _check_batch_size("batch_size", batch_size)
    seeds = None if seeds is None else _nodes(seeds, colptr.numel() - 1)
    num_nodes = colptr.numel() - 1
    chance = _chance(num_nodes, batch_size, seeds, device)
    reads = chance.clone()
    for fan_out in num_neighbors:
        found = _draws(colptr, row, fan_out, chance, num_nodes)
        reads += found
        chance = 1 - torch.exp(-found)
    return reads


def expected_reads_hetero(
    colptr_dict: Mapping[EdgeType, Tensor],
    row_dict: Mapping[EdgeType, Tensor],
    num_neighbors_dict: Mapping[EdgeType, Sequence[int]],
    edge_types: Sequence[EdgeType],
    node_types: Sequence[str],
    *,
    batch_size_dict: Mapping[str, int],
    seed_dict: Mapping[str, Tensor],
    num_nodes_dict: Mapping[str, int] | None = None,
) -> dict[str, Tensor]:
    """Returns how often a mini-batch is expected to draw each node, float32 ``[num_nodes]`` for each node type.

    The formula is that of :func:`expected_reads`: a hop sums over the edge types that lead to the nodes of the hop
    before.

    Args:
        colptr_dict: As `colptr` of :func:`expected_reads`, for each edge type.
        row_dict: As `row` of :func:`expected_reads`, for each edge type.
        num_neighbors_dict: As `num_neighbors` of :func:`expected_reads`, for each edge type.
        edge_types: The edge types.
        node_types: The node types.
        batch_size_dict: The seeds of a mini-batch, for each node type that has any.
        seed_dict: The nodes that seeds are drawn from, an integer, ``[num_seeds]``, for each node type that has seeds.
        num_nodes_dict: The number of nodes of types that are no destination. The default is one more than the last
            source.

    Raises:
        IndexError: A seed or a source is outside the graph.
        TypeError: A tensor has another dtype.
        ValueError: A size does not fit, a batch size is not positive, or a type is unknown or missing.
    """
    graph = _checked(colptr_dict, row_dict, num_neighbors_dict, edge_types, node_types, seed_dict)
    number = _numbers(graph, node_types, num_nodes_dict or {})
    for kind, (colptr, row, _) in graph.items():
        _check(colptr, row, number[kind[0]], f"_dict[{kind}]")
    device = next((row.device for _, row, _ in graph.values()), torch.device("cpu"))
    chance = {name: torch.zeros(size, device=device) for name, size in number.items()}
    for name, seeds in seed_dict.items():
        batch_size = batch_size_dict.get(name, 0)
        _check_batch_size(f"batch_size_dict[{name!r}]", batch_size)
        chance[name] = _chance(number[name], batch_size, _nodes(seeds, number[name]), device)
    reads = {name: one.clone() for name, one in chance.items()}
    for hop in range(max((len(fan_outs) for _, _, fan_outs in graph.values()), default=0)):
        found = {name: torch.zeros_like(one) for name, one in chance.items()}
        for (source, _, target), (colptr, row, fan_outs) in graph.items():
            found[source] += _draws(colptr, row, fan_outs[hop], chance[target], number[source])
        chance = {name: 1 - torch.exp(-one) for name, one in found.items()}
        reads = {name: one + found[name] for name, one in reads.items()}
    return reads


_Edges = tuple[Tensor, Tensor, Sequence[int]]
"""The edges of one type: colptr, row and the fan-outs."""


def _checked(
    colptr_dict: Mapping[EdgeType, Tensor],
    row_dict: Mapping[EdgeType, Tensor],
    num_neighbors_dict: Mapping[EdgeType, Sequence[int]],
    edge_types: Sequence[EdgeType],
    node_types: Sequence[str],
    seed_dict: Mapping[str, Tensor],
) -> dict[EdgeType, _Edges]:
    """Returns the edges of each type after checks of types, dtypes and hops."""
    needed = {"colptr_dict": colptr_dict, "row_dict": row_dict, "num_neighbors_dict": num_neighbors_dict}
    check_types(seed_dict, node_types, edge_types, needed)
    check_hops(num_neighbors_dict[kind] for kind in edge_types)
    found, integers = {}, (torch.int32, torch.int64)
    for kind in edge_types:
        given = colptr_dict[kind]
        colptr = vector(f"colptr_dict[{kind}]", given, integers, None, given.device)
        row = vector(f"row_dict[{kind}]", row_dict[kind], integers, None, given.device)
        found[kind] = colptr, row, num_neighbors_dict[kind]
    return found


def _numbers(
    graph: Mapping[EdgeType, _Edges], node_types: Sequence[str], num_nodes_dict: Mapping[str, int]
) -> dict[str, int]:
    """Returns the number of nodes of each type, or one more than the last source of a type of unknown size."""
    number = numbers_of_nodes(
        node_types, tuple(graph), {kind: colptr for kind, (colptr, _, _) in graph.items()}, num_nodes_dict
    )
    for name in (name for name in node_types if number[name] == UNKNOWN):
        rows = [row for (source, _, _), (_, row, _) in graph.items() if source == name and row.numel()]
        number[name] = max((int(row.max()) + 1 for row in rows), default=0)
    return number


def shares(size: int, wanted: Mapping[Any, tuple[Tensor, int]]) -> dict[Any, int]:
    """Divides the bytes of a cache among node types: the rows with the most reads for each byte are cached.

    Args:
        size: The bytes in all.
        wanted: For each node type, how often each row is read, ``[num_rows]``, and the bytes of a row.

    Returns:
        The bytes for each node type, a multiple of the bytes of a row.
    """
    none, wanted = dict.fromkeys(wanted, 0), {key: one for key, one in wanted.items() if one[1] <= size}
    sizes = {key: max(per_row, 1) for key, (_, per_row) in wanted.items()}
    if len(wanted) < 2:  # nothing to compare, so no memory for it
        return none | {key: min(size // sizes[key], reads.numel()) * sizes[key] for key, (reads, _) in wanted.items()}
    worth = torch.cat([reads.float() / sizes[key] for key, (reads, _) in wanted.items()])
    owner = torch.cat([torch.full_like(reads, at, dtype=torch.int32) for at, (reads, _) in enumerate(wanted.values())])
    owner = owner[worth.argsort(descending=True, stable=True)]
    per_row = torch.tensor(list(sizes.values()), device=owner.device)
    chosen = owner[per_row[owner].cumsum(0) <= size]
    numbers = torch.bincount(chosen, minlength=len(wanted)).tolist()
    return none | {key: number * sizes[key] for key, number in zip(wanted, numbers, strict=True)}


def _chance(num_nodes: int, batch_size: int, seeds: Tensor | None, device: torch.device) -> Tensor:
    """Returns the probability that a node is among the seeds of a mini-batch, float32 ``[num_nodes]``."""
    number = num_nodes if seeds is None else seeds.numel()
    share = min(batch_size / max(number, 1), 1.0)
    if seeds is None:
        return torch.full((num_nodes,), share, device=device)
    chance = torch.zeros(num_nodes, device=device)
    chance[seeds.to(device)] = share
    return chance


def _draws(colptr: Tensor, row: Tensor, fan_out: int, chance: Tensor, num_sources: int) -> Tensor:
    """Returns how often a hop draws each source, float32 ``[num_sources]``, by the probability of each destination."""
    degree = (colptr[1:] - colptr[:-1]).float()
    drawn = chance if fan_out < 0 else chance * (fan_out / degree).clamp(max=1)  # no edge reads what 0 / 0 gives
    found = torch.zeros(num_sources, device=row.device)
    for begin in range(0, row.numel(), STEP):
        source = row[begin : begin + STEP]
        edge = torch.arange(begin, begin + source.numel(), device=row.device, dtype=colptr.dtype)
        found.index_add_(0, source, drawn[torch.searchsorted(colptr, edge, right=True) - 1])
    return found


def _check(colptr: Tensor, row: Tensor, num_sources: int, suffix: str = "") -> None:
    """Raises an error if edges are not in CSC order. `suffix` follows the names of arguments."""
    if colptr.numel() < 1 or int(colptr[-1]) != row.numel():
        raise ArgumentError(
            f"colptr{suffix}: found {colptr[-1:].tolist()} as the last entry, expected [{row.numel()}], the number of "
            f"edges in row{suffix}; give a graph in CSC order."
        )
    if row.numel():
        least, most = (int(value) for value in row.aminmax())
        if least < 0 or most >= num_sources:
            raise IndexOutOfRangeError(
                f"row{suffix}: found nodes {least} to {most}, expected 0 to {num_sources - 1}, nodes of the graph."
            )


def _check_batch_size(name: str, batch_size: int) -> None:
    if batch_size < 1:
        raise ArgumentError(f"{name}: found {batch_size}, expected at least 1, the seeds of a mini-batch.")


def _nodes(seeds: Tensor, num_nodes: int) -> Tensor:
    if seeds.is_floating_point() or seeds.is_complex() or seeds.dtype is torch.bool:
        raise ArgumentTypeError(
            f"seeds: found dtype {seeds.dtype}, expected integers, the nodes that seeds are drawn from; call "
            "mask.nonzero().flatten() for a mask."
        )
    seeds = vector("seeds", seeds.long(), (torch.int64,), None, seeds.device)
    if seeds.numel():
        least, most = (int(value) for value in seeds.aminmax())
        if least < 0 or most >= num_nodes:
            raise IndexOutOfRangeError(
                f"seeds: found nodes {least} to {most}, expected 0 to {num_nodes - 1}, nodes of the graph."
            )
    return seeds
