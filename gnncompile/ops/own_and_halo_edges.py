"""The ops by which a region walks edges from own rows while halo rows arrive, and then the other edges.

A pass puts them into the graphs that Inductor compiles: :mod:`gnncompile.passes.post_grad.walk_own_edges_first`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gnncompile.ir.region import Space, parse
from gnncompile.ir.two_walks import TwoWalks, two_walks
from gnncompile.layout.divided import Edges, divided, divided_values
from gnncompile.ops.region import LIBRARY

_OPS = torch.ops.gnncompile
_TAGS = (torch.Tag.pt2_compliant_tag,)
_REGION = "(Tensor[] tensors, Tensor[] layout, str spec, Tensor halo, int joined"
LIBRARY.define(f"own_edges{_REGION}) -> Tensor", tags=_TAGS)
LIBRARY.define(f"halo_edges{_REGION}, Tensor started) -> Tensor[]", tags=_TAGS)

LEAST_HALO = 4
"""Edges from own rows are walked first if there is at least one halo row for every 4 own rows.

Partial results are written and read again, 2 * 4 bytes per channel of each own row, at about 3 TB/s. Halo rows arrive
at about 0.3 TB/s, 4 bytes per channel.
"""


def divides(spec: str) -> bool:
    """Whether the edges of a region can be walked in two halves."""
    return two_walks(parse(spec)) is not None


def halves(spec: str) -> TwoWalks:
    """Returns the two halves of a region whose edges can be walked in two halves."""
    found = two_walks(parse(spec))
    assert found is not None
    return found


def walk_own_edges(
    kernel: Callable[..., None],
    spec: str,
    tensors: Sequence[Tensor],
    layout: Sequence[Tensor],
    halo: Tensor,
    joined: int,
) -> list[Tensor] | None:
    """Walks the edges from own rows, if there are many halo rows.

    Args:
        kernel: The :class:`gnncompile.runtime.launch.Call` of the region's first half.
        spec: The region as a string.
        tensors: The region's tensors. Halo rows have not arrived yet.
        layout: rowptr, col and edge of its walk.
        halo: The halo of a plan ``[num_halo, 0]``.
        joined: The position of a tensor with own rows, then halo rows.

    Returns:
        The partial results, or None if there are few halo rows: then the region is walked at once, later.
    """
    own = tensors[joined].size(0) - halo.size(0)
    given = _half(spec, tensors, layout, own, 0) if LEAST_HALO * halo.size(0) >= max(own, 1) else None
    if given is None:
        return None
    first, rows = halves(spec).first, layout[0].size(0) - 1
    dtype = getattr(torch, first.compute)
    partial = [torch.empty(rows, *out.trailing, dtype=dtype, device=halo.device) for out in first.outputs]
    kernel(given[0][: first.count], given[1], partial)
    return partial


def _half(
    spec: str, tensors: Sequence[Tensor], layout: Sequence[Tensor], own: int, which: int
) -> tuple[list[Tensor], Edges] | None:
    """Returns the tensors and the layout of one half of a walk; None if they can't be made while a graph is captured.

    Args:
        spec: The region as a string.
        tensors: Its tensors.
        layout: rowptr, col and edge of its walk.
        own: The number of own rows.
        which: 0 for edges from own rows, 1 for edges from halo rows.
    """
    found = divided(layout, own)
    if found is None:
        return None
    given = list(tensors)
    for at in _ordered(spec):
        values = divided_values(tensors[at], layout, found)
        if values is None:
            return None
        given[at] = values[which]
    return given, found.halves[which]


@lru_cache(maxsize=4096)
def _ordered(spec: str) -> tuple[int, ...]:
    """The positions of the tensors that a region reads in the order of its walk."""
    return tuple(int(n.value or 0) for n in parse(spec).inputs if n.space is Space.ORDERED)


def walk_halo_edges(
    kernels: tuple[Callable[..., None], Callable[..., None]],
    spec: str,
    tensors: Sequence[Tensor],
    layout: Sequence[Tensor],
    outputs: Sequence[Tensor],
    halo: Tensor,
    joined: int,
    partial: Sequence[Tensor] | None,
) -> None:
    """Fills the outputs of a region, after halo rows have arrived.

    Args:
        kernels: The :class:`gnncompile.runtime.launch.Call` of the region, and of its second half.
        spec: The region as a string.
        tensors: The region's tensors.
        layout: rowptr, col and edge of its walk.
        outputs: Its outputs.
        halo: The halo of a plan ``[num_halo, 0]``.
        joined: The position of a tensor with own rows, then halo rows.
        partial: What :func:`walk_own_edges` returned.
    """
    whole, second = kernels
    if partial is None:
        whole(tensors, layout, outputs)
        return
    given = _half(spec, tensors, layout, tensors[joined].size(0) - halo.size(0), 1)
    assert given is not None  # the first half has divided them
    second([*given[0][: parse(spec).count], *partial], given[1], outputs)


def _own_edges(tensors: list[Tensor], layout: list[Tensor], spec: str, halo: Tensor, joined: int) -> Tensor:
    return halo.new_empty(0)


def _halo_edges(
    tensors: list[Tensor], layout: list[Tensor], spec: str, halo: Tensor, joined: int, started: Tensor
) -> Any:
    return _OPS.region(tensors, layout, spec)


for _name, _function in (("own_edges", _own_edges), ("halo_edges", _halo_edges)):
    LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gnncompile::{_name}", _function, lib=LIBRARY)
