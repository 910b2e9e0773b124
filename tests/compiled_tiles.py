"""Compiles the Triton kernels of tiled regions for an H100 without a GPU, and prints what ptxas says of them.

``python -m tests.compiled_tiles mesh_graph_net 128 float32 bfloat16`` prints registers, bytes of spilled registers and
of shared memory of a region's forward and backward.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gnncompile.codegen.triton import tiled_writer
from gnncompile.codegen.triton.module import load_module
from gnncompile.codegen.triton.tiled_phases import Phase
from gnncompile.codegen.triton.tiled_plan import TiledPlan
from gnncompile.codegen.triton.tiled_tile import TiledTile, choose_tiled_tile
from gnncompile.codegen.triton.tiled_writer import TiledWriter
from gnncompile.ir.region import Region
from gnncompile.ir.residuals import with_residuals
from tests.tiled_regions import REGIONS, Maker, tiled_gradient_of

POINTERS = {
    "float32": "*fp32",
    "float64": "*fp64",
    "bfloat16": "*bf16",
    "float16": "*fp16",
    "bool": "*i1",
    "int64": "*i64",
    "bits": "*i32",
}


def both_ways(name: str, channels: int, dtype: str) -> dict[str, Region]:
    """The tiled regions of a forward and its backward."""
    visible = len(REGIONS[name](Maker(dtype), channels).outputs)  # type: ignore[call-arg]
    region = with_residuals(REGIONS[name](Maker(dtype), channels))  # type: ignore[call-arg]
    return {"forward": region, "backward": tiled_gradient_of(region, visible)}


def signature(plan: TiledPlan, names: list[str]) -> dict[str, str]:
    """The types of a kernel's pointers."""
    region = plan.region
    inputs = {int(n.value or 0): n.dtype for n in region.inputs}
    stored = {place: plan.stored[i] for i, place in plan.places.items()}
    if region.double:  # walks take bools as numbers
        inputs = {p: "float64" if dtype == "bool" else dtype for p, dtype in inputs.items()}
    stored |= {f"out{k}": o.dtype for k, o in enumerate(region.outputs)}
    found = {}
    for name in names:
        if name in ("rowptr", "col", "edge", "rows"):
            found[name] = "*i32"
        elif name == "sums":
            found[name] = POINTERS[region.compute]
        else:
            found[name] = POINTERS[stored[name]] if name in stored else "*fp16" if name[0] == "w" else ""
            found[name] = found[name] or POINTERS[inputs[int(name[1:])]]
    return found


def compiled(function: Any, pointers: dict[str, str], numbers: tuple[str, ...], **options: Any) -> str:
    """Compiles a kernel, and returns what ptxas says of it."""
    begun = time.perf_counter()
    aligned = {(at,): [["tt.divisibility", 16]] for at in range(len(pointers))}
    source = ASTSource(function, pointers | dict.fromkeys(numbers, "i32"), {}, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "kernel.ptx"
        text.write_text(made.asm["ptx"])
        ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
        command = [str(ptxas), "-v", "-arch=sm_90a", str(text), "-o", str(text.with_suffix(".cubin"))]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = re.search(r"Used (\d+) registers", told), re.search(r"(\d+) bytes spill stores", told)
    assert registers and spilled
    return (
        f"{registers[1]} registers, {spilled[1]} bytes spilled, {made.metadata.shared} bytes shared, "
        f"{time.perf_counter() - begun:.1f} s"
    )


def report(region: Region, tile: TiledTile | None) -> str:
    """What ptxas says of the walks of a region."""
    plan = TiledPlan(region)
    return "\n    ".join(report_phase(plan, phase, tile or choose_tiled_tile(plan, phase)) for phase in plan.phases)


def report_phase(plan: TiledPlan, phase: Phase, tile: TiledTile) -> str:
    """What ptxas says of one walk."""
    writer = TiledWriter(plan, phase, tile)
    function = getattr(load_module(writer.module()), tiled_writer.KERNEL)
    options = {"num_warps": tile.num_warps, "num_stages": 1, "maxnreg": tile.registers}
    told = compiled(
        function,
        signature(plan, writer.parameters),
        tiled_writer.NUMBERS,
        enable_fp_fusion=plan.region.contracts,
        **options,
    )
    return f"{tile.edges} edges, {tile.num_warps} warps, {tile.programs} programs: {told}"


def main(name: str, channels: str, *words: str) -> None:
    """Prints the reports of a region's forward and backward for each dtype.

    A word of numbers is a tile, ``edges:warps:programs:keeps_weights:stages``, for the dtypes behind it.
    """
    tile = None
    for word in words:
        if ":" in word:
            edges, warps, programs, keeps, stages = map(int, word.split(":"))
            tile = TiledTile(edges, warps, programs, bool(keeps), stages)
            continue
        for way, region in both_ways(name, int(channels), word).items():
            print(f"{name} {channels} {word} {way}\n    {report(region, tile)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
