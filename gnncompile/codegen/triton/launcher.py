"""Launches compiled Triton kernels with little host time."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from math import gcd
from operator import or_
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from gnncompile import _compat
from gnncompile.codegen.triton import ahead
from gnncompile.codegen.triton.entry import Entry
from gnncompile.device import ALIGNMENT, device_of


def on_device(device: int) -> AbstractContextManager[object]:
    """Returns a context that makes a device the current device. An index below 0 is the CPU, which changes nothing."""
    other = device >= 0 and device != _compat.current_device()
    return torch.cuda.device(device) if other else nullcontext()


def runs_on(kernel: Any, device: torch.device) -> bool:
    """Whether a kernel runs on a device: a GPU, or a CPU where Triton interprets it."""
    return device_of(device).has_streams or not isinstance(kernel, triton.JITFunction)


def complaint(tensor: Tensor, dtype: torch.dtype, device: int) -> str:
    """Returns the message about a tensor of another dtype or device than a kernel expects."""
    where = "cpu" if device < 0 else f"cuda:{device}"
    found = f"{tensor.dtype} on {tensor.device}, shape {tuple(tensor.shape)}"
    return f"Triton kernel: found a tensor {found}; expected {dtype} on {where}, where the outputs are; call .to()"


_NO_HOOKS = (None, None, None)
"""The launch metadata and the two hooks of a launch that no profiler watches."""


class Launcher:
    """Launches a compiled kernel like Triton's own ``compiled[grid](*arguments)``, in a fraction of its host time.

    Triton looks up the device and the stream, gathers metadata for hooks, and asks the driver about every pointer. A
    launcher only looks up the stream, and takes pointers as plain numbers. Where possible, it uses torch's own launcher
    of Triton kernels, and Triton's is not even built.

    Args:
        compiled: Triton's compiled kernel.
        types: The types of its arguments, one letter each: ``O`` is a pointer, ``i`` an int32.
        constants: The values of the constants that it was compiled for, in the order of its last parameters.
    """

    def __init__(self, compiled: Any, types: str, constants: Sequence[Any] = ()) -> None:
        self.constants = constants
        self.compiled = compiled
        self.start, self.scratch = _compat.static_cuda_launch(), _scratch(compiled.metadata)
        if self.scratch is None:
            self.start = None
        else:
            self.shape = compiled.metadata.num_warps, compiled.metadata.shared, types + "O" * len(self.scratch)
        self.function: Any = None if self.start is None else _function(compiled)

    def __call__(self, programs: int, columns: int, device: int, arguments: list[int]) -> None:
        """Launches ``programs x columns`` programs on the current stream of a device. `programs` may be 0."""
        if not programs:  # a driver refuses an empty grid
            return
        stream = _compat.current_stream(device)
        if _hooked():
            self.compiled[programs, columns, 1](*arguments, *self.constants)
        elif self.start is not None and self.scratch is not None and programs * columns < 2**31:
            given = (*arguments, *self.scratch)
            self.start(self.function, programs, columns, 1, *self.shape, given, stream)
        else:
            run = self.compiled.run  # loads the kernel when it is first read
            settings = self.compiled.function, self.compiled.packed_metadata, *_NO_HOOKS
            run(programs, columns, 1, stream, *settings, *arguments, *self.constants)


def _scratch(metadata: Any) -> tuple[None, ...] | None:
    """Returns the arguments that stand for Triton's scratch memories, one None each.

    Returns None if the kernel needs scratch memory, or a kind of launch that torch's launcher lacks.
    """
    sizes = [getattr(metadata, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
    special = metadata.num_ctas != 1 or any(
        getattr(metadata, f"launch_{how}", 0) for how in ("cooperative_grid", "pdl")
    )
    return None if special or any(sizes) else (None,) * sum(size is not None for size in sizes)


def _function(compiled: Any) -> Any:
    """Loads a compiled kernel on the current GPU and returns its function. Triton loads it if hooks watch that."""
    runtime = triton.knobs.runtime
    if _holds(runtime.kernel_load_start_hook) or _holds(runtime.kernel_load_end_hook):
        _ = compiled.run
        return compiled.function
    return _compat.triton_function(compiled)


def _hooked() -> bool:
    """Whether a profiler or other code watches Triton's launches."""
    runtime = triton.knobs.runtime
    return _holds(runtime.launch_enter_hook) or _holds(runtime.launch_exit_hook)


def _holds(hook: Any) -> bool:
    """Whether a hook calls anything. A chain of hooks may be empty; a plain function may have replaced the chain."""
    return hook is not None and bool(getattr(hook, "calls", True))


