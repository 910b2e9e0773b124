"""Finds the kernel of a region for a device. If there is none, warns, and the reference interpreter runs the region."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Protocol

import torch
from torch import Tensor

from gnncompile.debug_dir import dump_region
from gnncompile.device import device_of
from gnncompile.exc import UnsupportedRegion
from gnncompile.forks import after_fork
from gnncompile.ir import reference
from gnncompile.ir.bits import tensor_type
from gnncompile.ir.printer import to_text
from gnncompile.ir.reference import Layout
from gnncompile.ir.region import Region, parse

logger = logging.getLogger(__name__)


class Kernel(Protocol):
    """Runs a region."""

    def __call__(self, tensors: Sequence[Tensor], layout: Layout, outputs: Sequence[Tensor]) -> None:
        """Checks dtypes and devices, and writes the outputs."""

    def trusted(self, tensors: Sequence[Tensor], layout: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Writes the outputs, on the current device, without checks."""

    @property
    def generator(self) -> str:
        """The generator of the kernel: "triton", "cpp" or "reference"."""

    @property
    def listing(self) -> str:
        """The source code of the kernel."""

    @property
    def overwritable(self) -> Mapping[int, tuple[int, ...]]:
        """The tensors that each output may be written over: their positions, by the output's position."""

    @property
    def gathered(self) -> tuple[tuple[int, ...], ...] | None:
        """For each loop over the edges, the indices of the region's nodes whose rows the loop reads from memory.

        These nodes are inputs on edges or at the other end of edges. None if the kernel has no loops of its own.
        """

    def compile_ahead(self, degree: int) -> None:
        """Starts to compile the code that launches on graphs with `degree` edges per row need; returns at once."""


class Watcher(Protocol):
    """A callback for every launch inside :func:`watched`."""

    def __call__(
        self,
        region: Region,
        kernel: Kernel,
        tensors: Sequence[Tensor],
        layout: Sequence[Tensor],
        outputs: Sequence[Tensor],
        start: Callable[[], None],
    ) -> None:
        """Must call `start`, which launches the kernel."""


