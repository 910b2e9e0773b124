"""The engines that run a compiled model for the fuzzer. They fill newly allocated memory with NaN."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor_config
from torch._inductor.codecache import PyCodeCache

from gnncompile import _compat
from gnncompile.codegen.gemm import launch as gemm_launch
from gnncompile.codegen.triton import edge_shares, kernel, tiled_layers
from gnncompile.device import Device
from gnncompile.layout import csr
from gnncompile.runtime import launch
from gnncompile.tile_sizes import WalkTile
from tests.fuzz.program import CHANNELS
from tests.harness import kernels, tune, tune_halves

ENGINES = ("passes", "op by op", "inductor")


def _with_last_passes(gm: fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Decomposes, partitions and rewrites a graph as for Inductor, but returns a function that runs op by op."""
    last = options["post_grad_custom_pre_pass"]

    def rewritten(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        last(gm.graph)
        for node in gm.graph.find_nodes(op="call_function", target=operator.truediv):
            node.target = _quotient
        gm.graph.lint()
        gm.recompile()
        return make_boxed_func(gm.forward)

    wrapped = aot_autograd(
        fw_compiler=rewritten,
        bw_compiler=rewritten,
        inference_compiler=rewritten,
        decompositions=_compat.inductor_decompositions(),
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    compiled = wrapped(gm, inputs)
    _compat.transforms.mend_backward(compiled)
    return compiled


def _quotient(one: float, other: float) -> float:
    """Returns a quotient as compiled code computes it: without an exception if the divisor is 0."""
    return float(torch.tensor(one, dtype=torch.float64) / other)


def _op_by_op(gm: fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> Callable[..., Any]:
    return _compat.run_op_by_op(gm, inputs)


@contextmanager
def engine(name: str, which: str, reuse: bool = True) -> Iterator[None]:
    """Runs compiled models in this block by an engine, and their regions by the kernels `which`. New memory holds NaN.

    Args:
        name: "inductor", or a replacement that runs graphs op by op: "passes" (with the post-grad passes) or
            "op by op" (without them).
        which: The kernels, as in :func:`tests.harness.kernels`.
        reuse: Whether Inductor may reuse buffers, and walks may write over tensors.
    """
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch, kernels(which), poisoned(patch):
        tune(patch, layer_width=2)  # the programs' narrow layers become part of regions too
        if which == "triton":  # and their products become ours
            tune(patch, least_over_rows=1, least_by_rows=1, least_product=1, least_weight=1, narrowest_product=2)
            patch.setattr(tiled_layers, "WIDE", CHANNELS)  # and walks write over rows
            tile = ((0, WalkTile(16, 4, 1)),)  # and the edges are several shares
            tune(patch, processors=1, tiled_floats=tile, tiled_halves=tile)
            patch.setattr(edge_shares, "BYTES", 1)
            tune_halves(patch, least_weight=1)
        if which == "cpp":  # and their results are stored for gradients
            patch.setattr(Device, "stored_layers", property(lambda device: 2))
        if name == "inductor":
            options = {"allow_buffer_reuse": reuse, "inplace_buffers": reuse, "compile_threads": 1}
            with inductor_config.patch({k: v for k, v in options.items() if hasattr(inductor_config, k)}):
                yield
        else:
            patch.setattr(_compat, "compile_inductor", _with_last_passes if name == "passes" else _op_by_op)
            patch.setattr(_compat, "prepare_inductor", lambda for_cpu, for_gpu: None)
            yield
    torch._dynamo.reset()


@contextmanager
def poisoned(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fills memory that gnncompile's runtime and Inductor's code allocate with NaN, or with large integers."""
    for module in (launch, csr, gemm_launch, kernel):
        patch.setattr(module, "torch", _Poisoned("torch"))
    guards = torch._C._dynamo.guards
    for name in ("_empty_strided_cpu", "_empty_strided_cuda"):
        patch.setattr(guards, name, _filled(getattr(guards, name)))
    PyCodeCache.cache_clear()  # modules loaded earlier would still use the original allocators
    yield
    PyCodeCache.cache_clear()


class _Poisoned(ModuleType):
    """The module torch, except for functions that allocate: these return poisoned memory."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        return _filled(found) if name in ("empty", "empty_like") else found


def _filled(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def filled(*args: Any, **kwargs: Any) -> Tensor:
        made = allocate(*args, **kwargs)
        if made.numel():
            if made.dtype.is_floating_point:
                made.fill_(float("nan"))
            elif made.dtype in (torch.int32, torch.int64):
                made.fill_(2**30)  # larger than any row index
        return made

    return filled
