"""Makes a captured graph return the tensors that uncompiled code would have there, above all at a graph break.

An edge list that was taken apart is stacked again inside the graph. Returned as such, it would be a new tensor in each
call: no cache would know it, and a write to it would not reach the caller's tensor. So the graph returns the caller's
own tensor instead.

Graph structure is returned as a copy of the cached tensor, since the user may write to it. Until somebody writes to the
copy, the next graph finds the cache entries of the original (:func:`gnncompile.layout.identity_cache.is_copy_of`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from gnncompile.capture import edge_rows
from gnncompile.layout.identity_cache import is_copy_of

_OPS: Any = torch.ops.gnncompile


class Given(NamedTuple):
    """A result of a graph that is a tensor of the caller's.

    Attributes:
        position: Its position among the results.
        inputs: The positions of its inputs: one for an index, two for the rows of an edge list.
        row: 0 or 1 if the result is that row of the edge list; None for an index, or for the edge list.
    """

    position: int
    inputs: tuple[int, ...]
    row: int | None = None

    def find(self, args: Sequence[Any]) -> Tensor:
        """The caller's tensor, found by the inputs of the graph."""
        first, last = args[self.inputs[0]], args[self.inputs[-1]]
        if len(self.inputs) == 1:
            return first  # type: ignore[no-any-return]
        return edge_rows.joined(first, last) if self.row is None else edge_rows.row_of(first, last, self.row)


class Copied(NamedTuple):
    """A result that is a copy of cached graph structure.

    Attributes:
        position: Its position among the results.
        structure: The position of its original among the structure's tensors.
    """

    position: int
    structure: int


def take_out(gm: fx.GraphModule) -> list[Given]:
    """Removes the results that are the caller's own tensors from a Dynamo graph, and returns them."""
    inputs = {node: at for at, node in enumerate(n for n in gm.graph.nodes if n.op == "placeholder")}
    output: fx.Node = next(n for n in gm.graph.nodes if n.op == "output")
    results: Any = output.args[0]
    found = []
    for position, node in enumerate(results):
        if not isinstance(node, fx.Node) or node.op == "placeholder":
            continue
        parts, row = _parts(node)
        if parts:
            found.append(Given(position, tuple(inputs[part] for part in parts), row))
    if found:
        output.args = (without(results, found),)
        for node in reversed(gm.graph.nodes):
            if node.op == "call_function" and not node.users and _packet(node) in _SAFE:
                gm.graph.erase_node(node)
        gm.recompile()
    return found


def without(results: Sequence[Any], taken: Sequence[Given | Copied]) -> tuple[Any, ...]:
    """The results of a graph, without the results in `taken`."""
    positions = {one.position for one in taken}
    return tuple(result for at, result in enumerate(results) if at not in positions)


def is_empty(gm: fx.GraphModule) -> bool:
    """Whether a graph computes nothing."""
    return all(n.op in ("placeholder", "output") for n in gm.graph.nodes) and not list(gm.graph.nodes)[-1].args[0]


def _parts(node: fx.Node) -> tuple[list[fx.Node], int | None]:
    """The inputs whose value a node has, and the row (0 or 1) if the node is one row of an edge list.

    One input for an index, two for an edge list or one row of it, none for any other node.
    """
    index = _input(node)
    if index is not None:
        return [index], None
    rows = _rows(node)
    if rows:
        return rows, None
    if node.target is operator.getitem and isinstance(node.args[1], int):
        rows = _rows(node.args[0])
        return rows, node.args[1] % 2
    return [], None


def _rows(node: Any) -> list[fx.Node]:
    """The inputs that a node stacks to an edge list, source and destination; none for any other node."""
    if not isinstance(node, fx.Node) or node.target is not torch.stack or len(node.args) != 1 or node.kwargs:
        return []
    found = [_input(part) for part in node.args[0]]  # type: ignore[arg-type,union-attr]
    rows = [row for row in found if row is not None]
    return rows if len(found) == len(rows) == 2 else []


def _input(node: fx.Node) -> fx.Node | None:
    """The integer input whose value a node has, looking through marker ops; None for any other node."""
    if node.op == "placeholder":
        fake = node.meta.get("example_value")
        return node if isinstance(fake, Tensor) and fake.dtype in (torch.int64, torch.int32) else None
    if _packet(node) is _OPS.sized:
        return _input(node.args[0])  # type: ignore[arg-type]
    made: Any = node.args[0] if node.target is operator.getitem else None
    if isinstance(made, fx.Node) and _packet(made) is _OPS.laid_out:
        return _input(made.args[node.args[1]])  # type: ignore[arg-type,index]
    return None


def _packet(node: fx.Node) -> Any:
    return node.target.overloadpacket if isinstance(node.target, torch._ops.OpOverload) else node.target


_SAFE = {torch.stack, operator.getitem, _OPS.sized, _OPS.laid_out}
"""The ops that :func:`take_out` removes once nothing reads them."""


def put_back(run: Callable[..., Any], given: Sequence[Given]) -> Callable[..., Any]:
    """Wraps a compiled graph, so that it also returns the results that :func:`take_out` removed."""

    def call(*args: Any) -> list[Any]:
        results = list(run(*args))
        for one in given:
            results.insert(one.position, one.find(args))
        return results

    return call if given else run


def copy_structure(run: Callable[..., Any], copied: Sequence[Copied]) -> Callable[..., Any]:
    """Wraps a compiled graph, so that it takes ``(inputs, structure)`` and also returns the copies of structure."""

    def call(given: Sequence[Any], structure: Sequence[Tensor]) -> Any:
        results = run(*given, *structure)
        if copied:
            results = list(results)
            for position, at in copied:
                results.insert(position, is_copy_of(structure[at].clone(), structure[at]))
        return results

    return call
