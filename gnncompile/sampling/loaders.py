"""Changes PyG's loaders so that they sample with gnncompile."""

from __future__ import annotations

import copy
import logging
from types import MethodType
from typing import Any

from torch.utils.data import DataLoader
from torch_geometric import typing

from gnncompile.exc import MissingLibraryError
from gnncompile.sampling.cpu import library
from gnncompile.sampling.pyg import replaced

logger = logging.getLogger(__name__)

SAMPLERS = ("node_sampler", "link_sampler")
"""The attributes of PyG's loaders that hold a sampler."""


def samples_neighbors(source: Any) -> bool:
    """Whether a loader holds a sampler."""
    return any(getattr(source, name, None) is not None for name in SAMPLERS)


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
