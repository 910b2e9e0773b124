"""How tests choose what runs a region, and leave Inductor out where it would only cost time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch
from torch import fx

from gnncompile import _compat
from gnncompile.passes import manager
from gnncompile.runtime import launch

T = TypeVar("T")


def forget_kernels() -> None:
    """Kernels are remembered by region and device, not by generator."""
    launch.runner.cache_clear()
    launch.kernel.cache_clear()
    launch.fallbacks.clear()


@contextmanager
def kernels(which: str) -> Iterator[None]:
    """Regions run by "cpp", "triton" or "reference" inside this block; for graphs captured before it as well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GNNCOMPILE_KERNELS", which)
        forget_kernels()
        yield
    forget_kernels()


@contextmanager
def launched() -> Iterator[list[str]]:
    """The regions that run inside this block, as strings, in order."""
    specs: list[str] = []
    original = launch.kernel

    def kernel(spec: str, device: str) -> launch.Kernel:
        specs.append(spec)
        return original(spec, device)

    kernel.cache_clear = original.cache_clear  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "kernel", kernel)
        yield specs


def look_at_graphs(monkeypatch: pytest.MonkeyPatch, look: Callable[[fx.Graph], Iterable[T]]) -> list[T]:
    """Collects what is found in every captured graph behind the passes, from now on."""
    found: list[T] = []
    run_pre_grad = manager.run_pre_grad

    def spy(*args: Any) -> manager.Result:
        result = run_pre_grad(*args)
        found.extend(look(result.rest.graph))
        return result

    monkeypatch.setattr(manager, "run_pre_grad", spy)
    return found


def _compile_lightly(gm: fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> Callable[..., Any]:
    return _compat.run_op_by_op(gm, inputs)


def needs_interpreter(which: str, device: str = "cpu") -> None:
    """Skips a test that hands tensors on the CPU to Triton where that is not interpreted: beside a GPU."""
    if (which, device) == ("triton", "cpu") and torch.cuda.is_available():
        pytest.skip("beside a GPU Triton is not interpreted")


@contextmanager
def light(which: str = "reference") -> Iterator[None]:
    """Captures, passes and autograd are real; what Inductor would compile runs op by op, regions by `which`."""
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch, kernels(which):
        patch.setattr(_compat, "compile_inductor", _compile_lightly)
        patch.setattr(_compat, "prepare_inductor", lambda for_cpu: None)
        yield
    torch._dynamo.reset()
