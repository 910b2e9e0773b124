"""Builds and launches the Triton kernel of a region. Imports Triton, so import this module only where it is wanted."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor

from gnncompile.codegen.cache_dir import cache_dir
from gnncompile.codegen.triton_plan import Tile, choose_tile, power_of_two, schedule
from gnncompile.codegen.triton_source import KERNEL, parameters, source
from gnncompile.ir.reference import Layout
from gnncompile.ir.region import Region

INDEX_NAMES = ("rowptr", "col", "edge")


class TritonKernel:
    """One region as a Triton kernel.

    Args:
        region: What to compute.
        tile: The tile; chosen by the width of the region if left out.

    Attributes:
        text: The generated module.
        tile: What one program computes at a time.

    Raises:
        Unsupported: The region can't be expressed as a Triton kernel.
    """

    def __init__(self, region: Region, tile: Tile | None = None) -> None:
        plan = schedule(region)
        self.tile = tile = tile or choose_tile(region, plan)
        self.text = source(region, tile)
        names = parameters(region, plan, tile)
        self._kernel: Any = getattr(_module(self.text), KERNEL)
        self._tensors = tuple(int(name[1:]) for name in names if name[0] == "t")
        self._indices = tuple(name for name in INDEX_NAMES if name in names)
        self._counts_rows = "num_rows" in names
        self._columns = -(-region.grid[1] // tile.channels) if power_of_two(region.grid[1]) > tile.channels else 1
        self._options: dict[str, Any] = {}
        if isinstance(self._kernel, triton.JITFunction):  # the interpreter takes no compile options
            self._options = {"num_warps": tile.num_warps, "enable_fp_fusion": not region.exact}
        self._compiled: dict[Any, Any] = {}

    def __call__(self, tensors: Sequence[Tensor], layout: Layout, outputs: Sequence[Tensor]) -> None:
        """Launches the kernel on the current stream of the tensors' device.

        Args:
            tensors: The region's tensors, contiguous, ``heads * channels`` elements a row, in the types that its
                input nodes state.
            layout: The edges, ordered by the rows that the region walks; on the device of the tensors.
            outputs: Where results go: contiguous, ``[num_rows, heads * channels]`` elements, or
                ``[num_edges, heads * channels]`` for a value per edge. Every row is written; edges that are masked
                out are not, so an output per edge must hold zeros there.
        """
        rows = layout.num_rows
        if rows == 0:
            return
        arguments: list[Any] = [tensors[i] for i in self._tensors]
        arguments += [getattr(layout, name) for name in self._indices]
        arguments += outputs
        device = outputs[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self._launch(arguments, rows, device)
        else:
            self._launch(arguments, rows, device)

    def _launch(self, arguments: list[Any], rows: int, device: torch.device) -> None:
        """Launches the compiled kernel directly once it exists: Triton's own lookup costs several times as much."""
        address, types = 0, []
        for tensor in arguments:
            address |= tensor.data_ptr()
            types.append(tensor.dtype)
        key = (device.index, *types)
        # A kernel that was compiled for aligned pointers serves every call whose pointers are all aligned.
        aligned = not address & 15
        if self._counts_rows:
            arguments.append(rows)
        grid = (-(-rows // self.tile.rows), self._columns, 1)
        compiled = self._compiled.get(key) if aligned else None
        if compiled is not None:
            compiled[grid](*arguments)
            return
        compiled = self._kernel[grid](*arguments, **self._options)
        if aligned and compiled is not None:  # the interpreter returns None
            self._compiled[key] = compiled


def _module(text: str) -> ModuleType:
    """Imports a generated module from the cache folder (Triton reads a kernel's source from its file)."""
    digest = hashlib.sha256(f"{triton.__version__}\n{text}".encode()).hexdigest()
    folder = cache_dir() / "triton"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"region_{digest[:32]}.py"
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        _write(path, text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"can't import the generated kernel {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _write(path: Path, text: str) -> None:
    """Writes a file whole or not at all, since other processes may write and read it at the same time."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
