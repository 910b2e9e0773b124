"""Checks PyG's loaders, and changes them so that they sample with gnncompile."""

from __future__ import annotations

import copy
import logging
from types import MethodType
from typing import Any

import torch_geometric.sampler
from torch.utils.data import DataLoader
from torch_geometric import typing
from torch_geometric.sampler import NumNeighbors

from gnncompile.exc import ArgumentError, MissingLibraryError
from gnncompile.sampling.arguments import check_edge_types, check_ends, check_node_type
from gnncompile.sampling.cpu import library
from gnncompile.sampling.neighborhood import EdgeType
from gnncompile.sampling.pyg import replaced

logger = logging.getLogger(__name__)

SAMPLERS = ("node_sampler", "link_sampler")
"""The attributes of PyG's loaders that hold a sampler."""


def samples_neighbors(source: Any) -> bool:
    """Whether a loader holds a sampler."""
    return any(getattr(source, name, None) is not None for name in SAMPLERS)


def check_types_of(source: Any) -> None:
    """Raises a ValueError if a loader of a graph with several types names a type that does not exist, or lacks one.

    PyG checks some of this when it samples, and fails with a KeyError at the rest.
    """
    for name in SAMPLERS:
        for sampler in _samplers(getattr(source, name, None)):
            node_types, edge_types = list(sampler.node_types), list(sampler.edge_types)
            check_ends("data", edge_types, node_types, "set data[...].num_nodes of that type, or remove the edges")
            _check_fan_outs(sampler.num_neighbors, edge_types)
            given = getattr(getattr(source, "input_data", None), "input_type", None)
            if isinstance(given, str):
                check_node_type("input_nodes", [given], node_types)
            elif given is not None:
                check_ends("edge_label_index", [given], node_types, "name an edge type of the graph")
    inner = getattr(source, "loaders", None)
    for one in inner if isinstance(inner, (list, tuple)) else ():
        check_types_of(one)


def _samplers(given: Any) -> list[Any]:
    """Returns the samplers of neighbours of several types that a sampler of a loader consists of."""
    parts = [getattr(given, name, None) for name in ("forward_sampler", "backward_sampler")]
    every = [given] if parts == [None, None] else parts
    return [one for one in every if isinstance(one, torch_geometric.sampler.NeighborSampler) and one.is_hetero]


def _check_fan_outs(num_neighbors: NumNeighbors, edge_types: list[EdgeType]) -> None:
    if not isinstance(num_neighbors.values, dict):
        return
    given = {kind.to_tuple(): hops for kind, hops in num_neighbors.values.items()}
    unknown = [kind for kind in given if kind not in edge_types]
    if unknown:
        raise ArgumentError(
            f"num_neighbors: found {unknown[0]}, expected edge types of the graph: {', '.join(map(str, edge_types))}; "
            "leave that one out."
        )
    if num_neighbors.default is None:
        check_edge_types("num_neighbors", given, edge_types)
    is_used = num_neighbors.default is not None and any(kind not in given for kind in edge_types)
    hops = [*given.values(), *([num_neighbors.default] if is_used else [])]
    if len({len(one) for one in hops}) > 1:
        raise ArgumentError(
            f"num_neighbors: found lists of {sorted({len(one) for one in hops})} hops, expected the same number for "
            "each edge type; give 0 for a hop that an edge type leaves out."
        )


def with_own_sampler(source: Any) -> Any:
    """Returns a copy of a loader that samples neighbours with gnncompile.

    This holds for ``NeighborLoader``, ``LinkNeighborLoader``, other loaders around PyG's ``NeighborSampler``, and a
    ``ZipLoader`` of such loaders. A loader with another sampler is returned as it is, and a warning names the sampler.
    So is every loader if there is no working C++ compiler, but PyG can sample.

    Raises:
        ImportError: There is neither a working C++ compiler nor a library that PyG samples with.
    """
    if not isinstance(source, DataLoader):
        return source
    changes = {}
    for name in SAMPLERS:
        given = getattr(source, name, None)
        made = None if given is None else replaced(given)
        if made is not None:
            if _can_sample():
                changes[name] = made
        elif given is not None:
            _warn(type(source).__name__, type(given).__name__)
    inner = getattr(source, "loaders", None)
    if isinstance(inner, (list, tuple)):
        changes["loaders"] = [with_own_sampler(one) for one in inner]
    return _copy(source, changes) if changes else source


def _can_sample() -> bool:
    """Compiles the sampler, so that worker processes find it. Returns False if only PyG can sample."""
    try:
        library()
    except MissingLibraryError as missing:
        if not (typing.WITH_PYG_LIB or typing.WITH_TORCH_SPARSE):
            raise
        logger.warning("PyG samples, since the sampler of gnncompile can't be compiled: %s", missing)
        return False
    return True


def _copy(source: DataLoader[Any], changes: dict[str, Any]) -> DataLoader[Any]:
    made = copy.copy(source)
    made._iterator = None
    for name, value in changes.items():
        setattr(made, name, value)
    if getattr(source.collate_fn, "__self__", None) is source:
        # The loader collates by a method of its own, which has to read the copy's sampler.
        made.collate_fn = MethodType(type(source).collate_fn, made)
    return made


_warned: set[tuple[str, str]] = set()
"""The loaders and samplers that a warning has named already."""


def _warn(loader: str, sampler: str) -> None:
    if (loader, sampler) not in _warned:
        _warned.add((loader, sampler))
        logger.warning("%s samples with %s, since gnncompile replaces only PyG's NeighborSampler", loader, sampler)
