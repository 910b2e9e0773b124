"""Makes gradients None, as in eager, when only some results of a compiled graph are differentiated.

Compiled code treats the gradient of a result that nobody differentiates as zero. It then returns zero for inputs that
only such results are computed from. Eager leaves these gradients None, and optimizers differ: a parameter with gradient
None keeps its value; one with gradient zero moves by momentum and weight decay.

A model may keep a result with its history, such as the running statistics of PyG's ``InstanceNorm``, and read it in the
next call. The autograd graph of the earlier call hangs on this tensor, and its backward may have run already. Autograd
enters it only if a result computed from this tensor is differentiated. What an object got in the same call, before a
graph break, has no such graph: it hangs on the graph of this call, which is entered once.
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
        behind = {k for k in kept if isinstance(args[k], Tensor) and _compat.is_of_an_earlier_call(args[k])}
        given = _with_histories(args, behind) if behind else args
        made = run(*given)
        _watch(made, given, sources, behind)
        return made

    return call


def _with_histories(args: Sequence[Any], behind: set[int]) -> list[Any]:
    """The arguments, with leaves in place of some tensors. Autograd enters the histories of those that get gradients.

    It enters all of them at once: they may have a part in common, whose backward can run only once.
    """
    leaves = {k: args[k].detach().requires_grad_() for k in behind}

    def go_on(gradients: Sequence[Tensor | None]) -> None:
        found = [(args[k], g) for k, g in zip(leaves, gradients, strict=True) if g is not None]
        if found:
            tensors, given = zip(*found, strict=True)
            torch.autograd.backward(tensors, given, retain_graph=_compat.keeps_graph())

    torch.autograd.graph.register_multi_grad_hook(list(leaves.values()), go_on)
    return [leaves.get(k, a) for k, a in enumerate(args)]


def _watch(made: Sequence[Any], args: Sequence[Any], sources: Sequence[frozenset[int]], behind: set[int]) -> None:
    given = [a for a in args if isinstance(a, Tensor)]
    outside = {a.grad_fn for a in given} | {a._base.grad_fn for a in given if a._base is not None}
    found = [(_origin(m, outside), s) for m, s in zip(made, sources, strict=True) if isinstance(m, Tensor)]
    results = [(*origin, s) for origin, s in found if origin is not None]
    nodes = {node for node, _, _ in results}
    if len(nodes) != 1:  # no result has a gradient
        return
    node = nodes.pop()
    graded = [k for k, a in enumerate(args) if isinstance(a, Tensor) and a.requires_grad]
    edges = [e for e, (following, _) in enumerate(node.next_functions) if following is not None]
    if len(graded) != len(edges):  # one tensor is two inputs
        return
    # Inputs with hooks are left out: a hook would be called with None, which eager never does.
    inputs = {e: k for e, k in zip(edges, graded, strict=True) if k in behind or not _compat.has_hooks(args[k])}
    reads: dict[int, frozenset[int]] = {}
    for _, number, inputs_of_result in results:
        reads[number] = reads.get(number, frozenset()) | inputs_of_result

    def leave_out(gradients: Sequence[Tensor | None], cotangents: Sequence[Tensor | None]) -> Any:
        asked = [number for number, cotangent in enumerate(cotangents) if cotangent is not None]
        if not all(number in reads for number in asked):  # a tensor that the model writes
            return None
        reached = frozenset[int]().union(*(reads[number] for number in asked))
        left_out = {e for e, k in inputs.items() if k not in reached}
        return tuple([None if e in left_out else gradient for e, gradient in enumerate(gradients)])

    node.register_hook(leave_out)


def _origin(result: Tensor, outside: set[Any]) -> tuple[Any, int] | None:
    """Returns the compiled graph's node and the number of its output that a result is, or is a view of.

    None for an input or a view of one: it hangs on one of the nodes `outside` or on a leaf.
    """
    whole = result._base if result._base is not None else result
    return None if whole.grad_fn is None or whole.grad_fn in outside else (whole.grad_fn, whole.output_nr)
