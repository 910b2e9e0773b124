"""In-place operations on fresh tensors become functional ones.

Before: ``z = new_zeros(n, f); y = z.scatter_add_(0, i, x)``
After:  ``z = new_zeros(n, f); y = scatter_add(z, 0, i, x)``
Why it pays: every later pass may then treat nodes as values. Only writes to inputs, and to views of tensors that are
read elsewhere, stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from gnncompile.passes.analysis import (
    aten,
    drop_unused,
    is_packed,
    makes_new_tensor,
    mutates,
    own,
    same_shape,
    value,
    written_nodes,
)
from gnncompile.passes.context import Context
from gnncompile.passes.log import written_input


def run(ctx: Context) -> None:
    """Rewrites the graph in place.

    Raises:
        Recapture: The graph writes to an edge list of the caller, which it stacks from two inputs.
    """
    if ctx.edge_lists and any(_is_the_callers(ctx, node) for node in written_nodes(ctx.graph)):
        raise written_input()
    for node in list(ctx.graph.nodes):
        if node.target is aten.detach_.default:
            _detach(node)
        elif node.op == "call_function" and mutates(node):
            _rewrite(ctx, node)
        if node.op == "call_function" and node.target is aten.dropout.default:
            _, rate, train = node.args
            if rate == 0 or not train:
                node.replace_all_uses_with(node.args[0])
                ctx.graph.erase_node(node)
        if node.op == "call_function" and node.target is aten.randperm.default:
            _hide_permutation(ctx, node)
    drop_unused(ctx.graph)


def _detach(node: fx.Node) -> None:
    """Lets later operations read a tensor without a history. It may be a view here, which can't lose it in place.

    ``torch.tensor`` of a size ends with such a call. An input would lose its history for the caller too.
    """
    (base,) = node.all_input_nodes
    if base.op != "placeholder":
        node.target = aten.detach.default
        base.replace_all_uses_with(node, delete_user_cb=lambda user: node < user)


def _is_the_callers(ctx: Context, node: fx.Node) -> bool:
    if node.target is not aten.stack.default:
        return False
    parts: Any = node.args[0]
    return tuple(part.args[0] if part.target is own.sized.default else part for part in parts) in ctx.edge_lists


def _hide_permutation(ctx: Context, node: fx.Node) -> None:
    """Replaces a random permutation by gnncompile's own op, which Inductor leaves as it is."""
    with ctx.graph.inserting_before(node):
        made = ctx.call(own.random_permutation.default, node.args[0], value(node).dtype, value(node).device, like=node)
    node.replace_all_uses_with(made)
    ctx.graph.erase_node(node)


def _rewrite(ctx: Context, node: fx.Node) -> None:
    base = node.args[0] if node.args else None
    name = node.target._schema.name.split("::")[1]  # type: ignore[union-attr]
    if not isinstance(base, fx.Node) or not name.endswith("_") or not _is_the_only_view(base):
        return
    if any(not (makes_new_tensor(user) or user is node) for user in base.users):
        return  # a view of the tensor would see the write
    copies, functional = node.target is aten.copy_.default, _functional(node.target)  # type: ignore[arg-type]
    if functional is None or (copies and not is_packed(value(base))):
        return
    with ctx.graph.inserting_before(node):
        made = _copy(ctx, node) if copies else ctx.call(functional, *node.args, like=node, **node.kwargs)
        made = ctx.in_dtype_of(made, node)  # a tensor keeps its dtype, even if a wider one is added to it
    node.replace_all_uses_with(made)
    ctx.graph.erase_node(node)


def _copy(ctx: Context, node: fx.Node) -> fx.Node:
    """Returns a copy of what ``copy_`` writes, with packed rows. The functional form ``copy`` has no derivative."""
    args: Any = node.args
    base, source, *_ = args
    if not same_shape(base, source):
        source = ctx.call(aten.expand_as.default, source, base, like=node)
    kind = {"dtype": value(base).dtype, "device": value(base).device, "memory_format": torch.contiguous_format}
    return ctx.call(aten._to_copy.default, source, like=node, **kind)


def _is_the_only_view(node: fx.Node) -> bool:
    """Whether a node is a fresh tensor, or the only view of a fresh tensor.

    For a write through a view, AOTAutograd assumes that the result keeps the strides of the view. The functional form
    of the write need not keep them (``masked_fill``), and a later ``reshape`` then fails.
    """
    while not makes_new_tensor(node):
        sources = node.all_input_nodes
        if node.op != "call_function" or node.target not in _VIEWS or len(sources[0].users) != 1:
            return False
        node = sources[0]
    return True


_VIEWS = {aten.permute.default, aten.transpose.int, aten.view.default, aten.reshape.default, aten.unsqueeze.default}
"""Views that keep all elements of a tensor."""


def _functional(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """Returns the overload with the same arguments that returns a new tensor, or None.

    The names of the overload and of its first argument may differ.
    """
    packet = getattr(aten, target._schema.name.split("::")[1][:-1], None)
    for overload in packet.overloads() if packet is not None else ():
        found = getattr(packet, overload)
        if _arguments(found) == _arguments(target) and not found._schema.is_mutable:
            return found  # type: ignore[no-any-return]
    return None


def _arguments(target: torch._ops.OpOverload) -> list[tuple[str, str]]:
    return [(a.name if at else "self", str(a.type)) for at, a in enumerate(target._schema.arguments)]
