"""Lists the hubs of a layout, and their pieces, without a question to the device. Imports Triton.

:func:`gnncompile.layout.csr.hubs` finds them with operations of torch's, which take several times as many launches. A
process keeps its lists (:func:`find_hubs`); a package makes them in each call. A graph with too few edges for a hub
needs no launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnncompile import tuning
from gnncompile.codegen.triton import layout_kernels
from gnncompile.codegen.triton.entry import Entry
from gnncompile.codegen.triton.launcher import Kernel, on_device

Launch = Callable[[Entry, list[Tensor], list[Any], Any, list[int]], list[Tensor]]
"""Launches a kernel: ``launch(entry, tensors, numbers, programs, written)``.

Returns the tensors at the positions `written`, as the kernel leaves them. `programs` may be 0.
"""

BLOCK = 1024
"""The rows, or pieces, of a program."""

ORDERED = 64
"""The hubs of a program that orders them, and those that it compares them with at once."""

FEW = 4 * BLOCK
"""The most rows whose hubs one program lists, in one launch. More rows take four launches."""

NO_LARGE = 2**30
"""The fewest pieces of a large hub where no hub is large."""

_kernels = {
    name: (Kernel(kernel, num_warps=tuning.TILES.short_warps), names, count)
    for name, kernel, names, count in (
        ("list_few", layout_kernels.list_few, ("rowptr", "hubs", "pieces"), 5),
        ("count", layout_kernels.count, ("rowptr", "counts"), 4),
        ("sum_up", layout_kernels.sum_up, ("counts", "totals"), 1),
        ("place", layout_kernels.place, ("rowptr", "counts", "totals", "hubs"), 4),
        ("order", layout_kernels.order, ("hubs", "totals", "ordered"), 1),
        ("own", layout_kernels.own, ("totals", "hubs", "pieces"), 2),
    )
}
"""The kernels in the order of their launches, with their pointers and the number of their int32 numbers."""

_WRITTEN = {"list_few": [1, 2], "count": [1], "sum_up": [0, 1], "place": [3], "order": [2], "own": [1, 2]}


def longest_of(edges: Any) -> Any:
    """Returns the most edges of a row that is no hub, and of a piece of a hub.

    A process takes a power of two (:func:`gnncompile.layout.csr.most_edges`), but a symbol has no bit length.
    """
    step = tuning.TILES.hub_edges
    return torch.sym_max(edges // tuning.TILES.hub_share // step * step, step)


def most_hubs(rows: Any, edges: Any, longest: Any) -> tuple[Any, Any]:
    """Returns the largest possible numbers of hubs and of pieces."""
    most = torch.sym_min(edges // (longest + 1), rows)
    return most, edges // longest * torch.sym_min(most, 1) + most


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
    any_hub, are_many = torch.sym_min(most, 1), torch.sym_min(rows // (FEW + 1), 1)
    given = _Tables(rowptr, rowptr.new_empty((most, 3)), rowptr.new_empty((most_pieces,)), any_hub * are_many, launch)
    given.launch("list_few", any_hub * (1 - are_many), [rows, longest, fewest, most, most_pieces])
    given.count(longest, fewest)
    given.place(longest, fewest)
    given.own()
    return given.tensors["hubs"], given.tensors["pieces"]


def list_exact_hubs(rowptr: Tensor, edges: Any, launch: Launch) -> tuple[Tensor, Tensor]:
    """Returns the tables of :func:`list_hubs` without rows after the last hub and piece. The host waits for the device.

    Hubs have falling numbers of pieces, so large ones come first whatever their fewest pieces are.

    Args:
        rowptr: int32 ``[num_rows + 1]``.
        edges: The number of edges of the layout.
        launch: Launches a kernel.
    """
    longest, rows = longest_of(edges), rowptr.size(0) - 1
    any_hub = torch.sym_min(most_hubs(rows, edges, longest)[0], 1)
    given = _Tables(rowptr, rowptr.new_empty((0, 3)), rowptr.new_empty((0,)), any_hub, launch)
    given.tensors["totals"] = rowptr.new_zeros((4,))
    given.count(longest, NO_LARGE)
    sizes = [one.item() for one in given.tensors["totals"].view(2, 2).sum(1)]
    for size in sizes:
        torch._check(size >= 0)
    hubs, ordered = (rowptr.new_empty((sizes[0], 3)) for _ in range(2))
    given.tensors |= {"hubs": hubs, "ordered": ordered, "pieces": rowptr.new_empty((sizes[1],))}
    given.place(longest, NO_LARGE)
    given.order()
    given.own()
    return given.tensors["hubs"], given.tensors["pieces"]


def find_hubs(rowptr: Tensor, most: int, most_pieces: int, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the tables of :func:`list_hubs`, by falling numbers of pieces, and four int32: the last two are the
    pieces, the first two the hubs, in two parts each. The kernels are launched here, and the host does not wait.

    Args:
        rowptr: int32 ``[num_rows + 1]``.
        most: The largest possible number of hubs, at least 1.
        most_pieces: The largest possible number of pieces.
        longest: The most edges of a row that is no hub, and of a piece.
    """
    hubs, ordered = (rowptr.new_empty((most, 3)) for _ in range(2))
    given = _Tables(rowptr, hubs, rowptr.new_empty((most_pieces,)), 1, None)
    given.tensors["ordered"] = ordered
    with on_device(rowptr.get_device()):
        given.count(longest, NO_LARGE)
        given.place(longest, NO_LARGE)
        given.order()
        given.own()
    return ordered, given.tensors["pieces"], given.tensors["totals"]


