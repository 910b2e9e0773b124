"""Lists the hubs of a layout, and their pieces, for a program that can't ask the device. Imports Triton.

:func:`gnncompile.layout.csr.hubs` finds them with operations of torch's, which take several times as many launches. A
process keeps its lists; a package makes them in each call. A graph with too few edges for a hub needs no launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnncompile import tuning
from gnncompile.codegen.triton import layout_kernels
from gnncompile.codegen.triton.entry import Entry
from gnncompile.codegen.triton.launcher import Kernel

Launch = Callable[[Entry, list[Tensor], list[Any], Any, list[int]], list[Tensor]]
"""Launches a kernel: ``launch(entry, tensors, numbers, programs, written)``.

Returns the tensors at the positions `written`, as the kernel leaves them. `programs` may be 0.
"""

BLOCK = 1024
"""The rows, or pieces, of a program."""


NO_LARGE = 2**30
"""The fewest pieces of a large hub where no hub is large."""

_kernels = {
    "count": (Kernel(layout_kernels.count, num_warps=tuning.TILES.short_warps), ("rowptr", "counts"), 4),
    "sum_up": (Kernel(layout_kernels.sum_up, num_warps=tuning.TILES.short_warps), ("counts", "totals"), 1),
    "place": (
        Kernel(layout_kernels.place, num_warps=tuning.TILES.short_warps),
        ("rowptr", "counts", "totals", "hubs"),
        4,
    ),
    "own": (Kernel(layout_kernels.own, num_warps=tuning.TILES.short_warps), ("totals", "hubs", "pieces"), 2),
}
"""The kernels in the order of their launches, with their pointers and the number of their int32 numbers."""

_WRITTEN = {"count": [1], "sum_up": [0, 1], "place": [3], "own": [1, 2]}


def list_hubs(
    rowptr: Tensor, most: Any, most_pieces: Any, longest: Any, fewest: int, launch: Launch
) -> tuple[Tensor, Tensor]:
    """Returns the tables `rows` and `pieces` of :class:`gnncompile.layout.csr.Hubs`. Large hubs come first.

    Args:
        rowptr: int32 ``[num_rows + 1]``.
        most: The largest possible number of hubs. If it is 0, so must be `most_pieces`, and nothing is launched.
        most_pieces: The largest possible number of pieces.
        longest: The most edges of a row that is no hub, and of a piece.
        fewest: The fewest pieces of a large hub.
        launch: Launches a kernel.
    """
    rows = rowptr.size(0) - 1
    # Rounded up in this way, the number of a symbol's blocks is known not to be negative.
    blocks = torch.sym_min(most, 1) * ((rows + BLOCK - 1) // BLOCK)
    sizes = {"counts": (4 * blocks,), "totals": (4,), "hubs": (most, 3), "pieces": (most_pieces,)}
    given = {"rowptr": rowptr, **{name: rowptr.new_empty(size) for name, size in sizes.items()}}
    launches = {
        "count": (blocks, [rows, blocks, longest, fewest]),
        "sum_up": (4 * torch.sym_min(most, 1), [blocks]),
        "place": (blocks, [rows, blocks, longest, fewest]),
        "own": (-(-most_pieces // BLOCK), [most, most_pieces]),
    }
    for name, (programs, numbers) in launches.items():
        kernel, names, count = _kernels[name]
        entry = kernel.entry(names, [torch.int32] * len(names), count, (BLOCK,))
        found = launch(entry, [given[one] for one in names], numbers, programs, _WRITTEN[name])
        given.update(zip([names[at] for at in _WRITTEN[name]], found, strict=True))
    return given["hubs"], given["pieces"]
