"""Merges regions that walk the same edges. Common inputs are read once, and equal values are computed once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from gnncompile.ir.builder import Builder
from gnncompile.ir.region import Output, Region, Shape, Space, behind

_Read = tuple[Hashable, Space, Shape]
"""A tensor, its space and its feature shape. A tensor position of a region has one space and one feature shape."""


@dataclass(frozen=True)
class Part:
    """One region to be merged.

    Attributes:
        region: The region.
        tensors: A key for the tensor at each position; tensors with equal keys are read once.
        kept: Positions of the outputs that are still wanted.
    """

    region: Region
    tensors: Sequence[Hashable]
    kept: tuple[int, ...]


@dataclass(frozen=True)
class Merged:
    """The merged region.

    Attributes:
        region: The region.
        tensors: The key of the tensor at each position.
        outputs: For each part, the position of each kept output among the outputs of the region.
    """

    region: Region
    tensors: tuple[Hashable, ...]
    outputs: tuple[tuple[int, ...], ...]


def merge(parts: Sequence[Part]) -> Merged:
    """Merges regions that walk the same edges by the same rows. No region may read an output of another region."""
    b = Builder(parts[0].region.by, parts[0].region.unmasked, any(part.region.tiled for part in parts))
    tensors: dict[_Read, int] = {}
    outputs: dict[Output, int] = {}
    places = []
    for part in parts:
        copied = _copy(b, part, tensors)
        kept = [replace(out, node=copied[out.node]) for out in (part.region.outputs[k] for k in part.kept)]
        places.append(tuple(outputs.setdefault(out, len(outputs)) for out in kept))
    return Merged(b.finish(list(outputs)), tuple(tensor for tensor, _, _ in tensors), tuple(places))


def _copy(b: Builder, part: Part, tensors: dict[_Read, int]) -> dict[int, int]:
    """Copies the nodes that the kept outputs need; returns the new index of each node."""
    nodes = part.region.nodes
    copied: dict[int, int] = {}
    for at in sorted(behind(nodes, (part.region.outputs[k].node for k in part.kept))):
        node = replace(nodes[at], args=tuple(copied[a] for a in nodes[at].args))
        if node.op == "input":
            reads = [(part.tensors[k], node.space, node.shape) for k in node.positions]
            if reads[0] not in tensors:
                tensors.update({read: len(tensors) + k for k, read in enumerate(reads)})
            node = replace(node, value=tensors[reads[0]])
        copied[at] = b.emit(node)
    return copied
