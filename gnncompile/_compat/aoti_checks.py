"""What the C++ code of a package checks: the inputs of each call, and whether an index is out of range."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._inductor.codegen.cpp_utils import cexpr
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

from gnncompile._compat.aoti import Build, current_build, declare_support
from gnncompile._compat.inductor import V
from gnncompile.exc import InternalError


def patch_input_checks() -> None:
    """Makes the models of our packages check all inputs in every call, and say in words what is wrong."""
    theirs: Any = CppWrapperCpu.generate_input_output_runtime_checks

    def generate(self: Any) -> None:
        build = current_build()
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
        place = next((one.get_device() for one in inputs if one.get_device().type == "cuda"), None)
        card = "{}, {}".format(*torch.cuda.get_device_capability(place))
        lines.append(f"  gnncompile::check_card(given, {card});")
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


def flags_text(wrapper: Any) -> str:
    """Returns the argument of a launch whose kernel may find an error. The call reads all flags when it is complete."""
    declare_support(wrapper)
    build = current_build()
    assert build is not None
    if _FLAGS not in build.declared:
        build.declared.add(_FLAGS)
        wrapper.writeline(_FLAGS)
    return "&gnncompile_flags"


_FLAGS = "gnncompile::Flags gnncompile_flags(stream);"


def patch_return() -> None:
    """Makes the models of our packages read the flags of :func:`flags_text` before they return results."""
    theirs: Any = CppWrapperCpu.generate_return

    def generate(self: Any, output_refs: list[str]) -> None:
        build = current_build()
        if build is not None and _FLAGS in build.declared:
            self.wrapper_call.writeline("gnncompile_flags.read();")
        theirs(self, output_refs)

    CppWrapperCpu.generate_return = generate  # type: ignore[method-assign]
