"""Gathers rows of features by node, from the memory of the device, from pinned host memory, or from a cache of both.
Imports Triton.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from gnncompile.codegen.triton.launcher import Kernel, on_device, runs_on
from gnncompile.device import device_of
from gnncompile.exc import ArgumentError, ArgumentTypeError, IndexOutOfRangeError
from gnncompile.sampling.row_kernels import HALF, gather_rows, repeat_rows

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
"""The words that kernels copy, by their bytes. Triton joins neighbouring words to 16 bytes if rows are so aligned."""

SLICES = 128
"""The counters among which programs are spread. Fewer would make programs wait for each other."""

_SECTOR = 4
"""The int64 entries of a counter, of which two are used. Each counter is a sector of 32 bytes."""

_TILE, _WIDEST = 1024, 512
"""The words that a program copies, and the most words of a row that it copies. Programs share a wider row.

benchmarks/results/nvidia-h100/gather.txt has the times of other tiles.
"""

PROGRAMS_AHEAD, WARPS_AHEAD = 64, 4
"""The programs that gather rows while a training step runs, and the warps of each.

With fewer programs the bus has too little to do. With more, the step has fewer multiprocessors.
"""

# Asserts in kernels need "debug". They stop the device as torch's own index_select does.
_gather_rows = Kernel(gather_rows, num_warps=4, debug=True, sanitize_overflow=False)
_gather_ahead = Kernel(gather_rows, num_warps=WARPS_AHEAD, debug=True, sanitize_overflow=False)
_repeat_rows = Kernel(repeat_rows, num_warps=4)


class Cache(NamedTuple):
    """Rows on the device that are read often.

    Attributes:
        rows: The rows, ``[slots, ...]``.
        slot: The slot of each row of the features, or -1, int32 ``[num_rows]``.
        counters: Sums of these are the rows gathered and the rows found in the cache, int64 ``[SLICES, 4]``.
    """

    rows: Tensor
    slot: Tensor
    counters: Tensor


def gather(x: Tensor, node: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns the rows of `x` at `node`, ``[len(node), ...]``, padded nodes included.

    It takes its indices from the device, so it can be captured in a CUDA graph. Padded nodes repeat the first rows,
    which are in the cache of the device. A tensor that needs a gradient is gathered by ``torch.index_select``.

    On a GPU, an index outside of `x` stops the device, as it does with ``torch.index_select``.

    Args:
        x: Features, ``[num_nodes, ...]``, of any dtype, contiguous. They are on the device of `node`, or in pinned host
            memory, which the kernel reads by way of the bus.
        node: Nodes, int32 or int64 ``[max_nodes]``.
        out: The contiguous tensor to write to, ``[len(node), ...]``; None allocates it.

    Raises:
        IndexError: On a CPU, an index is outside of `x`.
        TypeError: `node` is of another dtype.
        ValueError: `x` is not contiguous or has no dimension, or the tensors are on devices that do not fit.
    """
    check(x, node, out)
    if not runs(node.device) or (x.requires_grad and torch.is_grad_enabled()):
        return torch.index_select(x, 0, node, out=out)
    return gathered(x, node, out=out)


def runs(device: torch.device) -> bool:
    """Whether the kernels run on a device: a GPU, or a CPU where Triton interprets them."""
    return runs_on(gather_rows, device)


def check(x: Tensor, node: Tensor, out: Tensor | None = None, is_readable: bool = False) -> None:
    """Raises an error for tensors that can't be gathered by kernels. `is_readable` says that kernels can read `x`."""
    if node.dtype not in (torch.int32, torch.int64):
        raise ArgumentTypeError(f"node: found {node.dtype}, expected int32 or int64; call node.long().")
    if node.dim() != 1 or node.numel() >= HALF.value:
        raise ArgumentError(
            f"node: found shape {list(node.shape)}, expected one dimension and fewer than {HALF.value} entries; "
            "call node.flatten(), or gather in parts."
        )
    if x.dim() < 1 or x.layout != torch.strided or not x.is_contiguous():
        raise ArgumentError(
            f"x: found shape {list(x.shape)}, layout {x.layout} and strides that are not contiguous, expected a "
            "contiguous tensor [num_nodes, ...]; call x.contiguous() once, before the loop."
            if x.dim() and x.layout == torch.strided
            else f"x: found shape {list(x.shape)} and layout {x.layout}, expected a dense tensor [num_nodes, ...]."
        )
    if out is not None:
        made = (out.shape, out.dtype, out.device, out.is_contiguous())
        if made != ((node.numel(), *x.shape[1:]), x.dtype, node.device, True):
            raise ArgumentError(
                f"out: found shape {list(out.shape)}, {out.dtype} on {out.device}, expected a contiguous tensor of "
                f"shape {[node.numel(), *x.shape[1:]]}, {x.dtype} on {node.device}."
            )
    if x.device != node.device and not is_readable and not x.is_pinned():
        raise ArgumentError(
            f"x: found a tensor on {x.device}, and node on {node.device}, expected both on one device, or x in pinned "
            "host memory; move one of them, or call x.pin_memory() once."
        )
    if node.numel() and not device_of(node.device).host_waits:
        least, most = (int(value) for value in node.aminmax())
        if least < 0 or most >= x.size(0):
            raise IndexOutOfRangeError(
                f"node: found rows {least} to {most}, expected 0 to {x.size(0) - 1}, rows of x; x needs a row per node."
            )


