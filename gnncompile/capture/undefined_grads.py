"""Makes gradients None, as in eager, when only some results of a compiled graph are differentiated.

Compiled code treats the gradient of a result that nobody differentiates as zero. It then returns zero for inputs that
only such results are computed from. Eager leaves these gradients None, and optimizers differ: a parameter with gradient
None keeps its value; one with gradient zero moves by momentum and weight decay.

A model may keep a result with its history, such as the running statistics of PyG's ``InstanceNorm``, and read it in the
next call. The autograd graph of the earlier call hangs on this tensor, and its backward has already run. Autograd
enters it again only if a result computed from this tensor is differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gnncompile import _compat


def with_undefined_grads(
    run: Callable[..., Any], sources: Sequence[frozenset[int]], kept: frozenset[int] = frozenset()
) -> Callable[..., Any]:
    """Wraps a compiled graph: an input gets gradient None unless a result computed from it is differentiated.

    Args:
        run: The compiled graph.
        sources: For each of its results, the positions of the inputs that it is computed from.
        kept: The positions of the inputs that are attributes of the model.
    """

    def call(*args: Any) -> Any:
        behind = {k for k in kept if isinstance(args[k], Tensor) and args[k].grad_fn is not None}
        given = [_with_history(a) if k in behind else a for k, a in enumerate(args)] if behind else args
        made = run(*given)
        _watch(made, given, sources, behind)
        return made

    return call


def _with_history(tensor: Tensor) -> Tensor:
    """A leaf with a tensor's values. Autograd enters the tensor's own history only if the leaf gets a gradient."""
    leaf = tensor.detach().requires_grad_()

    def go_on(gradient: Tensor | None) -> None:
        if gradient is not None:
            tensor.backward(gradient, retain_graph=_compat.keeps_graph())

    leaf.register_hook(go_on)
    return leaf


def _watch(made: Sequence[Any], args: Sequence[Any], sources: Sequence[frozenset[int]], behind: set[int]) -> None:
    found = [(m, s) for m, s in zip(made, sources, strict=True) if isinstance(m, Tensor) and m.grad_fn is not None]
    nodes = {m.grad_fn for m, _ in found}
    if len(nodes) != 1:  # none, or views of results, whose gradients take another path
        return
    node: torch.autograd.graph.Node = nodes.pop()  # type: ignore[assignment]
    graded = [k for k, a in enumerate(args) if isinstance(a, Tensor) and a.requires_grad]
    edges = [e for e, (following, _) in enumerate(node.next_functions) if following is not None]
    if len(graded) != len(edges):  # one tensor is two inputs
        return
    # Inputs with hooks are left out: a hook would be called with None, which eager never does.
    inputs = {e: k for e, k in zip(edges, graded, strict=True) if k in behind or not _compat.has_hooks(args[k])}
    results = [(m.output_nr, s) for m, s in found]

    def leave_out(gradients: Sequence[Tensor | None], cotangents: Sequence[Tensor | None]) -> Any:
        reached = frozenset[int]().union(*(s for number, s in results if cotangents[number] is not None))
        left_out = {e for e, k in inputs.items() if k not in reached}
        return tuple([None if e in left_out else gradient for e, gradient in enumerate(gradients)])

    node.register_hook(leave_out)