def first_launch(
    kernel: Any,
    programs: int,
    columns: int,
    tensors: Sequence[Tensor],
    numbers: Sequence[int],
    constants: Sequence[Any] = (),
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Launcher | None:
    """Compiles a kernel, unless that is done, and launches it on the current device, which must be that of the tensors.

    Args:
        kernel: A function decorated with ``triton.jit``.
        programs: The number of programs along the first axis of the grid, at least 1.
        columns: The number along the second axis.
        tensors: The tensors, which are the first parameters.
        numbers: The int32 numbers, which come next.
        constants: The values of the constants.
        options: The compile options.

    Returns:
        The launcher for pointers of the same alignment; None if there is none, as in Triton's interpreter.
    """
    arguments = (*tensors, *numbers, *constants)
    if not isinstance(kernel, triton.JITFunction):
        kernel[programs, columns, 1](*arguments, **options)
        return None
    compiled = kernel.warmup(*arguments, grid=(programs, columns, 1), **options)
    if compiled is None:  # a hook of Triton's has stopped the compile
        return None
    launcher = Launcher(compiled, "O" * len(tensors) + "i" * len(numbers), constants)
    launcher(programs, columns, tensors[0].get_device(), [*(tensor.data_ptr() for tensor in tensors), *numbers])
    return launcher


_CompiledFor = tuple[tuple[torch.dtype, ...], tuple[Any, ...]]
"""What a kernel is compiled for: the dtypes of its pointers, and its constants."""


class Kernel:
    """A handwritten kernel. Its parameters are pointers, int32 numbers that Triton does not specialise, and constants.

    Args:
        kernel: A function decorated with ``triton.jit``.
        options: Compile options, such as ``num_warps``.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        self._kernel, self._all_options = kernel, options
        self._options = options if isinstance(kernel, triton.JITFunction) else {}  # the interpreter takes none
        self._launchers: dict[tuple[Any, ...], Launcher] = {}
        self._begun: dict[_CompiledFor, Future[None] | None] = {}

    def entry(
        self,
        names: Sequence[str],
        pointers: Sequence[torch.dtype],
        numbers: int,
        constants: tuple[Any, ...],
        flag: str | None = None,
    ) -> Entry:
        """Returns the kernel, for packages.

        Args:
            names: The names of the pointers.
            pointers: The dtypes of the pointers.
            numbers: How many numbers follow.
            constants: The constants.
            flag: The error that the last pointer stands for: see :class:`Entry`.
        """
        text, options = inspect.getsource(self._kernel.fn), self._all_options
        return Entry(text, self._kernel, tuple(names), tuple(pointers), numbers, 1, constants, options, flag=flag)

    def compile_ahead(self, pointers: Sequence[torch.dtype], numbers: int, constants: tuple[Any, ...]) -> None:
        """Starts to compile the kernel in another thread. Launches with these dtypes and constants wait for it.

        Args:
            pointers: The dtypes of the tensors.
            numbers: How many numbers follow.
            constants: The constants.
        """
        wanted = tuple(pointers), constants
        if wanted not in self._begun:
            self._begun[wanted] = ahead.begin(self._kernel, pointers, (*[1] * numbers, *constants), self._options)

    def __call__(
        self, programs: int, tensors: Sequence[Tensor], numbers: Sequence[int], constants: tuple[Any, ...]
    ) -> None:
        """Launches `programs` programs, possibly 0, on the current device, which must be the device of the tensors.

        `tensors`, `numbers` and `constants` are in the order of the kernel's parameters. If the tensors are on the
        device "meta", nothing is launched, and the kernel is only compiled: see :meth:`compile_ahead`.
        """
        if not programs:
            return
        device = tensors[0].get_device()
        pointers = [tensor.data_ptr() for tensor in tensors]
        # Triton compiles for the pointers that are aligned. The code serves every call with the same aligned pointers.
        unaligned = tuple(at for at, p in enumerate(pointers) if p & 15) if reduce(or_, pointers) & 15 else ()
        types = tuple([tensor.dtype for tensor in tensors])
        launcher = self._launchers.get((device, types, constants, unaligned))
        if launcher is not None:
            launcher(programs, 1, device, [*pointers, *numbers])
            return
        if tensors[0].is_meta:
            self.compile_ahead(types, len(numbers), constants)
            return
        begun = self._begun.get((types, constants))
        if begun is not None:
            begun.result()
        launcher = first_launch(self._kernel, programs, 1, tensors, numbers, constants, self._options)
        if launcher is not None:
            self._launchers[device, types, constants, unaligned] = launcher


class Launch(NamedTuple):
    """A launch of a kernel, without its tensors. The other fields are the arguments of :class:`Kernel`."""

    kernel: Kernel
    programs: int
    numbers: tuple[int, ...]
    constants: tuple[Any, ...]

    def __call__(self, *tensors: Tensor) -> None:
        """Launches the kernel with these tensors, on the current device, which must be theirs."""
        self.kernel(self.programs, tensors, self.numbers, self.constants)


def unit_of(dtype: torch.dtype, *widths: int) -> int:
    """Returns the largest power of two, up to 16 bytes, that divides all widths: so many numbers are read at once."""
    return gcd(ALIGNMENT // dtype.itemsize, *widths)
