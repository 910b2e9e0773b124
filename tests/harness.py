"""Lets tests choose the kernels of regions, leave out Inductor where it only costs time, and compare gradients."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from gnncompile import _compat, tuning
from gnncompile.codegen.cpp import matrix
from gnncompile.ops import cpu_layouts
from gnncompile.passes import manager
from gnncompile.runtime import launch

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[1]


def forget_kernels() -> None:
    """Clears the caches of kernels. Their keys are region and device, but not the generator."""
    launch.runner.cache_clear()
    launch.kernel.cache_clear()
    launch.fallbacks.clear()
    for compiled in (cpu_layouts._compiled, matrix._library, matrix.can_compile):  # or not, without a compiler
        compiled.cache_clear()


@contextmanager
def kernels(which: str) -> Iterator[None]:
    """Runs regions by "cpp", "triton" or "reference" inside this block, in graphs captured earlier too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GNNCOMPILE_KERNELS", which)
        forget_kernels()
        yield
    forget_kernels()


class UnderAutocast(nn.Module):
    """Runs a model under autocast to bfloat16, within its forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        device = args[0].device.type if args and isinstance(args[0], Tensor) else "cpu"
        with torch.autocast(device, torch.bfloat16):
            return self.model(*args, **kwargs)


def tune(monkeypatch: pytest.MonkeyPatch, **numbers: Any) -> None:
    """Gives fields of the table of tuned numbers other values. A kernel that is built already keeps its tile."""
    monkeypatch.setattr(tuning, "TILES", replace(tuning.TILES, **numbers))
    _forget_plans()


def tune_halves(monkeypatch: pytest.MonkeyPatch, **numbers: Any) -> None:
    """The same for the table of 16-bit products."""
    monkeypatch.setattr(tuning, "HALF_PRODUCTS", replace(tuning.HALF_PRODUCTS, **numbers))
    _forget_plans()


def _forget_plans() -> None:
    if "gnncompile.codegen.gemm.launch" in sys.modules:  # imports Triton
        sys.modules["gnncompile.codegen.gemm.launch"].forget_plans()


@contextmanager
def launched() -> Iterator[list[str]]:
    """Yields a list that collects the spec of each region that runs inside this block, in order."""
    specs: list[str] = []
    original = launch.kernel

    def kernel(spec: str, device: str) -> launch.Kernel:
        specs.append(spec)
        return original(spec, device)

    def looks_up(function: Callable[..., T]) -> Callable[..., T]:
        """A function that looks a kernel up, but runs none."""

        def called(*args: Any) -> T:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(launch, "kernel", original)
                return function(*args)

        return called

    kernel.cache_clear = original.cache_clear  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        for function in (launch.prepare, launch.overwritable):
            patch.setattr(launch, function.__name__, looks_up(function))
        patch.setattr(launch, "kernel", kernel)
        yield specs


def look_at_graphs(monkeypatch: pytest.MonkeyPatch, look: Callable[[fx.Graph], Iterable[T]]) -> list[T]:
    """Returns a list that collects what `look` finds in each graph captured from now on, after the pre-grad passes."""
    found: list[T] = []
    run_pre_grad = manager.run_pre_grad

    def spy(*args: Any) -> manager.Result:
        result = run_pre_grad(*args)
        found.extend(look(result.rest.graph))
        return result

    monkeypatch.setattr(manager, "run_pre_grad", spy)
    return found


def after_pass(function: Callable[..., Any], given: Any, run: Callable[[fx.Graph], None]) -> fx.GraphModule:
    """Returns the graph of a function of these tensors after a pass that runs after differentiation."""
    traced = make_fx(function, tracing_mode="real")(given)
    for node in traced.graph.nodes:
        if "tensor_meta" in node.meta and "val" not in node.meta:
            node.meta["val"] = node.meta["tensor_meta"]
    run(traced.graph)
    traced.graph.lint()
    traced.recompile()
    return traced


def _compile_lightly(gm: fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> Callable[..., Any]:
    return _compat.run_op_by_op(gm, inputs)


def needs_interpreter(which: str, device: str = "cpu") -> None:
    """Skips a test that passes CPU tensors to Triton on a machine with a GPU, where Triton is not interpreted."""
    if (which, device) == ("triton", "cpu") and torch.cuda.is_available():
        pytest.skip("beside a GPU Triton is not interpreted")


@contextmanager
def light(which: str = "reference") -> Iterator[None]:
    """Replaces Inductor: graphs run op by op, and regions by `which`. Capture, passes and autograd are real."""
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch, kernels(which):
        patch.setattr(_compat, "compile_inductor", _compile_lightly)
        patch.setattr(_compat, "prepare_inductor", lambda for_cpu, for_gpu: None)
        yield
    torch._dynamo.reset()


def without_interpreter(*arguments: str, **environment: str) -> str:
    """Runs Python in a process in which Triton compiles kernels rather than interprets them; returns what it printed.

    Args:
        arguments: The arguments of Python.
        environment: Further variables of the environment.
    """
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def same_gradients(eager: nn.Module, ours: tuple[nn.Module, Callable[..., Tensor]], *given: Tensor) -> None:
    """Asserts that a compiled model has eager's result and gradients, of floating-point inputs and of parameters.

    Args:
        eager: The model, in float64.
        ours: A copy of it, and the copy compiled.
        given: The inputs.
    """
    found = []
    for model, called in ((eager, eager), ours):
        inputs = [t.clone().requires_grad_() if t.is_floating_point() else t for t in given]
        model.zero_grad()
        out = called(*inputs)
        (out * torch.arange(out.numel(), device=out.device).view_as(out).cos()).sum().backward()
        found.append([out.detach(), *(t.grad for t in inputs), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)
