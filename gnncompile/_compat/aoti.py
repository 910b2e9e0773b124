"""AOTInductor: C++ code for models that run without Python, its link step, and its check of inputs."""

from __future__ import annotations

import contextvars
import functools
import json
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
from torch._inductor import config as inductor_config
from torch._inductor import cpu_vec_isa
from torch._inductor.codecache import CUDACodeCache
from torch._inductor.codegen.cpp_utils import cexpr
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.lowering import fallback_handler
from torch._inductor.package.package import package_aoti
from torch.export import ExportedProgram
from torch.utils._sympy.functions import Min

from gnncompile._compat.compiles import symbolic_trace
from gnncompile._compat.inductor import V, inductor_decompositions, register_lowering
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
        declared: The lines that the code of the model begins with.
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


def write_flag(wrapper: Any, flag: str, rows: str, entries: str) -> None:
    """Writes that a call fails if a tensor of one bool is true on the GPU when the results are complete.

    Args:
        wrapper: Inductor's writer of the model's code.
        flag: The tensor.
        rows: The number of rows that an index reads, as an expression.
        entries: The number of entries of the index, as an expression. With entries but no rows the call fails at once.
    """
    build = _build.get()
    assert build is not None
    if _FLAGS not in build.declared:
        build.declared.add(_FLAGS)
        wrapper.writeline(_FLAGS)
    wrapper.writeline(f"gnncompile_flags.add({flag}, {rows}, {entries});")


_FLAGS = "gnncompile::Flags gnncompile_flags(stream);"


def patch_return() -> None:
    """Makes the models of our packages read the flags of :func:`write_flag` before they return results."""
    theirs: Any = CppWrapperCpu.generate_return

    def generate(self: Any, output_refs: list[str]) -> None:
        build = _build.get()
        if build is not None and _FLAGS in build.declared:
            self.wrapper_call.writeline("gnncompile_flags.read();")
        theirs(self, output_refs)

    CppWrapperCpu.generate_return = generate  # type: ignore[method-assign]


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
    """

    text: str
    line: str


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
            found.append(Condition(str(expression), str(place or "?")))
    return found


def _always_holds(expression: Any) -> bool:
    left, right = (*expression.args, None, None)[:2]
    if isinstance(expression, sympy.Eq):
        return bool(left.is_Symbol and right.is_Symbol)
    if isinstance(expression, sympy.LessThan) and isinstance(left, (Min, sympy.Min)) and right in left.args:
        return True
    if isinstance(expression, (sympy.StrictLessThan, sympy.LessThan)) and right.is_number:
        return bool(right >= _LARGE)
    return False


def compile_program(
    program: ExportedProgram,
    names: Sequence[str],
    settings: dict[str, Any],
    metadata: dict[str, str],
    decompositions: dict[Any, Callable[..., Any]],
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
        decompositions: How our ops without a lowering are written with torch's.
        cpu: The CPU that code is compiled for: "native", or one of :data:`VECTOR_BITS`.
        sealed: The inputs whose seal each call compares, if one of them is a seal.
        device: The type of the device that computes, "cpu" or "cuda".
    """
    with symbolic_trace():
        plain = program.run_decompositions({**inductor_decompositions(), **decompositions})
    inputs: Any = plain.example_inputs
    given, named = inputs
    options = {
        **EXACT_SETTINGS,
        "aot_inductor.package": True,
        "aot_inductor.metadata": metadata,
        "size_asserts": False,
        # The machine that serves has other cores than this one.
        "cpp.dynamic_threads": True,
        **_cpu_settings(cpu),
        **settings,
    }
    module, environment = plain.module(), _environment(plain)
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


