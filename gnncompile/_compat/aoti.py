"""AOTInductor: C++ code for models that run without Python, its link step, and its check of inputs."""

from __future__ import annotations

import contextvars
import functools
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor import cpu_vec_isa
from torch._inductor.codecache import CUDACodeCache
from torch._inductor.lowering import fallback_handler
from torch._inductor.package.package import package_aoti
from torch.export import ExportedProgram

from gnncompile._compat.compiles import symbolic_trace
from gnncompile._compat.inductor import inductor_decompositions, register_lowering
from gnncompile._compat.inductor_call import installed
from gnncompile._compat.numbers import EXACT_SETTINGS
from gnncompile.exc import InternalError

SUPPORT = Path(__file__).with_name("aoti_support.h")
"""C++ functions that the code of each package calls."""

DEVICE_SUPPORT = {device: SUPPORT.with_name(f"aoti_{device}.h") for device in ("cpu", "cuda")}
"""C++ functions that the code for a type of device calls."""

PRODUCTS = SUPPORT.with_name("aoti_products.h")
"""Torch's products of matrices, for kernels."""


@dataclass(frozen=True)
class Sealed:
    """Which inputs a seal depends on: see :mod:`gnncompile.ops.seal`.

    Attributes:
        seal: The position of the seal among the inputs.
        tensors: The positions of the tensors.
        sizes: The sizes, as positions of inputs and their axes.
    """

    seal: int
    tensors: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]


@dataclass
class Build:
    """A package that is being compiled.

    Attributes:
        names: The name of each input, as errors tell it.
        folder: Where object files are written.
        cpu: The CPU that code is compiled for, as the compiler's ``-march`` names it.
        sealed: The inputs whose seal each call compares, or None.
        device: The type of the device that computes, "cpu" or "cuda".
        objects: The object files of kernels, which may be compiling still, by the name of their function.
        cubins: The machine code of kernels for a GPU, which may be compiling still, by the name of the kernel.
        declared: The lines that stand once in the code of the model.
        checked: The conditions on sizes that each call checks, as text.
    """

    names: Sequence[str]
    folder: str
    cpu: str = "native"
    sealed: Sealed | None = None
    device: str = "cpu"
    objects: dict[str, Future[Path]] = field(default_factory=dict)
    cubins: dict[str, Future[Any]] = field(default_factory=dict)
    declared: set[str] = field(default_factory=set)
    checked: set[str] = field(default_factory=set)


_build: contextvars.ContextVar[Build | None] = contextvars.ContextVar("build", default=None)


def current_build() -> Build | None:
    """Returns the package that Inductor is compiling in this thread, or None."""
    return _build.get()


def declare(wrapper: Any, text: str) -> None:
    """Writes lines into the beginning of a model's code, once."""
    build = _build.get()
    assert build is not None
    if text not in build.declared:
        build.declared.add(text)
        wrapper.header.splice(text)


def declare_support(wrapper: Any) -> None:
    """Declares the functions of :data:`SUPPORT` and :data:`DEVICE_SUPPORT` in a model's code."""
    build = _build.get()
    assert build is not None
    for path in (SUPPORT, DEVICE_SUPPORT[build.device]):
        declare(wrapper, path.read_text(encoding="utf-8"))


def call_kernel(wrapper: Any, name: str, arguments: Sequence[str], what: str) -> None:
    """Writes the call of a linked kernel, ``int name(const int64_t*)``.

    Args:
        wrapper: Inductor's writer of the model's code.
        name: The kernel's function.
        arguments: Expressions of int64.
        what: What an error of the kernel says.
    """
    link(wrapper, name)
    wrapper.writeline(f'gnncompile::call({name}, "{what}", {{{", ".join(arguments)}}});')


def link(wrapper: Any, name: str) -> None:
    """Declares a kernel's function in a model's code, and adds its object file to the files that Inductor links."""
    build = _build.get()
    assert build is not None
    declare_support(wrapper)
    link_object(wrapper, f'extern "C" int {name}(const int64_t*);', build.objects[name].result)


def link_object(wrapper: Any, declaration: str, path: Callable[[], Path]) -> None:
    """Declares an object file's symbol in a model's code, and adds the file to those that Inductor links, once."""
    build = _build.get()
    assert build is not None
    if declaration not in build.declared:
        declare(wrapper, declaration)
        CUDACodeCache.aot_kernels_o.append(str(path()))


def declare_products(wrapper: Any) -> None:
    """Declares ``gnncompile::products_float()`` and ``products_double()``: see :mod:`cpu_products`."""
    declare_support(wrapper)
    declare(wrapper, PRODUCTS.read_text(encoding="utf-8"))


