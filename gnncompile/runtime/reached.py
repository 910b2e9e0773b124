"""Which gradients there are where only some of a compiled graph's results are differentiated.

To compiled code a result that nobody differentiates is one whose gradient is zero, and so are those of the inputs that
only such results come from. Eager leaves these None, which optimizers tell from zero: what is None keeps its value,
what is zero moves on by momentum and weight decay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gnncompile import _compat


def only_reached(run: Callable[..., Any], sources: Sequence[frozenset[int]]) -> Callable[..., Any]:
    """A compiled graph, the inputs of which have no gradient where no result that comes from them has one.

    Args:
        run: The graph.
        sources: For each of its results, the positions of the inputs that it is computed from.
    """

    def call(*args: Any) -> Any:
        made = run(*args)
        _watch(made, args, sources)
        return made

    return call


def _watch(made: Sequence[Any], args: Sequence[Any], sources: Sequence[frozenset[int]]) -> None:
    found = [(m, s) for m, s in zip(made, sources, strict=True) if isinstance(m, Tensor) and m.grad_fn is not None]
    nodes = {m.grad_fn for m, _ in found}
    if len(nodes) != 1:  # none, or views of results, whose gradients come by another way
        return
    node: torch.autograd.graph.Node = nodes.pop()  # type: ignore[assignment]
    graded = [k for k, a in enumerate(args) if isinstance(a, Tensor) and a.requires_grad]
    edges = [e for e, (following, _) in enumerate(node.next_functions) if following is not None]
    if len(graded) != len(edges):  # one tensor as two inputs
        return
    # A hook would be called with None, which eager never does.
    inputs = {e: k for e, k in zip(edges, graded, strict=True) if not _compat.has_hooks(args[k])}
    results = [(m.output_nr, s) for m, s in found]

    def leave_out(gradients: Sequence[Tensor | None], cotangents: Sequence[Tensor | None]) -> Any:
        reached = frozenset[int]().union(*(s for number, s in results if cotangents[number] is not None))
        left_out = {e for e, k in inputs.items() if k not in reached}
        return tuple([None if e in left_out else gradient for e, gradient in enumerate(gradients)])

    node.register_hook(leave_out)
