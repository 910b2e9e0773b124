"""The op that runs a region inside any torch graph: ``gnncompile::region``.

The region is an argument, as a string. So compile caches stay valid, and another process can rebuild the kernel. The
op's gradient calls the same op, so it can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnncompile import _compat
from gnncompile.exc import InternalError
from gnncompile.ir import reference
from gnncompile.ir.bits import tensor_type
from gnncompile.ir.region import Region, parse
from gnncompile.ir.residuals import tensors_read, with_residuals
from gnncompile.ir.stages import Operand
from gnncompile.ir.vjp import vjp
from gnncompile.runtime import launch

LIBRARY = torch.library.Library("gnncompile", "FRAGMENT")
_SIGNATURE = "(Tensor[] tensors, Tensor[] layout, str spec) -> Tensor[]"
LIBRARY.define("region" + _SIGNATURE, tags=(torch.Tag.pt2_compliant_tag,))
# The same op without a gradient formula. Compiled graphs call it, because the autograd layer costs more time than the
# launch (see gnncompile.capture.backend).
LIBRARY.define("region_kernel" + _SIGNATURE, tags=(torch.Tag.pt2_compliant_tag,))


def _run(tensors: list[Tensor], layout: list[Tensor], spec: str) -> list[Tensor]:
    """Runs a region, and returns its outputs.

    Args:
        tensors: The region's tensors by position, ``[rows, ...]``.
        layout: rowptr, col and edge by the region's own rows. If a gradient is gathered at the other end, then rowptr,
            col and edge by that end's rows. An `edge` that nobody reads is empty.
        spec: The region as a string.
    """
    return launch.runner(spec, layout[0].device.type)(tensors, layout)


def _fake(tensors: list[Tensor], layout: list[Tensor], spec: str) -> list[Tensor]:
    region = parse(spec)
    outputs = []
    for out in region.outputs:
        rows = region.rows(out, layout[0].size(0) - 1, layout[1].size(0))
        outputs.append(layout[0].new_empty((rows, *out.trailing), dtype=tensor_type(out.dtype)))
    return outputs


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, layout, spec = inputs
    ctx.spec, ctx.count, ctx.layouts = spec, len(tensors), len(layout)
    # Most residuals have no cotangent. Materialised zeros in their place would be computed with.
    ctx.set_materialize_grads(False)
    needed = tensors_read(parse(spec), tuple(t.requires_grad for t in tensors), "output")
    # Outputs that the gradient does not read are not saved: the caller may write to them.
    ctx.save_for_backward(*tensors, *layout, *(o if k in needed else None for k, o in enumerate(output)))


def _backward(ctx: Any, cotangents: list[Tensor | None]) -> tuple[list[Tensor | None], list[None], None]:
    _compat.refuse_in_backward(cotangents, second=False)
    saved = list(ctx.saved_tensors)
    tensors, layout = saved[: ctx.count], saved[ctx.count : ctx.count + ctx.layouts]
    outputs = saved[ctx.count + ctx.layouts :]
    wanted = tuple(ctx.needs_input_grad[0])
    return backward(parse(ctx.spec), tensors, layout, outputs, cotangents, wanted), [None] * ctx.layouts, None


def backward(
    region: Region,
    tensors: Sequence[Tensor],
    layout: Sequence[Tensor],
    outputs: Sequence[Tensor | None],
    cotangents: Sequence[Tensor | None],
    wanted: tuple[bool, ...],
) -> list[Tensor | None]:
    """Runs the stages of :func:`gnncompile.ir.vjp.vjp`, and returns the gradients of the region's tensors.

    Args:
        region: The region.
        tensors: Its tensors.
        layout: Its layouts, as for the forward.
        outputs: Its outputs; None for outputs that the gradient does not read.
        cotangents: The gradients of its outputs; None for outputs without.
        wanted: Whether each tensor needs a gradient.

    Raises:
        InternalError: The region was formed without a layout that the gradient needs.
    """
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
            temporaries += reference.run_rows(stage.region, operands, layout[0].size(0) - 1, layout[0].device)
            continue
        if stage.region.by is not region.by and len(layout) < 6:
            raise InternalError(
                f"a gradient is gathered by {stage.region.by.value}, but the region was formed without that layout; "
                "please report it"
            )
        walk, run = list(layout) if stage.region.by is region.by else [*layout[3:], *layout[:3]], stage.region
        if torch.is_grad_enabled():
            run = with_residuals(run)  # a second gradient needs the residuals that a forward keeps
        else:
            walk = walk[:3]  # fewer tensors to save for the backward
        if run.numbers_edges and _has_rows(walk[2], 0) and not _has_rows(walk[1], 0):
            raise InternalError(
                f"a gradient asks for the numbers of edges, without which {run.spec} was formed; please report it"
            )
        temporaries += torch.ops.gnncompile.region(operands, walk, run.spec)[: len(stage.region.outputs)]
    gradients: list[Tensor | None] = []
    shapes = {int(n.value or 0): n.shape for n in region.inputs}
    for k, gradient in enumerate(plan.gradients):
        if gradient is None:
            gradients.append(None)
            continue
        shape = shapes[k] if shapes[k][0] > 1 else shapes[k][1:]
        parts = [_with_heads(temporaries[t], shape) for t in gradient.temporaries]
        if gradient.sum_rows:
            parts = [part if _has_rows(part, 1) else part.sum(0, keepdim=True) for part in parts]
        value = sum(parts[1:], start=parts[0])
        if gradient.sum_rows:
            value = value.expand(1, *shape).reshape(tensors[k].shape)
        else:
            full = value if tuple(value.shape[1:]) == shape else value.expand(value.size(0), *shape)
            value = reference.from_grid(full, tensors[k].shape[1:])
        gradients.append(value.to(tensors[k].dtype))
    return gradients


def _has_rows(tensor: Tensor, number: int) -> bool:
    """Whether a tensor is statically known to have this number of rows."""
    rows: object = tensor.size(0)
    return isinstance(rows, int) and rows == number


def _with_heads(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A temporary ``[rows, *features]`` with an axis for heads if `shape` has one, so the features broadcast to it."""
    return value.unsqueeze(1) if value.dim() == 2 and len(shape) == 2 else value


for _name in ("region", "region_kernel"):
    LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gnncompile::{_name}", _fake, lib=LIBRARY)
for _function in (_run, _setup, _backward):
    _compat.run_uncompiled(_function)  # Dynamo must not trace these when user code between graphs takes gradients
torch.library.register_autograd("gnncompile::region", _backward, setup_context=_setup, lib=LIBRARY)
