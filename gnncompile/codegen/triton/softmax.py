"""Text of a softmax over the edges of a row, and of the sums that it weighs, in one pass.

A lane is an edge of a step. Where a sum is so wide that its edges meet in each step, all edges of a row share one
maximum so far; elsewhere every lane has its own, and lanes meet behind the loop. ``m`` is the maximum so far, ``s`` the
sum of exponentials, ``keep`` what a step leaves of all sums, ``weight`` what it adds an edge with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gnncompile.codegen.triton.plan import shares_maximum
from gnncompile.codegen.triton.text import PROPAGATE

if TYPE_CHECKING:
    from gnncompile.codegen.triton.writer import Writer


def start(w: Writer, i: int) -> None:
    """Nothing is added up yet."""
    node = w.region.nodes[i]
    shape = w.row_shape(node.shape) if shares_maximum(w.region, w.plan, i) else w.tile_shape(node.shape, w.tile.edges)
    w.line(f'm{i} = tl.full({shape}, float("-inf"), {w.compute})')
    w.line(f"s{i} = tl.full({shape}, 0.0, {w.compute})")


def accumulate(w: Writer, i: int) -> None:
    """Adds the logits of a step."""
    node = w.region.nodes[i]
    w.line(f'x = tl.where(alive, {w.operand(node.args[0])}, float("-inf"))')
    if shares_maximum(w.region, w.plan, i):
        _add(w, i, f"tl.where(alive, {_scale('x', 'top')}, 0.0)", f"weight{i}")
        return
    # One exponential serves both cases: the larger of the old maximum and the new logit has exponential 1.
    w.line(f"scale = tl.where(m{i} == x, 1.0, tl.exp(-tl.abs(m{i} - x)))")
    w.line(f"keep{i} = tl.where(x > m{i}, scale, 1.0)")
    w.line(f"weight{i} = tl.where(x > m{i}, 1.0, scale)")
    w.line(f"s{i} = s{i} * keep{i} + weight{i}")
    w.line(f"m{i} = tl.maximum(m{i}, x, {PROPAGATE})")


def merge(w: Writer, i: int, maximum: str, total: str) -> None:
    """Adds the maxima and the sums of pieces, one in each lane."""
    w.line(f"x = {maximum}")
    _add(w, i, _scale("x", "top"), f"{total} * weight{i}")


def _add(w: Writer, i: int, weight: str, added: str) -> None:
    """Adds lanes whose maxima are ``x``, ``top`` being the new maximum."""
    shape = w.region.nodes[i].shape
    largest = "x"
    if shares_maximum(w.region, w.plan, i):
        largest, added = w.over_edges("x", shape, "maximum"), w.over_edges(added, shape)
    w.line(f"top = tl.maximum(m{i}, {largest}, {PROPAGATE})")
    w.line(f"keep{i} = {_scale(f'm{i}', 'top')}")
    w.line(f"weight{i} = {weight}")
    w.line(f"s{i} = s{i} * keep{i} + {added}")
    w.line(f"m{i} = top")


def join_lanes(w: Writer, i: int) -> None:
    """``max`` and ``sum`` of the whole row, or piece, and ``share``, what the sums of each lane count there."""
    shape = w.region.nodes[i].shape
    if shares_maximum(w.region, w.plan, i):
        w.line(f"max{i} = m{i}")
        w.line(f"sum{i} = s{i}")
        return
    w.line(f"max{i} = {w.over_edges(f'm{i}', shape, 'maximum')}")
    # Lanes, or pieces, whose logits are all -inf must not make a NaN of their row.
    w.line(f"share{i} = {_scale(f'm{i}', f'max{i}')}")
    w.line(f"sum{i} = {w.over_edges(f's{i} * share{i}', shape)}")


def finish(w: Writer, i: int) -> None:
    """The maximum and the sum of a row: 0 where it has no edge, and no number if its largest logit is infinite."""
    join_lanes(w, i)
    w.line(f"sum{i} = tl.where(occupied, sum{i} + (max{i} - max{i}), 0.0)")
    w.line(f"max{i} = tl.where(occupied, max{i}, 0.0)")


def _scale(old: str, new: str) -> str:
    return f"tl.where({old} == {new}, 1.0, tl.exp({old} - {new}))"