_watcher: Watcher | None = None


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Passes every launch inside the block, by any thread, to a watcher. Launches that are replayed are not seen."""
    global _watcher
    before, _watcher = _watcher, watcher
    try:
        yield
    finally:
        _watcher = before


fallbacks: dict[tuple[str, str], str] = {}
"""Why the reference interpreter runs a region, by (region, device type)."""


class Runner:
    """A region's kernel, with all decisions made that do not depend on the graph. It is called in every step.

    On a small graph a step takes as long as the host's calls, so a call does no more work than it must.
    """

    def __init__(self, region: Region, kernel: Kernel) -> None:
        self.kernel, self.region, self._rows = kernel, region, region.rows
        self._outputs = [
            (torch.zeros if region.cleared(o) else torch.empty, o, tensor_type(o.dtype)) for o in region.outputs
        ]

    def __call__(self, tensors: Sequence[Tensor], layout: Sequence[Tensor]) -> list[Tensor]:
        """Allocates the outputs, launches the kernel and returns the outputs."""
        rowptr, col, edge = layout[0], layout[1], layout[2]
        device = rowptr.device
        outputs = []
        for make, out, dtype in self._outputs:
            count = self._rows(out, rowptr.size(0) - 1, col.size(0))
            outputs.append(make((count, *out.trailing), dtype=dtype, device=device))
        for tensor in tensors:
            if not tensor.is_contiguous():
                tensors = [t.contiguous() for t in tensors]
                break
        if _watcher is None:
            self.kernel(tensors, Layout(rowptr, col, edge), outputs)
        else:
            walk = Layout(rowptr, col, edge)
            start = partial(self.kernel, tensors, walk, outputs)
            _watcher(self.region, self.kernel, tensors, walk, outputs, start)
        return outputs


@lru_cache(maxsize=4096)
def runner(spec: str, device: str) -> Runner:
    """Returns the runner of a region on a device type ("cpu", "cuda")."""
    return Runner(parse(spec), kernel(spec, device))


class Call:
    """A region's kernel, as Inductor's code calls it: ``(tensors, layout, outputs)``, all contiguous.

    The kernel is built by the first call at the latest: see :func:`prepare`, which `degree` is for.
    """

    __slots__ = ("device", "spec")

    def __init__(self, spec: str, device: str, degree: int = 0) -> None:
        self.spec, self.device = spec, device
        prepare(spec, device, degree)

    def __call__(self, tensors: Sequence[Tensor], layout: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Launches the kernel."""
        self._launch(kernel(self.spec, self.device), tensors, layout, outputs)

    def write_over(
        self,
        taken: Mapping[int, int],
        tensors: Sequence[Tensor],
        layout: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> None:
        """Launches the kernel where some outputs are tensors of the region.

        Another kernel than that for which the code was written, as after a change of ``GNNCOMPILE_KERNELS``, gets
        outputs of their own.

        Args:
            taken: The position of each such output, by that of the tensor.
            tensors: As in :meth:`__call__`.
            layout: As in :meth:`__call__`.
            outputs: As in :meth:`__call__`.
        """
        found = kernel(self.spec, self.device)
        if all(position in found.overwritable.get(k, ()) for position, k in taken.items()):
            self._launch(found, tensors, layout, outputs)
            return
        own = [torch.empty_like(out) for out in outputs]
        self._launch(found, tensors, layout, own)
        for out, value in zip(outputs, own, strict=True):
            out.copy_(value)

    def _launch(
        self, found: Kernel, tensors: Sequence[Tensor], layout: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        if _watcher is None:
            found.trusted(tensors, layout, outputs)
        else:
            start = partial(found.trusted, tensors, layout, outputs)
            _watcher(parse(self.spec), found, tensors, layout, outputs, start)


@lru_cache(maxsize=4096)
def kernel(spec: str, device: str) -> Kernel:
    """Returns the kernel of a region on a device type ("cpu", "cuda")."""
    started = _started.pop((spec, device, device_of(device).generator), None)
    return _make(spec, device) if started is None or _is_left_alone(spec, device) else started.result()


_started: dict[tuple[str, str, str], Future[Kernel]] = {}
"""Kernels that are being built and that nobody has asked for yet, by region, device type and generator."""


@lru_cache(maxsize=4096)
def prepare(spec: str, device: str, degree: int = 0) -> None:
    """Starts to build a kernel that needs a compiler, while Inductor compiles the code around the kernel.

    Args:
        spec: The region as a string.
        device: The device type.
        degree: Edges per row of the graph to expect. The choice of a Triton kernel depends on it. The kernels for
            other graphs are compiled at their first launch.
    """
    generator = device_of(device).generator
    if generator == "cpp":
        _build(spec, device)
    elif generator == "triton":
        kernel(spec, device).compile_ahead(degree)


def overwritable(spec: str, device: str) -> Mapping[int, tuple[int, ...]]:
    """Returns the tensors that each output of a region may be written over: positions, by the output's position.

    Only Triton kernels write over tensors. Others may still be in the making, and are not waited for.
    """
    return kernel(spec, device).overwritable if device_of(device).generator == "triton" else {}


@lru_cache(maxsize=4096)
def _build(spec: str, device: str) -> None:
    _started[spec, device, "cpp"] = _builders().submit(_make, spec, device)


@lru_cache(maxsize=1)
def _builders() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(4, os.cpu_count() or 1), "gnncompile-build")


@after_fork
def _after_fork() -> None:
    """Forgets the builds that threads had begun: a forked process does not have these threads."""
    _started.clear()
    _builders.cache_clear()


def _make(spec: str, device: str) -> Kernel:
    region = parse(spec)
    try:
        if _is_left_alone(spec, device):
            raise UnsupportedRegion("a kernel would not find again the maxima of a region that has none")
        made = _generate(region, device)
        dump_region(spec, device, lambda: f"{to_text(region)}\n\n{made.listing}\n")
        return made
    except UnsupportedRegion as reason:
        logger.warning("region runs by the slow reference interpreter on %s: %s", device, reason)
        fallbacks[spec, device] = str(reason)
        if region.rounds:  # regions with a kernel by now are looked up again
            kernel.cache_clear()
            runner.cache_clear()
        return _Reference(region, ULPS if region.rounds else 0)


def _is_left_alone(spec: str, device: str) -> bool:
    """Whether a region must run by the reference interpreter because another region has no kernel.

    Both regions compare values that they round, and one region may be the backward of the other.
    """
    without = [parse(known) for known, where in list(fallbacks) if where == device]
    return any(region.rounds for region in without) and parse(spec).rounds


def _generate(region: Region, device: str) -> Kernel:
    which = device_of(device).generator
    if which == "reference":
        return _Reference(region)
    if which == "cpp":
        from gnncompile.codegen.cpp.kernel import CppKernel

        return CppKernel(region)
    try:
        from gnncompile.codegen.triton.kernel import triton_kernel
    except Exception as error:  # whatever a broken or missing Triton raises
        raise UnsupportedRegion(
            f"Triton can't be used: {error}; `python -m gnncompile doctor` says how to mend it"
        ) from error
    return triton_kernel(region)


ULPS = 32
"""The units in the last place by which values of kernels and of torch may differ.

They apply if a backward has no kernel and its forward had a kernel.
"""


class _Reference:
    def __init__(self, region: Region, slack: int = 0) -> None:
        self.region, self._slack = region, slack

    def __call__(self, tensors: Sequence[Tensor], layout: Layout, outputs: Sequence[Tensor]) -> None:
        for out, value in zip(outputs, reference.run(self.region, tensors, layout, self._slack), strict=True):
            out.copy_(value)

    def trusted(self, tensors: Sequence[Tensor], layout: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self(tensors, Layout(*layout), outputs)

    generator, gathered = "reference", None
    overwritable: Mapping[int, tuple[int, ...]] = {}

    def compile_ahead(self, degree: int) -> None:
        """Does nothing: there is no code."""

    @property
    def listing(self) -> str:
        return to_text(self.region)
