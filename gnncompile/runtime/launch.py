"""Finds the kernel of a region for a device, and says so when there is none and the reference interpreter runs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Protocol

import torch
from torch import Tensor

from gnncompile.debug_dir import dump_region
from gnncompile.exc import UnsupportedRegion
from gnncompile.ir import reference
from gnncompile.ir.bits import tensor_type
from gnncompile.ir.printer import to_text
from gnncompile.ir.reference import Layout
from gnncompile.ir.region import Region, parse

logger = logging.getLogger(__name__)


class Kernel(Protocol):
    """What runs a region."""

    def __call__(self, tensors: Sequence[Tensor], layout: Layout, outputs: Sequence[Tensor]) -> None:
        """Checks types and devices, and writes the outputs."""

    def trusted(self, tensors: Sequence[Tensor], layout: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Writes the outputs, on the current device."""

    @property
    def generator(self) -> str:
        """What made it: "triton", "cpp" or "reference"."""

    @property
    def listing(self) -> str:
        """All of its code."""

    @property
    def gathered(self) -> tuple[tuple[int, ...], ...] | None:
        """For each of its loops over the edges, the positions of the nodes on edges or at their other end that it reads
        from memory; None where it has no loops of its own.
        """


class Watcher(Protocol):
    """What every launch goes through while it is :func:`watched`."""

    def __call__(
        self,
        region: Region,
        kernel: Kernel,
        tensors: Sequence[Tensor],
        layout: Sequence[Tensor],
        outputs: Sequence[Tensor],
        start: Callable[[], None],
    ) -> None:
        """Calls `start`, which launches."""


_watcher: Watcher | None = None


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Shows every launch inside the block, by any thread, to a watcher. Launches that are replayed are not seen."""
    global _watcher
    before, _watcher = _watcher, watcher
    try:
        yield
    finally:
        _watcher = before


fallbacks: dict[tuple[str, str], str] = {}
"""(region, device type) -> why the reference interpreter runs it."""


class Runner:
    """A region's kernel with everything decided that does not depend on the graph: called on every step.

    On a small graph a step takes as long as the host needs for its calls, hence no more work here than there must be.
    """

    def __init__(self, region: Region, kernel: Kernel) -> None:
        self.kernel, self.region, self._rows = kernel, region, region.rows
        self._outputs = [
            (torch.zeros if region.cleared(o) else torch.empty, o, tensor_type(o.dtype)) for o in region.outputs
        ]

    def __call__(self, tensors: Sequence[Tensor], layout: Sequence[Tensor]) -> list[Tensor]:
        """Allocates the outputs and launches."""
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
    """The runner of a region on a device type ("cpu", "cuda")."""
    return Runner(parse(spec), kernel(spec, device))


class Call:
    """A region's kernel as the code that Inductor writes calls it: ``(tensors, layout, outputs)``, all contiguous.

    The kernel is there at the first call, at the latest: see :func:`prepare`.
    """

    __slots__ = ("device", "spec")

    def __init__(self, spec: str, device: str) -> None:
        self.spec, self.device = spec, device
        prepare(spec, device)

    def __call__(self, tensors: Sequence[Tensor], layout: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Launches."""
        found = kernel(self.spec, self.device)
        if _watcher is None:
            found.trusted(tensors, layout, outputs)
        else:
            start = partial(found.trusted, tensors, layout, outputs)
            _watcher(parse(self.spec), found, tensors, layout, outputs, start)


@lru_cache(maxsize=4096)
def kernel(spec: str, device: str) -> Kernel:
    """The kernel for a region on a device type ("cpu", "cuda")."""
    started = _started.pop((spec, device, generator(device)), None)
    return _make(spec, device) if started is None or _is_left_alone(spec, device) else started.result()


_started: dict[tuple[str, str, str], Future[Kernel]] = {}
"""Kernels that are built, and that nobody has asked for yet, by region, device type and generator."""


@lru_cache(maxsize=4096)
def prepare(spec: str, device: str) -> None:
    """Starts to build a kernel where that takes a compiler, while Inductor compiles what is around it.

    Triton compiles at the first launch.
    """
    if generator(device) == "cpp":
        _started[spec, device, "cpp"] = _builders().submit(_make, spec, device)


@lru_cache(maxsize=1)
def _builders() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(4, os.cpu_count() or 1), "gnncompile-build")


def _after_fork() -> None:
    """A forked process has no threads: what they did is not going to be done."""
    _started.clear()
    _builders.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


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
        if region.rounds:  # those that have a kernel by now are asked for again
            kernel.cache_clear()
            runner.cache_clear()
        return _Reference(region, ULPS if region.rounds else 0)


def _is_left_alone(spec: str, device: str) -> bool:
    """Whether a region compares what it rounds, and another that does so has no kernel: one may be the other's
    backward.
    """
    without = [parse(known) for known, where in list(fallbacks) if where == device]
    return any(region.rounds for region in without) and parse(spec).rounds


def generator(device: str) -> str:
    """Which generator serves a device type: ``"triton"``, ``"cpp"`` or ``"reference"``.

    ``GNNCOMPILE_KERNELS`` overrides it: ``triton`` on a CPU runs the Triton interpreter, ``reference`` turns
    generated code off.
    """
    chosen = os.environ.get("GNNCOMPILE_KERNELS", "")
    if chosen in ("triton", "cpp", "reference"):
        return chosen
    return "cpp" if device == "cpu" else "triton"


def _generate(region: Region, device: str) -> Kernel:
    which = generator(device)
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
"""Units in the last place by which values of kernels and of torch may differ, where a backward has no kernel and its
forward had one.
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

    @property
    def listing(self) -> str:
        return to_text(self.region)
