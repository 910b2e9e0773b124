"""Compares a compiled model with eager on graphs of growing size.

Capture must not break the graph. A repeated call must not derive anything from its inputs again.
"""

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
    """Yields all tensors in nested containers."""
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
    """Returns the outputs of a model, and the gradients of its inputs and parameters that require one."""
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
    """Runs a model, compiled and eager, on all sizes, and asserts equal results.

    Args:
        make: Returns a new model, or a function.
        arguments: Returns the arguments of the model for a graph.
        graphs: The number of graphs that must be captured.
        sizes: The number of nodes and of edges of each graph.
        expected: Returns the arguments for eager, if these differ.

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
    """Returns how often the program read input data for sizes so far, then the misses of each structure cache."""
    structures = [c.structure.cache.misses for c in program.backend.captured if c.structure is not None]
    return [program.derived.looks, *structures]
