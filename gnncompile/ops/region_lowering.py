"""Lowers a region for Inductor: the generated wrapper calls the kernel directly, with outputs that it allocates.

A dispatcher call with lists of tensors costs several times the host time of a launch. Host time dominates a step on a
small graph. Here Inductor's wrapper calls each region in one line. The outputs are Inductor's own buffers, which it
allocates and reuses as any other buffer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gnncompile._compat import aoti, inductor_call, overwrites
from gnncompile._compat.inductor_call import Call, Result, contiguous, realized, tensor_of, tuple_text
from gnncompile.ir.bits import tensor_type
from gnncompile.ir.region import parse
from gnncompile.ops import packaged
from gnncompile.ops.degree import edges_per_row
from gnncompile.runtime import launch

_OP = torch.ops.gnncompile.region_kernel.default
_IMPORT = "from gnncompile.runtime.launch import Call as _gnncompile_call"


class RegionCall(Call):
    """The call of a region's kernel, which fills the region's outputs.

    Args:
        tensors: The region's tensors, realized and contiguous.
        layout: rowptr, col and edge of the walk, realized and contiguous.
        outputs: The buffers to fill.
        spec: The region as a string.
        degree: Edges per row of the graph that is compiled for: see :func:`gnncompile.ops.degree.edges_per_row`.
        more: Other tensors, for subclasses.
    """

    def __init__(
        self,
        tensors: Sequence[Any],
        layout: Sequence[Any],
        outputs: Sequence[Result],
        spec: str,
        degree: int,
        more: Sequence[Any] = (),
    ) -> None:
        self.spec, self.count, self.degree = spec, len(tensors), degree
        super().__init__([*tensors, *layout, *more], outputs, constants=(spec,))

    def codegen(self, wrapper: Any) -> None:
        """Writes the call into Inductor's wrapper. The kernel is looked up once, when the wrapper is imported."""
        if aoti.current_build() is not None:
            packaged.write_region(self, wrapper, parse(self.spec))
            return
        name = self.kernel_name(wrapper)
        overwrites.place(self, wrapper)
        given, outputs, region = self.references(), self.filled(wrapper), parse(self.spec)
        for output, reference in zip(region.outputs, outputs, strict=True):
            if region.cleared(output):
                wrapper.writeline(f"{reference}.zero_()")
        lists = ", ".join(map(tuple_text, (given[: self.count], given[self.count :], outputs)))
        wrapper.writeline(f"{name}.write_over({self.taken}, {lists})" if self.taken else f"{name}({lists})")

    def kernel_name(self, wrapper: Any) -> str:
        """Returns the name of the region's kernel in Inductor's wrapper, which looks it up when it is imported."""
        return kernel_name(wrapper, self.spec, self.device.type, self.degree)


def kernel_name(wrapper: Any, spec: str, device: str, degree: int) -> str:
    """Returns the name of a region's kernel in Inductor's wrapper, which looks it up when it is imported."""
    name = region_name(spec, device)
    wrapper.add_import_once(_IMPORT)
    wrapper.add_import_once(f"{name} = _gnncompile_call({spec!r}, {device!r}, {degree})")
    return name


def region_name(spec: str, device: str) -> str:
    """Returns the name of a region's kernel in Inductor's wrapper."""
    return f"region_{hashlib.sha256(spec.encode()).hexdigest()[:12]}_{device}"


def _lower(tensors: Sequence[Any], layout: Sequence[Any], spec: str) -> list[Any]:
    return lower_region(tensors, layout, spec, (), RegionCall)


def lower_region(
    tensors: Sequence[Any], layout: Sequence[Any], spec: str, more: Sequence[Any], kind: type[RegionCall]
) -> list[Any]:
    """Makes the call of a region, and returns its outputs as tensors of Inductor's graph.

    Args:
        tensors: The region's tensors.
        layout: Its layouts.
        spec: The region as a string.
        more: Other tensors that the call reads.
        kind: The class of the call.
    """
    layout = layout[:3]  # only the gradient reads the other layout
    given = [contiguous(t) for t in (*tensors, *layout)]
    device, degree, is_package = layout[0].get_device().type, degree_now(), aoti.current_build() is not None
    if is_package:
        packaged.start(parse(spec))
    else:
        launch.prepare(spec, device, degree)
    # The other calls walk the edges in two launches.
    over = launch.overwritable(spec, device) if kind is RegionCall and not is_package else {}
    outputs = _results(layout, spec, over)
    kind(given[: len(tensors)], given[len(tensors) :], outputs, spec, degree, [realized(t) for t in more])
    return [tensor_of(out) for out in outputs]


def degree_now() -> int:
    """Returns the edges per row of the graph that is compiled for, from the node that is lowered now."""
    rowptr, col, *_ = inductor_call.node_now().args[1]
    return edges_per_row(rowptr.meta["val"], col.meta["val"])


def _results(layout: Sequence[Any], spec: str, over: Mapping[int, tuple[int, ...]]) -> list[Result]:
    """Buffers for a region's outputs. `over`: the tensors that each may be written over, by their positions."""
    region, device = parse(spec), layout[0].get_device()
    rows, edges = layout[0].get_size()[0] - 1, layout[1].get_size()[0]
    sizes = [[region.rows(out, rows, edges), *out.trailing] for out in region.outputs]
    return [
        Result(size, tensor_type(out.dtype), device, over.get(k, ()))
        for k, (size, out) in enumerate(zip(sizes, region.outputs, strict=True))
    ]


def install() -> None:
    """Registers the lowering of ``gnncompile::region_kernel`` with Inductor."""
    inductor_call.install(_OP, _lower)
