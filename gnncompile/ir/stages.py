"""The backward of a region: a short sequence of regions, called stages. Stages that can share a walk are merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from gnncompile.ir.merge import Part, merge
from gnncompile.ir.region import Region


@dataclass(frozen=True)
class Operand:
    """The origin of a stage's tensor.

    Attributes:
        kind: ``"input"`` or ``"output"`` of the forward, ``"cotangent"`` of an output, or ``"temporary"``, which an
            earlier stage makes. ``"missing"`` is a value of the forward that is no output but should be.
            ``"deferred_row"`` is a placeholder, which is replaced before a stage is cut.
        index: Position among the tensors of that kind. Temporaries are counted over all stages. For ``"missing"``,
            the index of the forward's node.
    """

    kind: str
    index: int


@dataclass(frozen=True)
class Stage:
    """One region of the backward, and the origin of each tensor that it reads."""

    region: Region
    operands: tuple[Operand, ...]


@dataclass(frozen=True)
class Gradient:
    """The gradient of one input.

    Attributes:
        temporaries: The temporaries whose sum is the gradient.
        sum_rows: Whether the temporaries must be summed over their rows, as for a parameter.
    """

    temporaries: tuple[int, ...]
    sum_rows: bool


@dataclass(frozen=True)
class Backward:
    """The stages in order, and the gradient of each forward tensor, or None."""

    stages: tuple[Stage, ...]
    gradients: tuple[Gradient | None, ...]

    @property
    def missing(self) -> list[int]:
        """Indices of forward nodes that a gradient reads, although the forward does not return them."""
        return sorted({o.index for stage in self.stages for o in stage.operands if o.kind == "missing"})


def share_walks(backward: Backward) -> Backward:
    """Merges stages that walk the same rows and do not depend on each other; returns the same backward otherwise."""
    made_by = [k for k, stage in enumerate(backward.stages) for _ in stage.region.outputs]
    groups: list[list[Stage]] = []
    at: list[int] = []  # the group of each stage
    for stage in backward.stages:
        waits = [at[made_by[o.index]] + 1 for o in stage.operands if o.kind == "temporary"]
        fitting = [g for g in range(max(waits, default=0), len(groups)) if _fits(stage, groups[g])]
        if not fitting:
            groups.append([])
        at.append(fitting[0] if fitting else len(groups) - 1)
        groups[at[-1]].append(stage)
    if len(groups) == len(backward.stages):
        return backward
    return _renumbered(backward, len(groups), at)


def _fits(stage: Stage, group: Sequence[Stage]) -> bool:
    """Whether a stage may share the walk of a group: the merged tile is no larger than the tile of one of them."""
    regions = [stage.region, *(s.region for s in group)]
    if len({r.by for r in regions}) > 1 or len({(r.walks_edges, r.compute) for r in regions}) > 1:
        return False
    if any(r.per_edge(out) for r in regions for out in r.outputs) or len({r.sums_all for r in regions}) > 1:
        return False
    if any(r.tiled for r in regions):
        return False
    grids = [r.grid for r in regions]
    top = (max(heads for heads, _ in grids), max(channels for _, channels in grids))
    return top in grids and all(length in (1, most) for grid in grids for length, most in zip(grid, top, strict=True))


def _renumbered(backward: Backward, groups: int, at: Sequence[int]) -> Backward:
    """Returns the backward with one stage per group. Temporaries get new indices, in the order of the stages."""
    new: dict[int, int] = {}
    first = list(accumulate((len(stage.region.outputs) for stage in backward.stages), initial=0))
    stages: list[Stage] = []
    count = 0
    for g in range(groups):
        members = [k for k, group in enumerate(at) if group == g]
        parts = []
        for k in members:
            stage = backward.stages[k]
            operands = [replace(o, index=new[o.index]) if o.kind == "temporary" else o for o in stage.operands]
            parts.append(Part(stage.region, operands, tuple(range(len(stage.region.outputs)))))
        merged = merge(parts)
        for k, outputs in zip(members, merged.outputs, strict=True):
            new.update({first[k] + position: count + out for position, out in enumerate(outputs)})
        stages.append(Stage(merged.region, merged.tensors))  # type: ignore[arg-type]
        count += len(merged.region.outputs)
    gradients = [g and replace(g, temporaries=tuple(new[t] for t in g.temporaries)) for g in backward.gradients]
    return Backward(tuple(stages), tuple(gradients))
