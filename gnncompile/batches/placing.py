"""Where the attributes of a graph lie while a device samples, and how node types share the cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gnncompile.exc import ArgumentError
from gnncompile.sampling.features import Features
from gnncompile.sampling.reads import shares


@dataclass(frozen=True, eq=False)
class Placing:
    """Where attributes lie: the arguments of :class:`gnncompile.sampling.features.Features`.

    Attributes:
        place: A place, or a place for each name. Attributes without one are on the device.
        cache: The bytes of the cache for attributes of nodes on the host.
        reads: How often each node is read, ``[num_nodes]``, by the position of its node type in the sampler; None
            without a cache.
    """

    place: str | Mapping[str, str] = "device"
    cache: int = 0
    reads: Mapping[int, Tensor] | None = None

    def is_on_host(self, key: str) -> bool:
        """Whether an attribute lies on the host."""
        return (self.place if isinstance(self.place, str) else self.place.get(key, "device")) == "host"

    def check(self, rows: Mapping[str, bool]) -> None:
        """Raises an error if a place or the cache has no use; `rows` says which attributes, by name, are of nodes."""
        unknown = [] if isinstance(self.place, str) else [key for key in self.place if key not in rows]
        if unknown:
            raise ArgumentError(
                f"features: found a place for {unknown[0]!r}, expected names of attributes of nodes or edges: "
                f"{', '.join(rows)}."
            )
        if self.cache and not any(are_nodes and self.is_on_host(key) for key, are_nodes in rows.items()):
            raise ArgumentError(
                f"cache: found {self.cache} bytes and no attribute of nodes on the host, expected one, which a cache "
                "serves; name it in features, or leave cache out."
            )

    def placed(
        self, values: Mapping[int, Mapping[str, Tensor]], nodes: Mapping[int, int], device: torch.device
    ) -> dict[int, Features]:
        """Puts attributes where they belong. The cache holds attributes of nodes only, and node types share it.

        Args:
            values: The attributes, by row type and name.
            nodes: The position of the node type in the sampler, by row type. Row types of edges are missing.
            device: The device.
        """
        bytes_of = self._shares(values, nodes)
        made = {}
        for kind, found in sorted(values.items()):
            place = {name: "host" if self.is_on_host(name) else "device" for name in found}
            size = bytes_of.get(kind, 0)
            reads = None if self.reads is None or not size else self.reads[nodes[kind]]
            made[kind] = Features(found, device, place=place, cache=size, reads=reads)
        return made

    def _shares(self, values: Mapping[int, Mapping[str, Tensor]], nodes: Mapping[int, int]) -> dict[int, int]:
        """Returns the bytes of the cache by row type."""
        if self.reads is None:
            return {}
        hosted = {kind: [value for name, value in values[kind].items() if self.is_on_host(name)] for kind in nodes}
        sizes = {kind: sum(value[:1].nbytes for value in found) for kind, found in hosted.items() if found}
        least = min((size for size in sizes.values() if size), default=0)
        if self.cache < least:
            raise ArgumentError(
                f"cache: found {self.cache} bytes, expected at least {least}, which a row of the attributes on the "
                "host takes; give a larger cache, or leave cache out."
            )
        return shares(self.cache, {kind: (self.reads[nodes[kind]], size) for kind, size in sizes.items()})
