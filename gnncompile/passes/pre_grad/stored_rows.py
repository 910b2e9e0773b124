"""Finds values of a message that a region reads from memory, because other operations need their rows as well."""

from __future__ import annotations

from collections.abc import Container, Iterable

from torch import fx

from gnncompile.ir.region import LAYERS, Node, Space, behind
from gnncompile.passes.analysis import own
from gnncompile.passes.pre_grad.message import COMPUTED, Message


def readers_outside(node: fx.Node, inside: Container[fx.Node]) -> list[fx.Node]:
    """Returns the users of a node that a region does not take the place of."""
    return [user for user in node.users if user not in inside]


def sums_of_states(message: Message, reductions: Iterable[fx.Node]) -> set[fx.Node]:
    """Returns values computed from several edge tensors alone that operations outside of the region read as well.

    Reading such a value costs less than reading the tensors.

    Args:
        message: A message.
        reductions: The reductions over it that its region computes.
    """
    found = set()
    computed = message.computed()
    inside = {*reductions, *computed}
    for node, at in computed.items():
        needed, rows = _behind(message, at)
        alone = all(n.space is Space.EDGE and n.shape == message.builder.nodes[at].shape for n in rows)
        if len(rows) > 1 and alone and _plain(needed) and readers_outside(node, inside):
            found.add(node)
    return found


def residual_streams(message: Message, root: fx.Node) -> set[fx.Node]:
    """Returns values computed from several edge tensors whose rows are written in any case, as a layer reads them.

    An example is ``x = x + silu(linear(x))``, repeated: each layer reads a sum of more tensors. A region of the last
    sum would read all of them, and write a gradient for each.

    Args:
        message: A message without layers of any width.
        root: The message itself. Its rows may be a second result of the region, which costs no walk.
    """
    found = set()
    for node, at in message.computed().items():
        needed, rows = _behind(message, at)
        wide = [n for n in rows if n.space is Space.EDGE and n.shape == message.builder.nodes[at].shape]
        if node is not root and len(wide) > 1 and _plain(needed) and any(map(_needs_rows, node.users)):
            found.add(node)
    return found


def _behind(message: Message, at: int) -> tuple[list[Node], list[Node]]:
    """Returns the region nodes that a value is computed from, and those of them that are read per edge or per row."""
    nodes = message.builder.nodes
    needed = [nodes[k] for k in behind(nodes, [at])]
    return needed, [n for n in needed if n.op == "input" and n.space is not Space.PARAMETER]


def _plain(needed: list[Node]) -> bool:
    return not any(n.op in LAYERS or n.op in ("dropout", "softmax") for n in needed)


def _needs_rows(user: fx.Node) -> bool:
    """Whether an operation reads the rows of its arguments from memory, since no region computes it."""
    return user.target not in COMPUTED and user.target is not own.segment_reduce.default
