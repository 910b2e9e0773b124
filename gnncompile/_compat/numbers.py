"""Makes Inductor's code compute the same numbers as torch's own operations, in gnncompile's compiles.

Signed zeros, infinities and NaN decide the results of ``atan2``, ``copysign`` or a division. Without these patches,
angles between a node and itself were pi instead of 0.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._inductor import ir
from torch._inductor.codegen.cpp import CppVecOverrides
from torch._inductor.codegen.triton import TritonOverrides
from torch._inductor.fx_passes import joint_graph
from torch._inductor.utils import sympy_product
from torch._inductor.virtualized import V, ops

from gnncompile._compat.inductor import ours
from gnncompile.device import device_of

__all__ = ["patch_numbers"]


def patch_numbers() -> None:
    """Makes Inductor compute the same numbers as torch."""
    _begin_sums_with_zero()
    _add_zeros()
    _multiply_by_zero()
    _be_exact_near_zero()


def _begin_sums_with_zero() -> None:
    """Makes a sum of negative zeros a positive zero, as in torch, where sums begin with a positive zero.

    Inductor's sums begin with zero in C++ loops. They do not if the sum of few elements is written out, or if a GPU
    program folds its lanes.
    """
    create, unroll = ir.Reduction.create.__func__, ir.Reduction._unroll_reduction_fn  # type: ignore[attr-defined]

    @functools.wraps(create)
    def created(cls: Any, device: Any, dst_dtype: Any, src_dtype: Any, inner_fn: Any, *args: Any, **kwargs: Any) -> Any:
        found = signature.bind(cls, device, dst_dtype, src_dtype, inner_fn, *args, **kwargs).arguments
        single = V.graph.sizevars.simplify(sympy_product(found["reduction_ranges"])) == 1
        begins = single or not device_of(device).is_cpp_in_inductor
        if _sums(found["reduction_type"], src_dtype) and begins and ours():
            inner_fn = _plus_zero(inner_fn, src_dtype)
        return create(cls, device, dst_dtype, src_dtype, inner_fn, *args, **kwargs)

    def unrolled(inner_fn: Any, reduction_ranges: Any, reduction_type: str, src_dtype: torch.dtype) -> Any:
        fn = unroll(inner_fn, reduction_ranges, reduction_type, src_dtype)
        return _plus_zero(fn, src_dtype) if _sums(reduction_type, src_dtype) and ours() else fn

    signature = inspect.signature(create)
    ir.Reduction.create = classmethod(created)  # type: ignore[method-assign,assignment]
    ir.Reduction._unroll_reduction_fn = staticmethod(unrolled)  # type: ignore[method-assign]


def _sums(reduction_type: str, dtype: torch.dtype) -> bool:
    return reduction_type == "sum" and dtype.is_floating_point


def _plus_zero(fn: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """Returns a function of indices plus a positive zero. The addition changes only negative zeros."""
    return lambda *index: ops.add(fn(*index), ops.constant(0.0, dtype))


def _add_zeros() -> None:
    """Keeps sums with a tensor of zeros, which turn negative zeros into positive zeros."""
    remove = joint_graph.remove_no_ops

    @functools.wraps(remove)
    def removed(gm: fx.GraphModule, zeros: Any, ones: Any) -> None:
        if ours():
            zeros = type(zeros)(node for node in zeros if not node.meta["val"].dtype.is_floating_point)
        remove(gm, zeros, ones)

    joint_graph.remove_no_ops = removed


def _multiply_by_zero() -> None:
    """Keeps products of floats with an integer 0, which are NaN for NaN and infinity."""
    folder: Any = joint_graph.UniformValueConstantFolder
    add = folder._add_peephole_patterns

    @functools.wraps(add)
    def added(self: Any) -> None:
        if not ours():
            add(self)

    folder._add_peephole_patterns = added


def _be_exact_near_zero() -> None:
    """Makes Inductor call the libraries' ``expm1`` and ``fmod``.

    Inductor's ``exp(x) - 1`` and ``x - floor(x / y) * y`` lose the digits and the sign of small numbers. For large
    numbers, the latter is no remainder at all.
    """
    overrides: Any = CppVecOverrides
    kernels: Any = TritonOverrides
    rest_by_triton = kernels.mod

    def exact_mod(x: Any, y: Any) -> Any:
        whole = not getattr(x, "dtype", torch.int64).is_floating_point
        return rest_by_triton(x, y) if whole or not ours() else kernels.fmod(x, y)

    kernels.mod = staticmethod(exact_mod)
    expm1, remainder = overrides.expm1, overrides.remainder

    def exact_expm1(x: Any) -> Any:
        return f"{x}.expm1()" if ours() else expm1(x)

    def exact_remainder(a: Any, b: Any) -> Any:
        if not ours() or not a.dtype.is_floating_point:
            return remainder(a, b)
        rest, zero = f"{a}.fmod({b})", f"decltype({a})(0)"
        other_sign = f"(({rest} != {zero}) & (({b} < {zero}) ^ ({rest} < {zero})))"
        return f"decltype({a})::blendv({rest}, {rest} + {b}, {other_sign})"

    overrides.expm1, overrides.remainder = staticmethod(exact_expm1), staticmethod(exact_remainder)
