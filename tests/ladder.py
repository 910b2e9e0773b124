"""Compares a compiled model with eager on a ladder of sizes: one captured graph, no break, nothing made again."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data.data import BaseData

import gnncompile
from gnncompile import _compat
from gnncompile.capture.compile import callable_of
from gnncompile.report.explain import count_syncs
from gnncompile.support.case import LADDER, Graph


def tensors(value: Any) -> Iterator[Tensor]:
    """All plain tensors in a nest of containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for held in value.values():
            yield from tensors(held)
    elif isinstance(value, (list, tuple)):
        for held in value:
            yield from tensors(held)
    elif isinstance(value, BaseData):
        yield from tensors(value.to_dict())
    elif dataclasses.is_dataclass(value):
        yield from tensors(vars(value))


def results(model: Any, args: Sequence[Any]) -> list[Tensor | None]:
    """Outputs, and gradients of float inputs and parameters."""
    torch.manual_seed(0)
    leaves = [t for t in tensors(args) if t.layout == torch.strided and t.requires_grad]
    leaves += model.parameters() if isinstance(model, nn.Module) else []
    outputs = list(tensors(model(*args)))
    total: Any = 0.0
    for out in outputs:
        if out.requires_grad:
            total = total + (out * torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)).sum()
    gradients = torch.autograd.grad(total, leaves, allow_unused=True) if isinstance(total, Tensor) else ()
    return [*(out.detach() for out in outputs), *gradients]


def climb(
    make: Callable[[], Any],
    arguments: Callable[[Graph], tuple[Any, ...]],
    graphs: int = 1,
    sizes: Sequence[tuple[int, int]] = LADDER,
    expected: Callable[[Graph], tuple[Any, ...]] | None = None,
) -> Any:
    """Runs a model, compiled and eager, on all sizes.

    Args:
        make: Makes the model, or returns the function.
        arguments: Its arguments on a graph.
        graphs: How many graphs are to be captured.
        sizes: Numbers of nodes and edges.
        expected: The arguments for eager, where these are others.

    Returns:
        The compiled model.
    """
    torch.manual_seed(0)
    model = make()
    model = model.double() if isinstance(model, nn.Module) else model
    plain = copy.deepcopy(model) if isinstance(model, nn.Module) else model
    compiled = gnncompile.compile(model, options={"inductor": False})
    program = callable_of(compiled)
    assert program is not None
    breaks = _compat.graph_breaks()
    for size in sizes:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = results(plain, (expected or arguments)(Graph(*size)))
        ours = results(compiled, arguments(Graph(*size)))
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert (one is None) == (other is None), f"{size}: a gradient is missing"
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8, msg=lambda m, size=size: f"{size}: {m}")
    assert len(program.backend.captured) == graphs
    assert _compat.graph_breaks() == breaks
    args = arguments(Graph(*sizes[-1]))
    compiled(*args)
    made = made_again(program)
    assert count_syncs(compiled, args, {}) == 0
    assert made_again(program) == made
    return compiled


def made_again(program: Any) -> list[int]:
    """How often something was made of inputs so far."""
    structures = [c.structure.cache.misses for c in program.backend.captured if c.structure is not None]
    return [program.derived.looks, *structures]