def patch_input_checks() -> None:
    """Makes the models of our packages check all inputs in every call, and say in words what is wrong."""
    theirs: Any = CppWrapperCpu.generate_input_output_runtime_checks

    def generate(self: Any) -> None:
        build = _build.get()
        if build is None:
            theirs(self)
            return
        declare_support(self)
        write = getattr(self.prefix, "splice_aot", self.prefix.splice)
        write("\n".join(_check_lines(build)))

    CppWrapperCpu.generate_input_output_runtime_checks = generate  # type: ignore[method-assign]


def _check_lines(build: Build) -> list[str]:
    """Returns the C++ function that checks a model's inputs before anything reads them."""
    names, sealed = build.names, build.sealed
    inputs: list[Any] = list(V.graph.graph_inputs.values())
    if len(inputs) != len(names):
        raise InternalError(f"a package of {len(names)} inputs was compiled for {len(inputs)}; please report it")
    symbols: dict[Any, int] = {}
    # The checks of AOTInductor's own, which an environment variable turns on, come after those here.
    lines = ["static inline bool _check_aoti_runtime_check_inputs_env() { return false; }"]
    lines += ["AOTI_NOINLINE static void __check_inputs_outputs(AtenTensorHandle* inputs, AtenTensorHandle*) {"]
    lines.append(f"  gnncompile::Inputs given(inputs, {len(inputs)});")
    major, minor = torch.__version__.split(".")[:2]
    lines.append(f"  gnncompile::check_torch({major}, {minor});")
    lines.append("  gnncompile::check_cpu();")
    for at, (name, value) in enumerate(zip(names, inputs, strict=True)):
        sizes = ", ".join(_size_code(size, symbols) for size in value.get_size())
        kind = str(value.get_dtype()).removeprefix("torch.")
        device = value.get_device().type
        quoted = json.dumps(name, ensure_ascii=False)
        lines.append(
            f'  given.check({at}, {quoted}, aoti_torch_dtype_{kind}(), "{kind}", aoti_torch_device_type_{device}(), '
            f'"{device}", {{{sizes}}});'
        )
    if build.device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        lines.append(f"  gnncompile::check_card(given, {major}, {minor});")
    if sealed is not None:
        tensors = ", ".join(map(str, sealed.tensors))
        sizes = ", ".join(f"given.size({at}, {axis})" for at, axis in sealed.sizes)
        lines.append(f"  gnncompile::check_layout(given, {sealed.seal}, {{{tensors}}}, {{{sizes}}});")
    lines += _limit_lines(build, inputs)
    return [*lines, "  given.passed = true;", "}"]


def _limit_lines(build: Build, inputs: Sequence[Any]) -> list[str]:
    """Returns the checks that no tensor has too many elements for Inductor's kernels, which count in int32 on a GPU."""
    places: dict[Any, str] = {}
    for at, value in enumerate(inputs):
        for axis, size in enumerate(value.get_size()):
            if isinstance(size, sympy.Symbol):
                places.setdefault(size, f"given.size({at}, {axis})")
    order = sorted(places, key=str)
    names = {size: sympy.Symbol(f"size_{k}", integer=True) for k, size in enumerate(order)}
    lines = []
    for guard in V.graph.sizevars.shape_env.guards:
        limit = guard.expr
        if not isinstance(limit, sympy.LessThan) or not limit.rhs.is_number or limit.lhs.free_symbols - set(places):
            continue
        text = cexpr(limit.lhs.xreplace(names))
        lines.append(f"  gnncompile::check_elements({text}, {limit.rhs});")
        build.checked.add(str(limit))
    sizes = [f"  [[maybe_unused]] const int64_t {names[size]} = {places[size]};" for size in order if lines]
    return [*sizes, *lines]


def _size_code(size: Any, symbols: dict[Any, int]) -> str:
    """Returns a size that is expected as a number, a size that others must equal as ``-1 - k``, any other as "any"."""
    if isinstance(size, (int, sympy.Integer)):
        return str(int(size))
    if isinstance(size, sympy.Symbol):
        return str(-1 - symbols.setdefault(size, len(symbols)))
    return "gnncompile::any"