def write_addmm(wrapper: Any, device: str, total: str, left: str, right: str) -> None:
    """Writes the call of torch's product ``total += left @ right``."""
    declare(wrapper, f"#include <torch/csrc/inductor/aoti_torch/generated/c_shim_{device}.h>\n")
    call = f"aoti_torch_{device}_addmm_out({total}, {total}, {left}, {right}, 1, 1)"
    wrapper.writeline(f"AOTI_TORCH_ERROR_CODE_CHECK({call});")


def address(reference: str) -> str:
    """Returns the expression of a tensor's address. The tensor may be a temporary: the address is used in its line."""
    return f"gnncompile::address({reference})"


def size_text(wrapper: Any, size: Any) -> str:
    """Returns a size as a C++ expression."""
    return f"int64_t({wrapper.codegen_sizevar(sympy.sympify(size))})"


def install_in_packages(op: Any, lower: Callable[..., Any]) -> None:
    """Registers the lowering of an op for packages. Elsewhere Inductor calls the op itself."""
    installed.append(op)
    theirs = fallback_handler(op, add_to_fallback_set=False)

    def lowered(*args: Any, **kwargs: Any) -> Any:
        return theirs(*args, **kwargs) if _build.get() is None else lower(*args, **kwargs)

    register_lowering(op, type_promotion_kind=None)(lowered)


_lock = threading.Lock()
"""Held while a package is compiled: Inductor's list of object files is one for all threads."""


@contextmanager
def _building(names: Sequence[str], cpu: str, sealed: Sealed | None, device: str = "cpu") -> Iterator[Build]:
    with _lock, tempfile.TemporaryDirectory(prefix="gnncompile-package-") as folder:
        build = Build(names, folder, cpu, sealed, device)
        token = _build.set(build)
        try:
            yield build
        finally:
            for started in (*build.objects.values(), *build.cubins.values()):
                started.cancel()
            CUDACodeCache.aot_kernels_o.clear()
            _build.reset(token)


@dataclass(frozen=True)
class Condition:
    """A condition on sizes that held for the example inputs, and that compiled code relies on.

    Attributes:
        text: The condition, in symbols.
        line: The line that asked for it, or "?".
        symbol: The symbol of the one size that it is about; None if it is about several.
    """

    text: str
    line: str
    symbol: str | None = None


_LARGE = 2**62
"""Products of two sizes are smaller than this: a condition that a size is below such a number always holds."""


def conditions(environment: Any) -> list[Condition]:
    """Returns the conditions that an environment of symbols has noted, but for those that always hold.

    Equal sizes are no condition: both become one symbol, whose sizes a package compares in each call.

    Args:
        environment: The ``ShapeEnv`` of a trace.
    """
    found = []
    for guard in environment.guards:
        expression = guard.expr
        if expression.free_symbols and not _always_holds(expression):
            place = getattr(getattr(guard, "sloc", None), "maybe_user_loc", None)
            symbols = [str(symbol) for symbol in expression.free_symbols]
            found.append(Condition(str(expression), str(place or "?"), symbols[0] if len(symbols) == 1 else None))
    return found


def _always_holds(expression: Any) -> bool:
    left, right = (*expression.args, None, None)[:2]
    if isinstance(expression, sympy.Eq):
        return bool(left.is_Symbol and right.is_Symbol)
    if isinstance(expression, (sympy.StrictLessThan, sympy.LessThan)) and right.is_number:
        return bool(right >= _LARGE)
    return False


@dataclass(frozen=True)
class Rewrites:
    """How a traced program is rewritten before Inductor compiles it.

    Attributes:
        decompositions: How our ops without a lowering are written with torch's.
        fuse: Rewrites the graph before our ops are decomposed, or None.
        fold: Rewrites the graph with weights as attributes after our ops are decomposed, or None.
    """

    decompositions: dict[Any, Callable[..., Any]]
    fuse: Callable[[fx.Graph], None] | None = None
    fold: Callable[[fx.GraphModule], None] | None = None

    def decomposed(self, program: ExportedProgram) -> ExportedProgram:
        """Returns a program in the operations that Inductor compiles."""
        _drop_assertions(program)
        with symbolic_trace():
            if self.fuse is not None:
                program = program.run_decompositions(inductor_decompositions())
                self.fuse(program.graph)
                program.graph_module.recompile()
            made: ExportedProgram = program.run_decompositions({**inductor_decompositions(), **self.decompositions})
            return made


