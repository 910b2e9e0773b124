"""Traces graphs into aten ops, and reads and steers the internal state of autograd."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._decomp import get_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from gnncompile._compat.compiles import compiling
from gnncompile._compat.transforms import mend_backward
from gnncompile.exc import InternalError

aten = torch.ops.aten

_NORMALISE = [
    *(aten.native_layer_norm, aten.native_layer_norm_backward, aten.native_group_norm, aten.native_group_norm_backward),
    *(aten._native_batch_norm_legit_functional, aten._native_batch_norm_legit_no_training),
    *(aten._native_batch_norm_legit, aten.native_batch_norm, aten.cudnn_batch_norm, aten.cudnn_batch_norm_backward),
]


def decompose(op: torch._ops.OpOverload, ours: Callable[..., Any]) -> None:
    """Makes gnncompile's compiles trace a composite op as ``ours(ordinary, *args)``.

    `ordinary` is torch's own decomposition of the op.
    """
    key = torch._C.DispatchKey.CompositeImplicitAutograd

    def ordinary(*args: Any, **kwargs: Any) -> Any:
        return op._op_dk(key, *args, **kwargs)

    def traced(*args: Any, **kwargs: Any) -> Any:
        return ordinary(*args, **kwargs) if compiling.patches is None else ours(ordinary, *args, **kwargs)

    op.py_impl(key)(traced)


@contextmanager
def inside_an_op_with_autograd() -> Iterator[None]:
    """Lets autograd record operations inside an op's own kernel, where dispatch is already below autograd."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"):
        exclude = exclude.remove(torch._C._dispatch_key_parse(key))
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.enable_grad():
        yield


def trace_aten(gm: fx.GraphModule, fakes: Sequence[Any]) -> fx.GraphModule:
    """Traces a Dynamo graph into aten ops, above autograd. Composite ops such as batch norm are not decomposed."""
    mode = next((f.fake_mode for f in fakes if isinstance(f, torch._subclasses.FakeTensor)), None)

    def run(*args: Any) -> Any:
        with fx.traceback.preserve_node_meta():
            return _Interpreter(gm).run(*args)

    with mode or backend_fake_mode():
        traced = make_fx(run, pre_dispatch=True)(*fakes)
    for node in traced.graph.find_nodes(op="get_attr"):
        if isinstance(getattr(traced, str(node.target), None), torch._subclasses.FakeTensor):
            raise InternalError(
                f"a tensor that only stands for another one while tracing is read as a constant: {node}"
            )
    return traced


_DATA: Any = cast(Any, torch._C._autograd)._get_data_attr


