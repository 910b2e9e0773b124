"""The Triton code that Inductor writes for an H100, on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.device_interface as device_interface
import torch.utils._triton as triton_utils
from torch import Tensor
from torch._inductor import scheduler
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode, fake_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from gnncompile.capture.backend import prepare_torch

_H100 = SimpleNamespace(
    name="NVIDIA H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    L2_cache_size=50 * 2**20,
    total_memory=80 * 2**30,
    gcnArchName="",
)


def cuda_code(
    monkeypatch: pytest.MonkeyPatch,
    function: Callable[[Tensor], Any],
    columns: int,
    dtype: torch.dtype,
    post_grad: Callable[[torch.fx.Graph], None],
) -> str:
    """Returns the code for a function of one matrix ``[rows, columns]`` with a symbolic number of rows.

    Args:
        monkeypatch: Makes torch believe in a GPU, until the test ends.
        function: Operations without a gradient.
        columns: The number of columns.
        dtype: The dtype of the matrix.
        post_grad: A pass that rewrites the graph before Inductor lowers it.
    """
    prepare_torch()
    _pretend(monkeypatch)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    sizes = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])  # type: ignore[call-arg]
    shape = mode.from_tensor(torch.empty(40, columns, device="meta"), symbolic_context=sizes).shape
    with mode:
        x = torch.empty(shape, device="cuda", dtype=dtype)
    gm = make_fx(function, tracing_mode="fake")(x)
    post_grad(gm.graph)
    gm.recompile()
    lowering = GraphLowering(gm, shape_env=mode.shape_env, is_inference=True)
    with mode, V.set_graph_handler(lowering), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
        lowering.run(x)
        code: Any = lowering.codegen()
    first = code[0] if isinstance(code, tuple) else code
    return str(getattr(first, "value", first))


def _pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    target = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    monkeypatch.setattr(type(driver), "active", property(lambda self: target))
    monkeypatch.setattr(fake_tensor, "init_gpu_context", lambda *args: None)
    for module in (triton_utils, scheduler):
        monkeypatch.setattr(module, "has_triton", lambda *args: True)
    monkeypatch.setattr(triton_utils, "triton_hash_with_backend", lambda: "")
    cuda = device_interface.CudaInterface
    here = {"is_available": True, "current_device": 0, "get_device_properties": _H100}
    for holder, made in (
        (torch.cuda, {**here, "device_count": 1}),
        (cuda, {**here, "get_compute_capability": 90}),
        (cuda.Worker, {"current_device": 0, "get_device_properties": _H100}),
    ):
        for name, value in made.items():
            monkeypatch.setattr(holder, name, _constant(value, static=isinstance(holder, type)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (9, 0))
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    # A pool of processes would compile the kernels while they are written, as soon as it is warm.
    monkeypatch.setattr(AsyncCompile, "use_process_pool", _constant(False, static=True))


def _constant(value: Any, static: bool) -> Any:
    def get(*args: Any) -> Any:
        return value

    return staticmethod(get) if static else get
