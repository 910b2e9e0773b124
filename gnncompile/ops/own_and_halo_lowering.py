"""Lowers both halves of a region for Inductor: its wrapper calls the kernel of each, and holds the partial results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gnncompile._compat import inductor_call
from gnncompile._compat.inductor_call import Call, Result, contiguous, realized, tensor_of, tuple_text
from gnncompile.ops.own_and_halo_edges import halves
from gnncompile.ops.region_lowering import RegionCall, degree_now, kernel_name, lower_region
from gnncompile.runtime import launch

_own = torch.ops.gnncompile
_IMPORT = "from gnncompile.ops import own_and_halo_edges as _gnncompile_edges"


class OwnEdges(Call):
    """Walks the edges from own rows.

    The constants are the region, the number of its tensors, its degree, and the position of a tensor with own rows,
    then halo rows. The last input is the halo of a plan.
    """

    @property
    def handle(self) -> str:
        """The variable of the generated code that holds the partial results."""
        return f"partial_{self.get_operation_name()}"

    def codegen(self, wrapper: Any) -> None:
        """Writes the call into Inductor's wrapper."""
        spec, count, degree, joined = self.constant_args
        *given, halo = self.references()
        name = kernel_name(wrapper, halves(spec).first.spec, self.device.type, degree)
        wrapper.add_import_once(_IMPORT)
        lists = f"{tuple_text(given[:count])}, {tuple_text(given[count:])}"
        wrapper.writeline(
            f"{self.handle} = _gnncompile_edges.walk_own_edges({name}, {spec!r}, {lists}, {halo}, {joined})"
        )


class HaloEdges(RegionCall):
    """Fills the outputs of a region from the partial results and from edges from halo rows.

    The last inputs are the halo of a plan, and the result of :class:`OwnEdges`, which runs earlier.
    """

    joined: int
    handle: str

    def codegen(self, wrapper: Any) -> None:
        """Writes the call into Inductor's wrapper."""
        whole, (*given, halo, _) = self.kernel_name(wrapper), self.references()
        second = kernel_name(wrapper, halves(self.spec).second.spec, self.device.type, self.degree)
        lists = ", ".join(map(tuple_text, (given[: self.count], given[self.count :], self.filled(wrapper))))
        wrapper.add_import_once(_IMPORT)
        wrapper.writeline(
            f"_gnncompile_edges.walk_halo_edges(({whole}, {second}), {self.spec!r}, {lists}, {halo}, {self.joined}, "
            f"{self.handle})"
        )
        wrapper.writeline(f"del {self.handle}")


def _lower_own_edges(tensors: Sequence[Any], layout: Sequence[Any], spec: str, halo: Any, joined: int) -> Any:
    started = Result([0], torch.int8, halo.get_device())
    given = [*map(contiguous, (*tensors, *layout[:3])), realized(halo)]
    call = OwnEdges(given, [started], constants=(spec, len(tensors), degree_now(), joined))
    launch.prepare(halves(spec).first.spec, call.device.type, degree_now())
    return tensor_of(started)


def _lower_halo_edges(
    tensors: Sequence[Any], layout: Sequence[Any], spec: str, halo: Any, joined: int, started: Any
) -> list[Any]:
    results = lower_region(tensors, layout, spec, [halo, started], HaloEdges)
    call = results[0].data.data.call
    call.joined, call.handle = joined, started.data.data.call.handle
    launch.prepare(halves(spec).second.spec, call.device.type, degree_now())
    return results


def install() -> None:
    """Registers the lowerings with Inductor."""
    inductor_call.install(_own.own_edges.default, _lower_own_edges)
    inductor_call.install(_own.halo_edges.default, _lower_halo_edges)