def _drop_assertions(program: ExportedProgram) -> None:
    """Removes the assertions of dtypes that ``torch.export`` writes before conversions.

    Within ``torch.autocast`` they tell the dtypes of the model's code, but ``run_decompositions`` compares converted
    tensors with them, and fails.
    """
    assertion = torch.ops.aten._assert_tensor_metadata.default
    for module in program.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.find_nodes(op="call_function", target=assertion):
                module.graph.erase_node(node)
            module.recompile()


def compile_program(
    program: ExportedProgram,
    names: Sequence[str],
    settings: dict[str, Any],
    metadata: dict[str, str],
    rewrites: Rewrites,
    cpu: str = "native",
    sealed: Sealed | None = None,
    device: str = "cpu",
) -> list[Any]:
    """Compiles an exported program with AOTInductor. Returns the files of a model, for :func:`write_package`.

    Args:
        program: The program, which may call our ops.
        names: The name of each input.
        settings: Settings of Inductor.
        metadata: What the package says of itself.
        rewrites: How the program is rewritten.
        cpu: The CPU that code is compiled for: "native", or one of :data:`VECTOR_BITS`.
        sealed: The inputs whose seal each call compares, if one of them is a seal.
        device: The type of the device that computes, "cpu" or "cuda".
    """
    plain = rewrites.decomposed(program)
    inputs: Any = plain.example_inputs
    given, named = inputs
    options = {
        **EXACT_SETTINGS,
        "aot_inductor.package": True,
        "aot_inductor.metadata": metadata,
        "size_asserts": False,
        # Our kernels for GPUs take addresses that are multiples of 16, so inputs with others are copied.
        "assume_aligned_inputs": device == "cuda",
        # The machine that serves has other cores than this one.
        "cpp.dynamic_threads": True,
        **_cpu_settings(cpu),
        **settings,
    }
    module: Any = plain.module()
    environment = _environment(plain)
    if rewrites.fold is not None:
        rewrites.fold(module)
    with _building(names, cpu, sealed, device) as build, symbolic_trace():
        files: Any = torch._inductor.aot_compile(module, given, named, options=options)
    found = [] if environment is None else conditions(environment)
    assumed = [one for one in found if one.text not in build.checked]
    if assumed:
        raise InternalError(f"a package would only serve sizes with {assumed[0].text}; please report it")
    return list(files)


VECTOR_BITS = {"x86-64-v3": 256, "x86-64-v4": 512}
"""The CPUs other than this machine's that code can be compiled for, and the bits of their vectors."""


def can_choose_cpus() -> bool:
    """Whether Inductor's code can be compiled for another CPU than this machine's: from torch 2.13 on."""
    return hasattr(inductor_config.cpp, "march")


def _cpu_settings(cpu: str) -> dict[str, Any]:
    return {} if cpu == "native" else {"cpp.march": cpu, "cpp.simdlen": VECTOR_BITS[cpu]}


class _AVX512(cpu_vec_isa.VecAVX512):
    """The instructions of x86-64-v4, without the later ones of this machine."""

    def build_arch_flags(self) -> str:
        """Returns the compiler's flags."""
        return self._arch_flags


def patch_vector_sets() -> None:
    """Makes a package for another CPU use the vector instructions of that CPU's level alone.

    Inductor takes the largest set of this machine with as many bits: with AVX512-VNNI, the code would need it too.
    """
    theirs: Any = cpu_vec_isa.valid_vec_isa_list

    @functools.wraps(theirs)
    def listed() -> list[Any]:
        build = _build.get()
        if build is None or build.cpu == "native":
            return theirs()  # type: ignore[no-any-return]
        levels = {cpu_vec_isa.VecAVX512: _AVX512, cpu_vec_isa.VecAVX2: cpu_vec_isa.VecAVX2}
        return [levels[type(one)]() for one in theirs() if type(one) in levels]

    cpu_vec_isa.valid_vec_isa_list = listed  # type: ignore[assignment]


def _environment(program: ExportedProgram) -> Any:
    """Returns the ``ShapeEnv`` of an exported program, or None if all its sizes are numbers."""
    for node in program.graph.nodes:
        value: Any = node.meta.get("val")
        sizes: Any = value.shape if isinstance(value, torch.Tensor) else ()
        for size in sizes:
            if isinstance(size, torch.SymInt):
                return size.node.shape_env
    return None


def write_package(path: str, models: dict[str, list[Any]]) -> None:
    """Writes compiled models into one file."""
    package_aoti(path, models)
