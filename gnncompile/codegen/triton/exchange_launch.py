"""Launches the kernel that packs and adds exchanged rows. Imports Triton."""

from __future__ import annotations

from torch import Tensor

from gnncompile.codegen.triton.exchange_kernels import move_rows
from gnncompile.codegen.triton.launcher import Kernel, on_device

_move_rows = Kernel(move_rows, num_warps=4)


def launch(out: Tensor, x: Tensor, index: Tensor, tiles: int, constants: tuple[int, int, int, bool]) -> None:
    """Launches the kernel on the device of the tensors; see :func:`move_rows` for the arguments."""
    more = (out.element_size() == 2, f"{out.dtype} {index.dtype}")
    with on_device(out.get_device()):
        _move_rows(tiles, (out, x, index.contiguous()), (index.size(0), tiles), (*constants, *more))
