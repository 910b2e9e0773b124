"""The opaque op that runs a region inside any torch graph: ``gnncompile::region``.

The region travels as a string, so compile caches stay valid and another process rebuilds the kernel from it. Its
gradient is made of the same op, so it can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnncompile.ir import reference
from gnncompile.ir.reference import Layout
from gnncompile.ir.region import Region, Space, parse
from gnncompile.ir.vjp import Operand, vjp
from gnncompile.runtime import launch

LIBRARY = torch.library.Library("gnncompile", "FRAGMENT")
LIBRARY.define(
    "region(Tensor[] tensors, Tensor[] layout, str spec) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _rows(region: Region, layout: Sequence[Tensor], space: Space) -> Any:
    return layout[2].size(0) if space is Space.EDGE else layout[0].size(0) - 1


def _run(tensors: list[Tensor], layout: list[Tensor], spec: str) -> list[Tensor]:
    """Runs a region.

    Args:
        tensors: The region's tensors by position, ``[rows, ...]``.
        layout: rowptr, col and edge of the walk by the region's own rows, then (only where a gradient gathered at
            the other end is needed) those of the walk by the other end's rows.
        spec: The region as a string.
    """
    region = parse(spec)
    outputs = []
    for out in region.outputs:
        on_edges = region.nodes[out.node].space is Space.EDGE
        # Masked edges are never walked, so their slots must read zero.
        new = layout[0].new_zeros if on_edges else layout[0].new_empty
        rows = _rows(region, layout, Space.EDGE if on_edges else region.by)
        outputs.append(new((rows, *out.trailing), dtype=getattr(torch, out.dtype)))
    launch.kernel(spec, layout[0].device.type)(
        [t.contiguous() for t in tensors], Layout(layout[0], layout[1], layout[2]), outputs
    )
    return outputs


def _fake(tensors: list[Tensor], layout: list[Tensor], spec: str) -> list[Tensor]:
    region = parse(spec)
    outputs = []
    for out in region.outputs:
        rows = _rows(region, layout, Space.EDGE if region.nodes[out.node].space is Space.EDGE else region.by)
        outputs.append(layout[0].new_empty((rows, *out.trailing), dtype=getattr(torch, out.dtype)))
    return outputs


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, layout, spec = inputs
    ctx.spec, ctx.count, ctx.layouts = spec, len(tensors), len(layout)
    ctx.save_for_backward(*tensors, *layout, *output)


def _backward(ctx: Any, cotangents: list[Tensor | None]) -> tuple[list[Tensor | None], list[None], None]:
    saved = list(ctx.saved_tensors)
    tensors, layout = saved[: ctx.count], saved[ctx.count : ctx.count + ctx.layouts]
    outputs = saved[ctx.count + ctx.layouts :]
    wanted = tuple(ctx.needs_input_grad[0])
    return backward(parse(ctx.spec), tensors, layout, outputs, cotangents, wanted), [None] * ctx.layouts, None


def backward(
    region: Region,
    tensors: Sequence[Tensor],
    layout: Sequence[Tensor],
    outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    wanted: tuple[bool, ...],
) -> list[Tensor | None]:
    """Gradients of the region's tensors, by running the stages of :func:`gnncompile.ir.vjp.vjp`."""
    plan = vjp(region, wanted, tuple(c is not None for c in cotangents))
    temporaries: list[Tensor] = []

    def operand(which: Operand) -> Tensor:
        kinds = {"input": tensors, "output": outputs, "cotangent": cotangents, "temporary": temporaries}
        found = kinds[which.kind][which.index]
        assert found is not None
        return found

    for stage in plan.stages:
        operands = [operand(o) for o in stage.operands]
        if not stage.region.walks_edges:
            temporaries += reference.run_rows(stage.region, operands, layout[0].size(0) - 1)
            continue
        walk = list(layout) if stage.region.by is region.by else [*layout[3:], *layout[:3]]
        temporaries += torch.ops.gnncompile.region(operands, walk, stage.region.spec)
    gradients: list[Tensor | None] = []
    shapes = {int(n.value or 0): n.shape for n in region.inputs}
    for k, gradient in enumerate(plan.gradients):
        if gradient is None:
            gradients.append(None)
            continue
        value = sum((temporaries[t] for t in gradient.temporaries[1:]), start=temporaries[gradient.temporaries[0]])
        shape = shapes[k] if value.dim() == 3 else (shapes[k][0] * shapes[k][1],)
        if gradient.sum_rows:
            value = value.sum(0, keepdim=True).expand(1, *shape).reshape(tensors[k].shape)
        else:
            value = reference.from_grid(value.expand(value.size(0), *shape), tensors[k].shape[1:])
        gradients.append(value.to(tensors[k].dtype))
    return gradients


LIBRARY.impl("region", _run, "CompositeExplicitAutograd")
torch.library.register_fake("gnncompile::region", _fake, lib=LIBRARY)
torch.library.register_autograd("gnncompile::region", _backward, setup_context=_setup, lib=LIBRARY)
