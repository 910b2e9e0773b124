"""Traces a small function, keeps the operations of its graph after each pass, and compares results with eager."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from gnncompile import _compat
from gnncompile.options import DEFAULTS
from gnncompile.passes import manager
from gnncompile.passes.context import Context
from gnncompile.substitutes import install

WIDTH = 4


class Traced(_compat.CaptureSettings):
    """A Dynamo backend that keeps the operations of a graph after each pass, and runs the graph after the last pass."""

    self_loops = "masked"

    def __init__(self, fn: Callable[..., Any], *args: Any, **options: Any) -> None:
        self.after: dict[str, list[str]] = {}
        self.options = dataclasses.replace(DEFAULTS, **options)
        torch._dynamo.reset()
        install.install()
        self.compiled = torch.compile(fn, backend=self, dynamic=True, fullgraph=True)
        with _compat.symbolic_counts():
            self.result = self.compiled(*args)

    def __call__(self, gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> Callable[..., Any]:
        fakes = _compat.placeholders_as_fakes(gm)
        traced = _compat.trace_aten(gm, fakes)
        for node, fake in zip((n for n in traced.graph.nodes if n.op == "placeholder"), fakes, strict=True):
            node.meta["val"] = fake
        mode = next(f.fake_mode for f in fakes if isinstance(f, torch._subclasses.FakeTensor))
        self.ctx = Context(traced, mode, set(traced.graph.nodes), self.options)
        self._keep("captured")
        for one in manager.PRE_GRAD:
            if one.name != "mark_gradients":  # here all tensors can have gradients
                one.run(self.ctx)
            traced.graph.lint()
            self._keep(one.name)
        self.structure = self.ctx.structure
        traced.recompile()
        if self.structure is None:
            return traced.forward
        positions, program = self.structure.inputs, self.structure.module
        return lambda *args: traced.forward(*args, *program(*(args[i] for i in positions)))

    def _keep(self, name: str) -> None:
        calls = [n.target for n in self.ctx.graph.nodes if n.op == "call_function"]
        self.after[name] = [str(t) if isinstance(t, torch._ops.OpOverload) else t.__name__ for t in calls]

    def count(self, after: str, part: str) -> int:
        return sum(part in op for op in self.after[after])


def data(nodes: int = 6, edges: int = 14) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ``x`` ``[nodes, 4]``, sources and destinations ``[edges]``. At least two edges are self loops."""
    generator = torch.Generator().manual_seed(0)
    row, col = torch.randint(nodes, (2, edges), generator=generator)
    row[:2] = col[:2]
    return torch.randn(nodes, WIDTH, generator=generator), row.clone(), col.clone()


def zeros(x: Tensor) -> Tensor:
    return x.new_zeros(x.size(0), x.size(1))


def add(x: Tensor, col: Tensor, message: Tensor) -> Tensor:
    return x.new_zeros(x.size(0), *message.shape[1:]).index_add_(0, col, message)


def wide(index: Tensor, like: Tensor) -> Tensor:
    return index.view(-1, 1).expand_as(like)


def check(fn: Callable[..., Tensor], *args: Tensor, run: Callable[..., Tensor] | None = None) -> Traced | None:
    """Asserts eager's result and gradients of float inputs. Calls `run` if given, else traces `fn`."""
    ours = [a.clone().requires_grad_(a.is_floating_point()) for a in args]
    theirs = [a.clone().requires_grad_(a.is_floating_point()) for a in args]
    expected = fn(*theirs)
    traced = None
    if run is None:
        traced = Traced(fn, *ours)
        found = traced.result
    else:
        found = run(*ours)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    if expected.requires_grad:
        weight = torch.cos(torch.arange(expected.numel()).float()).view_as(expected)
        (expected * weight).sum().backward()
        (found * weight).sum().backward()
        for a, b in zip(ours, theirs, strict=True):
            if b.is_floating_point():
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5, equal_nan=True)
    return traced
