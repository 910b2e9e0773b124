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