def compile_ahead() -> None:
    """Starts to compile the kernels of :func:`find_hubs`, in other threads."""
    for name in ("count", "sum_up", "place", "order", "own"):
        kernel, names, count = _kernels[name]
        kernel.compile_ahead([torch.int32] * len(names), count, (ORDERED if name == "order" else BLOCK,))


class _Tables:
    """The tensors of the kernels, which launches replace.

    Args:
        rowptr: int32 ``[num_rows + 1]``.
        hubs: The table of hubs.
        pieces: The table of pieces.
        any_hub: 0 if there are no hubs or another kernel lists them, else 1.
        launch: Launches a kernel; None launches it here, and it writes to the tensors themselves.
    """

    def __init__(self, rowptr: Tensor, hubs: Tensor, pieces: Tensor, any_hub: Any, launch: Launch | None) -> None:
        self.rows, self.start = rowptr.size(0) - 1, launch
        # Rounded up in this way, the number of a symbol's blocks is known not to be negative.
        self.blocks = any_hub * ((self.rows + BLOCK - 1) // BLOCK)
        self.any_hub = any_hub
        counts, totals = rowptr.new_empty((4 * self.blocks,)), rowptr.new_empty((4,))
        self.tensors = {"rowptr": rowptr, "hubs": hubs, "pieces": pieces, "counts": counts, "totals": totals}

    def launch(self, name: str, programs: Any, numbers: list[Any], block: int = BLOCK) -> None:
        """Launches one of the kernels."""
        kernel, names, count = _kernels[name]
        given = [self.tensors[one] for one in names]
        if self.start is None:
            kernel(programs, given, numbers, (block,))
            return
        entry = kernel.entry(names, [torch.int32] * len(names), count, (block,))
        found = self.start(entry, given, numbers, programs, _WRITTEN[name])
        self.tensors.update(zip([names[at] for at in _WRITTEN[name]], found, strict=True))

    def count(self, longest: Any, fewest: int) -> None:
        """Counts hubs and pieces."""
        self.launch("count", self.blocks, [self.rows, self.blocks, longest, fewest])
        self.launch("sum_up", 4 * self.any_hub, [self.blocks])

    def place(self, longest: Any, fewest: int) -> None:
        """Writes the table of hubs."""
        self.launch("place", self.blocks, [self.rows, self.blocks, longest, fewest])

    def order(self) -> None:
        """Writes the table of hubs by falling numbers of pieces."""
        most = self.tensors["hubs"].size(0)
        self.launch("order", (most + ORDERED - 1) // ORDERED, [most], ORDERED)
        self.tensors["hubs"] = self.tensors["ordered"]

    def own(self) -> None:
        """Writes the table of pieces, and the end of the table of hubs."""
        hubs, pieces = self.tensors["hubs"].size(0), self.tensors["pieces"].size(0)
        self.launch("own", self.any_hub * ((pieces + BLOCK - 1) // BLOCK), [hubs, pieces])
