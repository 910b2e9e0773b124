"""How Inductor calls a region's kernel: straight from the code it writes, into memory that it allocates.

A call through the dispatcher with lists of tensors costs several times the host time of a launch, which is what a step
on a small graph consists of. Here Inductor's wrapper holds one line per region and step, and the outputs are buffers
of its own: allocated as fast as any other, and used again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from gnncompile._compat.inductor import lowerings
from gnncompile.capture import inductor_call
from gnncompile.capture.inductor_call import Call, contiguous
from gnncompile.ir.bits import tensor_type
from gnncompile.ir.region import parse
from gnncompile.runtime import (
    launch,
    region_op,  # noqa: F401  (defines the op)
)

_OP = torch.ops.gnncompile.region_kernel.default
_IMPORT = "from gnncompile.runtime.launch import Call as _gnncompile_call"


class RegionCall(Call):
    """Writes the outputs of a region.

    Args:
        tensors: The region's tensors, realized and contiguous.
        layout: rowptr, col and edge of the walk, likewise.
        outputs: Buffers to write.
        spec: The region as a string.
    """

    def __init__(self, tensors: Sequence[Any], layout: Sequence[Any], outputs: Sequence[Any], spec: str) -> None:
        self.spec, self.lengths = spec, (len(tensors), len(layout), len(outputs))
        super().__init__([*tensors, *layout, *outputs], outputs, (spec,))

    def codegen(self, wrapper: Any) -> None:
        """Writes the call; the kernel is looked up once, where the wrapper is imported."""
        device = self.device.type
        name = f"region_{hashlib.sha256(self.spec.encode()).hexdigest()[:12]}_{device}"
        wrapper.add_import_once(_IMPORT)
        wrapper.add_import_once(f"{name} = _gnncompile_call({self.spec!r}, {device!r})")
        given = iter(self.references())
        lists = ("".join(f"{next(given)}, " for _ in range(length)) for length in self.lengths)
        wrapper.writeline(f"{name}({', '.join(f'({text})' for text in lists)})")


def _lower(tensors: Sequence[Any], layout: Sequence[Any], spec: str) -> list[Any]:
    layout = layout[:3]  # the rest is for the gradient
    given = [contiguous(t) for t in (*tensors, *layout)]
    outputs = _allocate(layout, spec)
    launch.prepare(spec, outputs[0].get_device().type)
    RegionCall(given[: len(tensors)], given[len(tensors) :], outputs, spec)
    return outputs


def _allocate(layout: Sequence[Any], spec: str) -> list[Any]:
    """Buffers for the outputs."""
    region = parse(spec)
    rows, edges = layout[0].get_size()[0] - 1, layout[1].get_size()[0]
    empty, full = lowerings[torch.ops.aten.empty_strided.default], lowerings[torch.ops.aten.full.default]
    made = []
    for out in region.outputs:
        like = {"dtype": tensor_type(out.dtype), "device": layout[0].get_device()}
        size = [region.rows(out, rows, edges), *out.trailing]
        if region.cleared(out):
            made.append(full(size, 0, **like))
            made[-1].realize()
        else:
            made.append(empty(size, None, **like))
    return made


def install() -> None:
    """Tells Inductor."""
    inductor_call.install(_OP, _lower)
