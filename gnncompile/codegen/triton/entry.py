"""A Triton kernel that a package launches, and its machine code. Imports Triton."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gnncompile.exc import InternalError

_POINTERS = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.bool: "*i1",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
"""The name of a pointer to values of a dtype, in the signature of a Triton kernel."""


class Cubin(NamedTuple):
    """A kernel's machine code, and what its launch needs.

    Attributes:
        code: The code.
        symbol: The name of the kernel in the code.
        threads: The threads of a program.
        shared: The bytes of shared memory of a program.
        scratches: The number of pointers after the arguments. Triton passes memory there to some kernels, but to none
            of these.
    """

    code: bytes
    symbol: str
    threads: int
    shared: int
    scratches: int


@dataclass(frozen=True, eq=False)
class Entry:
    """A kernel. Its parameters are pointers, then int32 numbers, then constants.

    Attributes:
        text: The source code.
        function: The function, decorated with ``triton.jit``.
        names: The name of each pointer.
        types: The dtype of each pointer.
        numbers: The number of int32 parameters.
        columns: The number of programs along the second axis of the grid.
        constants: The values of the constants.
        options: The compile options, such as ``num_warps``.
        aligned: Whether each pointer is a multiple of 16. If not, some may be rows of a larger tensor.
        flag: The error that the kernel finds, "index" or "layout", or None. A kernel with an error sets its last
            pointer, a bool that is no tensor of the launch.
    """

    text: str
    function: Any
    names: tuple[str, ...]
    types: tuple[torch.dtype, ...]
    numbers: int
    columns: int = 1
    constants: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    aligned: bool = True
    flag: str | None = None

    @cached_property
    def name(self) -> str:
        """The name of the kernel in a package. Kernels of one package with one name have the same code."""
        options = sorted(self.options.items())
        told = repr((self.text, self.types, self.numbers, self.columns, self.constants, options, triton.__version__))
        told += "" if self.aligned else " at any address"
        return f"gnncompile_{hashlib.sha256(told.encode()).hexdigest()[:16]}"

    def run(self, tensors: Sequence[Tensor], numbers: Sequence[int], programs: int) -> None:
        """Launches the kernel as Triton does, on the device of the tensors or in Triton's interpreter."""
        options = self.options if isinstance(self.function, triton.JITFunction) else {}
        if programs <= 0:
            return
        with torch.cuda.device_of(tensors[0]):
            self.function[programs, self.columns, 1](*tensors, *numbers, *self.constants, **options)

    def compile(self, capability: tuple[int, int]) -> Cubin:
        """Compiles the kernel for GPUs of a compute capability.

        Raises:
            InternalError: The kernel needs scratch memory, or has other arguments than the entry says.
        """
        names, pointers = self.function.arg_names, len(self.types)
        if len(names) != pointers + self.numbers + len(self.constants):
            raise InternalError(f"a kernel with the parameters {names} is launched with others; please report it")
        kinds = [*(_POINTERS[dtype] for dtype in self.types), *["i32"] * self.numbers]
        kinds += ["constexpr"] * len(self.constants)
        constants = dict(zip(names[pointers + self.numbers :], self.constants, strict=True))
        aligned = {(at,): [["tt.divisibility", 16]] for at in range(pointers) if self.aligned}
        source = ASTSource(self.function, dict(zip(names, kinds, strict=True)), constants, aligned)
        major, minor = capability
        made: Any = triton.compile(source, target=GPUTarget("cuda", 10 * major + minor, 32), options=self.options)
        told = made.metadata
        sizes = [getattr(told, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
        if any(sizes) or told.num_ctas != 1:
            raise InternalError(f"the kernel {self.name} needs scratch memory or clusters; please report it")
        scratches = sum(size is not None for size in sizes)
        return Cubin(made.asm["cubin"], told.name, 32 * told.num_warps, told.shared, scratches)
