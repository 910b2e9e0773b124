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

from gnncompile.passes.context import Context, is_switch, mutates, origins
from gnncompile.passes.pre_grad import wrap_negative_indices


def run(ctx: Context) -> None:
    """Rewrites the graph in place."""
    firsts: dict[int, fx.Node] = {}
    for node, number in numbers(ctx.graph, ctx.written).items():
        first = firsts.setdefault(number, node)
        if first is not node:
            first.meta["origins"] = (*origins(first), *origins(node))
            wrap_negative_indices.take_over(first, node)
            node.replace_all_uses_with(first)
            ctx.graph.erase_node(node)


def numbers(graph: fx.Graph, written: set[fx.Node]) -> dict[fx.Node, int]:
    """A number for each node, the same for calls that make the same of the same arguments.

    Args:
        graph: Where they are.
        written: Nodes whose memory something writes to; none of them is the same as another.
    """
    calls = [n for n in graph.nodes if n.op == "call_function"]
    something_is_written = any(mutates(n) or is_switch(n) for n in calls)
    found: dict[fx.Node, int] = {}
    known: dict[Any, int] = {}
    for node in graph.nodes:
        shareable = node.op == "call_function" and node not in written and _pure(node, something_is_written)
        key = _key(node, found) if shareable else None
        found[node] = known.setdefault(node if key is None else key, len(known))
    return found


def _pure(node: fx.Node, written: bool) -> bool:
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


def _key(node: fx.Node, numbers: dict[fx.Node, int]) -> Any:
    flat, spec = pytree.tree_flatten((node.args, node.kwargs))
    parts = tuple((type(a), numbers[a] if isinstance(a, fx.Node) else a) for a in flat)
    try:
        hash(parts)
    except TypeError:
        return None
    return node.target, parts, str(spec)