def gathered(
    x: Tensor,
    node: Tensor,
    *,
    out: Tensor | None = None,
    end: Tensor | None = None,
    cache: Cache | None = None,
    reads: Tensor | None = None,
    is_ahead: bool = False,
    position: Tensor | None = None,
) -> Tensor:
    """Gathers rows by the kernels; see :func:`gather` for the arguments, which are not checked.

    Args:
        x: The features.
        node: The nodes.
        out: The memory of the result; None allocates it.
        end: The number of valid nodes, int64 on the device. The nodes after it repeat the first
            :data:`~gnncompile.sampling.kernels.REPEATED` or fewer, so the first rows of the result are copied. They are
            neither read again from `x` nor counted.
        cache: The cache of `x`.
        reads: Counts how often each row is read, int32 ``[num_nodes]``.
        is_ahead: Whether other kernels run at the same time. Few programs then gather, and nothing is written after the
            valid rows; :func:`padded` writes the rest.
        position: The row of the result for each entry of `node`, int64 ``[len(node)]``; None keeps the order. Only
            ahead, where valid nodes have the first positions.
    """
    out = torch.empty(node.numel(), *x.shape[1:], dtype=x.dtype, device=node.device) if out is None else out
    size = math.prod(x.shape[1:]) * x.element_size()
    if not size or not node.numel():
        return out
    word = _widest_word(size, x, out)
    node, into = node.contiguous(), _as_words(out, word)
    tile, tiles = _tiles(node.numel(), size // word, _TILE * WARPS_AHEAD // 4 if is_ahead else _TILE)
    types = f"{into.dtype} {node.dtype}"
    held = (node, node, node) if cache is None else (_as_words(cache.rows, word), cache.slot, cache.counters)
    ended, tallied, moved = (node if given is None else given for given in (end, reads, position))
    tensors = (into, node, _as_words(x, word), held[0], held[1], ended, held[2], tallied, moved)
    numbers = (*divmod(x.size(0), HALF.value), node.numel(), tiles)
    given = (value is not None for value in (end, cache, reads, position))
    constants = (*tile, *given, _SECTOR, SLICES, types)
    with on_device(node.get_device()):
        if is_ahead:
            _gather_ahead(min(tiles, PROGRAMS_AHEAD), tensors, numbers, constants)
        else:
            _gather_rows(tiles, tensors, numbers, constants)
    if end is not None and not is_ahead:
        _repeat(into, end, tile, tiles)
    return out


def padded(rows: Tensor, end: Tensor, out: Tensor) -> None:
    """Copies rows that were gathered ahead, and repeats the first rows after them; see `end` of :func:`gathered`.

    Args:
        rows: The valid rows and others after them, ``[max_nodes, ...]``.
        end: The number of valid rows, int64 ``[1]`` on the device.
        out: The contiguous tensor to write to, ``[size, ...]``. It has room for the valid rows.
    """
    number = min(rows.size(0), out.size(0))
    out[:number].copy_(rows[:number])
    size = math.prod(out.shape[1:]) * out.element_size()
    if size and out.size(0):
        word = _widest_word(size, out)
        tile, tiles = _tiles(out.size(0), size // word)
        _repeat(_as_words(out, word), end, tile, tiles)


def _repeat(rows: Tensor, end: Tensor, tile: tuple[int, int, int], tiles: int) -> None:
    with on_device(rows.get_device()):
        _repeat_rows(tiles, (rows, end), (rows.size(0),), (*tile, str(rows.dtype)))


def _tiles(rows: int, words: int, size: int = _TILE) -> tuple[tuple[int, int, int], int]:
    """Returns the words of a row, the words and the rows of a tile of about `size` words, and the number of tiles."""
    width = min(triton.next_power_of_2(words), _WIDEST)
    tall = max(size // width, 1)
    return (words, width, tall), -(-rows // tall) * -(-words // width)


def counters(device: torch.device) -> Tensor:
    """Returns counters of 0 for a :class:`Cache`."""
    return torch.zeros(SLICES, _SECTOR, dtype=torch.int64, device=device)


def _widest_word(size: int, *tensors: Tensor) -> int:
    """Returns the bytes of the widest word that divides rows of `size` bytes, and their addresses."""
    for tensor in tensors:
        size |= tensor.data_ptr() | int(tensor.storage_offset()) * tensor.element_size()
    return next(word for word in WORDS if not size % word)


def _as_words(x: Tensor, word: int) -> Tensor:
    """Returns the rows as words: ``[num_rows, words]``."""
    return x.detach().view(x.size(0), math.prod(x.shape[1:])).view(WORDS[word])
