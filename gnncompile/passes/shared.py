"""Equal computations are made once.

Before: every layer computes the same self loops and the same normalisation from ``edge_index``.
After:  one of them.
Why it pays: one structure serves all layers; region forming may compare indices by identity.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from gnncompile.passes.context import Context, mutates, origins


def run(ctx: Context) -> None:
    """Rewrites the graph in place."""
    seen: dict[Any, fx.Node] = {}
    written = something_is_written(ctx)
    for node in list(ctx.graph.nodes):
        if node.op != "call_function" or node in ctx.written or not is_pure(node, written):
            continue
        key = _key(node)
        if key is None:
            continue
        if key in seen:
            seen[key].meta["origins"] = (*origins(seen[key]), *origins(node))
            node.replace_all_uses_with(seen[key])
            ctx.graph.erase_node(node)
        else:
            seen[key] = node


def something_is_written(ctx: Context) -> bool:
    """Whether the graph writes to memory, or switches modes, so that equal calls may make different things."""
    return bool(ctx.switches) or any(mutates(n) for n in ctx.graph.nodes if n.op == "call_function")


def is_pure(node: fx.Node, written: bool) -> bool:
    """Whether a call makes the same of the same arguments; `written`: whether anything in the graph is written to."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target.__module__ == "_operator" if callable(target) else False
    if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags or _stateful(str(target)):
        return False
    val = node.meta.get("val")
    # Where something writes to memory or switches gradients off, only integers (structure) are shared.
    return not written or not (isinstance(val, torch.Tensor) and val.is_floating_point())


def _stateful(name: str) -> bool:
    return any(part in name for part in ("dropout", "batch_norm", "instance_norm", "rrelu"))


def _key(node: fx.Node) -> Any:
    flat, spec = pytree.tree_flatten((node.args, node.kwargs))
    parts = tuple((type(a), a) for a in flat)
    try:
        hash(parts)
    except TypeError:
        return None
    return node.target, parts, str(spec)
