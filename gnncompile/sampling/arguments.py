"""Checks of arguments that samplers, loaders and features share. Imports no Triton."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from gnncompile.exc import ArgumentError, ArgumentTypeError
from gnncompile.sampling.neighborhood import EdgeType

STRATEGIES = ("uniform", "last")

PLACES = ("device", "host")
"""Where attributes may lie while a GPU samples."""

UNKNOWN = 2**40
"""The bound of a node type whose number of nodes is not known: no edge leads to it, so nothing is read at its nodes."""


def check_strategy(temporal_strategy: str) -> None:
    """Raises a ValueError for a strategy that does not exist."""
    if temporal_strategy not in STRATEGIES:
        raise ArgumentError(f"temporal_strategy: found {temporal_strategy!r}, expected one of {', '.join(STRATEGIES)}.")


def check_exclusive(node_time: Any, edge_time: Any, weight: Any, disjoint: bool, suffix: str = "") -> None:
    """Raises a ValueError for times and weights that exclude each other. `suffix` follows the names of arguments."""
    if node_time is None and edge_time is None:
        return
    if node_time is not None and edge_time is not None:
        raise ArgumentError(f"edge_time{suffix}: found times beside node_time{suffix}, expected one of the two.")
    if weight is not None:
        raise ArgumentError(f"weight{suffix}: found weights beside times, expected one of the two.")
    if not disjoint:
        raise ArgumentError("disjoint: found False, expected True, as times are given: each seed has its own time.")


def check_types(
    seed_dict: Iterable[str],
    node_types: Collection[str],
    edge_types: Collection[EdgeType],
    by_edge_type: Mapping[str, Mapping[EdgeType, Any]],
) -> None:
    """Raises a ValueError if seeds or edges are of a node type that the graph does not have, or if a dictionary lacks
    an edge type.

    Args:
        seed_dict: The node types of seeds.
        node_types: The node types of the graph.
        edge_types: The edge types of the graph.
        by_edge_type: The dictionaries that need a value for each edge type, by the names of their arguments.
    """
    check_node_type("seed_dict", seed_dict, node_types)
    check_ends("edge_types", edge_types, node_types, "add it to node_types")
    for name, given in by_edge_type.items():
        check_edge_types(name, given, edge_types)


def check_node_type(name: str, given: Iterable[str], node_types: Collection[str]) -> None:
    """Raises a ValueError if an argument names a node type that the graph does not have."""
    unknown = [one for one in given if one not in node_types]
    if unknown:
        raise ArgumentError(
            f"{name}: found type {unknown[0]!r}, expected one of {', '.join(node_types)}; name one of these types."
        )


def check_ends(name: str, edge_types: Iterable[EdgeType], node_types: Collection[str], remedy: str) -> None:
    """Raises a ValueError if edges begin or end at a node type that the graph does not have."""
    for kind in edge_types:
        for end in (kind[0], kind[-1]):
            if end not in node_types:
                raise ArgumentError(
                    f"{name}: found {kind}, whose nodes of type {end!r} the graph does not have, expected ends among "
                    f"{', '.join(node_types)}; {remedy}."
                )


def check_edge_types(name: str, given: Collection[EdgeType], edge_types: Collection[EdgeType]) -> None:
    """Raises a ValueError if an argument by edge type lacks an edge type of the graph."""
    missing = [kind for kind in edge_types if kind not in given]
    if missing:
        found = ", ".join(map(str, given)) or "no edge type"
        raise ArgumentError(
            f"{name}: found {found}, expected every edge type of the graph; add a value for {missing[0]}."
        )


def check_hops(fan_outs: Iterable[Sequence[int]]) -> None:
    """Raises a ValueError if edge types have different numbers of hops."""
    if len({len(hops) for hops in fan_outs}) > 1:
        raise ArgumentError("num_neighbors_dict: found lists of different lengths, expected one number per hop.")


def numbers_of_nodes(
    node_types: Sequence[str],
    edge_types: Sequence[EdgeType],
    colptr_dict: Mapping[EdgeType, Tensor],
    given: Mapping[str, int],
) -> dict[str, int]:
    """Returns the number of nodes of each type: of destinations by `colptr_dict`, of others as given, or a bound."""
    known = {kind[2]: colptr_dict[kind].numel() - 1 for kind in edge_types}
    return {name: int(known.get(name, given.get(name, UNKNOWN))) for name in node_types}


def check_bytes(cache: Any) -> None:
    """Raises a TypeError if the size of a cache is no integer, such as ``1e9``."""
    if not isinstance(cache, Integral):
        raise ArgumentTypeError(
            f"cache: found {cache!r}, a {type(cache).__name__}, expected an int, the bytes of the cache; call int(...)."
        )


def vector(name: str, value: Tensor, dtypes: tuple[torch.dtype, ...], size: int | None, device: torch.device) -> Tensor:
    """Returns a contiguous vector with one of the dtypes on the device, and with `size` entries unless it is None."""
    if value.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise ArgumentTypeError(
            f"{name}: found dtype {value.dtype}, expected {expected}; convert it once, before sampling."
        )
    if value.dim() != 1 or (size is not None and value.numel() != size):
        expected = "[n]" if size is None else f"[{size}]"
        raise ArgumentError(f"{name}: found shape {list(value.shape)}, expected {expected}.")
    if value.device != device:
        raise ArgumentError(f"{name}: found a tensor on {value.device}, expected one on {device}, where colptr is.")
    return value.contiguous()
