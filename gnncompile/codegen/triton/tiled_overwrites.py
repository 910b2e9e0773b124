"""Finds the inputs that a walk in tiles may write over: an output per edge may then have the memory of an input.

A gradient per edge is often read for the last time by the walk that writes the next one. If both have the same memory,
the peak of a backward is one matrix of edges lower.

A program reads and writes the rows of its own edges only, so other programs do not matter. Within a program, each
number of a wide row is loaded by one thread: a tile has at least as many of them as a program has threads. Another
thread may write over it. So the written number must follow from the loaded one: every operation keeps the channel or
takes the whole row. A number that is loaded twice, or that later walks, kernels per row or products over all edges
read, must not be written over. The rows of a tile behind the last edge are copies of the last edge's row, and may
become copies of what is written there. No result follows from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gnncompile.codegen.triton.tiled_layers import is_wide_row
from gnncompile.codegen.triton.tiled_phases import Phase
from gnncompile.codegen.triton.tiled_rows import RowPart
from gnncompile.ir.region import LAYERS, Region, Space, behind


def overwritable(
    region: Region, phases: Sequence[Phase], products: Iterable[int], parts: Iterable[RowPart]
) -> dict[int, tuple[int, ...]]:
    """Returns the inputs that each output may be written over: their nodes, by the output's position.

    Outputs that need memory of their own are left out.

    Args:
        region: The tiled region.
        phases: Its walks, in order.
        products: The sums over all edges that kernels behind the walks compute.
        parts: What kernels behind the walks reduce to rows.
    """
    if not region.unmasked:
        return {}
    later = {a for i in products for a in region.nodes[i].args}.union(*(part.nodes for part in parts))
    later |= {out.node for out in region.outputs}
    candidates, found = [i for i in _own_rows(region) if i not in later], dict[int, tuple[int, ...]]()
    for number in reversed(range(len(phases))):
        phase = phases[number]
        for k in phase.outputs:
            over = [i for i in candidates if _are_alike(region, k, i) and _may_write(region, phase, k, i)]
            if over:
                found[k] = tuple(over)
        candidates = [i for i in candidates if i not in _read_by(region, phase)]
    return found


def _own_rows(region: Region) -> list[int]:
    """Returns the inputs that have a wide row for each edge, in a tensor that no other input has."""
    inputs = [i for i, node in enumerate(region.nodes) if node.op == "input"]
    tensors = [p for i in inputs for p in region.nodes[i].positions]
    return [i for i in inputs if _is_own_row(region, i) and tensors.count(region.nodes[i].positions[0]) == 1]


def _is_own_row(region: Region, i: int) -> bool:
    node = region.nodes[i]
    return node.space is Space.EDGE and not node.through_index and is_wide_row(node) and len(node.positions) == 1


def _are_alike(region: Region, k: int, i: int) -> bool:
    """Whether an output has the dtype and the channels of an input."""
    out, node = region.outputs[k], region.nodes[i]
    return out.dtype == node.dtype and region.nodes[out.node].shape == node.shape


def _read_by(region: Region, phase: Phase) -> set[int]:
    """Returns the values that a walk reads."""
    return {*phase.need}.union(*(region.nodes[s].args for s in phase.sums))


def _may_write(region: Region, phase: Phase, k: int, i: int) -> bool:
    """Whether a walk may write an output over an input that no later kernel reads."""
    if i not in _read_by(region, phase):
        return True
    follows = i in behind(region.nodes, [region.outputs[k].node], phase.loads)
    return follows and _is_loaded_once(region, phase, i)


def _is_loaded_once(region: Region, phase: Phase, i: int) -> bool:
    """Whether no layer comes between the reads of an input: rows are loaded again behind a layer (``load_again``)."""
    steps = {n: step for step, n in enumerate(phase.need)}
    readers = [step for n, step in steps.items() if n not in phase.loads and i in region.nodes[n].args]
    sums = [region.nodes[s].args for s in phase.sums if i in region.nodes[s].args]
    last = max([*readers, *(len(steps) for _ in sums)])
    return not any(region.nodes[n].op in LAYERS for n in phase.need[steps[i] + 1 : last])