class _Interpreter(fx.Interpreter):
    """Runs a Dynamo graph. Calls that a trace of operators would miss are replaced by operators."""

    def run(self, *args: Any, **options: Any) -> Any:
        """Runs the graph, and leaves the autocast modes that an error interrupts."""
        self.modes: list[torch.autocast] = []
        try:
            return super().run(*args, **options)
        finally:
            while self.modes:
                self.modes.pop().__exit__(None, None, None)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Runs one call. ``x.data`` runs as ``x.detach()``: the same memory without a history.

        While operations are recorded, torch's function that enters autocast is only recorded.
        """
        if target is _DATA:
            return torch.ops.aten.detach.default(*args)
        if target is torch.amp.autocast_mode._enter_autocast:
            self.modes.append(torch.autocast(*args))
            return self.modes[-1].__enter__()
        if target is torch.amp.autocast_mode._exit_autocast:
            return self.modes.pop().__exit__(None, None, None)
        return super().call_function(target, args, kwargs)


def recording_operations() -> bool:
    """Whether ``make_fx`` is tracing: operations below autograd become nodes of a graph."""
    return get_proxy_mode() is not None


def backend_fake_mode() -> Any:
    """Returns the fake mode that Inductor compiles the current graph under."""
    return TracingContext.get().fake_mode


def real_tensors() -> AbstractContextManager[Any]:
    """Returns a context in which operations make real tensors, in the middle of a compile too."""
    return unset_fake_temporarily()


def run_op_by_op(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Differentiates a graph as for Inductor, and returns a function that runs the graph uncompiled.

    Normalisation ops are decomposed. Called without torch's choice among them by size, torch's own normalisation
    kernels divide by 0 if there are no rows.
    """

    def as_traced(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return make_boxed_func(gm.forward)

    def backward_as_traced(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        for node in gm.graph.find_nodes(op="call_function", target=operator.truediv):
            node.target = _quotient
        gm.recompile()
        return as_traced(gm, inputs)

    written_out = {**get_decompositions(_NORMALISE), **OF_NO_ROWS}
    made = aot_autograd(fw_compiler=as_traced, bw_compiler=backward_as_traced, decompositions=written_out)(gm, inputs)
    mend_backward(made)
    return made


def _quotient(dividend: float, divisor: float) -> float:
    """Divides two numbers as torch's derivatives do in C++, where a division by zero gives infinity or NaN.

    The derivative of ``var_mean`` divides by the number of rows less one.
    """
    return dividend / divisor if divisor else dividend * math.copysign(math.inf, divisor)


def _batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor | None,
    invstd: Tensor | None,
    training: bool,
    eps: float,
    wanted: list[bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Computes ``aten.native_batch_norm_backward``.

    Torch's own decomposition divides by the number of rows on the host.
    """
    if not training:
        assert running_mean is not None and running_var is not None
        mean, invstd = running_mean, torch.rsqrt(running_var + eps)
    assert mean is not None and invstd is not None
    shape, dims = [1, -1] + [1] * (x.dim() - 2), [0, *range(2, x.dim())]
    wide = grad.to(invstd.dtype)
    centred = x.to(invstd.dtype) - mean.view(shape)
    scale = (invstd if weight is None else invstd * weight).view(shape)
    summed, along = wide.sum(dims), (wide * centred).sum(dims)
    found = wide
    if training:
        part = 1.0 / torch.sym_max(math.prod(x.size(dim) for dim in dims), 1)
        slope = along * part * invstd.square()
        found = wide - (summed * part).view(shape) - centred * slope.view(shape)
    parameter = grad.dtype if weight is None else weight.dtype
    of_weight = (along * invstd).to(parameter) if wanted[1] else None
    return (found * scale).to(grad.dtype), of_weight, summed.to(parameter) if wanted[2] else None


OF_NO_ROWS: dict[Any, Callable[..., Any]] = {aten.native_batch_norm_backward.default: _batch_norm_backward}
"""Decompositions that replace torch's own, where these can't be traced for inputs with no rows."""


def without_saved_hooks() -> AbstractContextManager[None]:
    """Returns a context manager in which hooks on saved tensors (checkpoint, ``save_on_cpu``) are not called.

    The hooks are for the run, not for the trace.
    """
    return _disable_saved_tensors_hooks_during_tracing()


def saved_tensors(results: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tensors that compiled code saves for the backward of its results."""
    kept: list[Tensor] = []
    for node in {r.grad_fn for r in results}:
        reached: list[Any] = [node]
        while reached:
            node = reached.pop()
            kept += [*getattr(node, "saved_tensors", ()), *getattr(node, "_tensors_no_vc_check", ())]
            reached += [n for n, _ in getattr(node, "next_functions", ()) if n is not None]
    return kept


def in_backward() -> bool:
    """Whether this thread is running a backward."""
    return torch._C._current_graph_task_id() >= 0


def has_hooks(tensor: Tensor) -> bool:
    """Whether a tensor has hooks of the user's, on its gradient or on the accumulation of its gradient."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def hooks_of(tensor: Tensor) -> list[Any]:
    """Returns the hooks whose presence :func:`has_hooks` tells."""
    found: list[Any] = []
    for hooks in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks):
        if hooks:
            found += hooks.values()
    return found


def keep_versions(tensors: Sequence[Tensor]) -> Any:
    """Returns a context manager in which writes to these tensors do not raise their version counters.

    Autograd and caches do not notice the writes.
    """
    return cast(Any, torch.autograd)._unsafe_preserve_version_counter(tuple(tensors))
