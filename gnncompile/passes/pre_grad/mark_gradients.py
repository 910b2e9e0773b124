"""Nodes that a gradient may flow through are known.

Before: nothing is known of gradients
After:  ``ctx.needs_grad`` holds ``x`` where ``x`` requires one, and all that is made from ``x`` differentiably
Why it pays: a region keeps what its gradient reads, and no gradient is prepared that nobody asks for.
"""

from __future__ import annotations

import torch
from torch import fx

from gnncompile.passes.analysis import carries_gradient, mutates
from gnncompile.passes.context import Context


def run(ctx: Context) -> None:
    """Fills ``ctx.needs_grad``. A superset only costs an extra layout; a missing node would be wrong."""
    ctx.needs_grad = _reached(ctx.graph) if torch.is_grad_enabled() else set()


def _reached(graph: fx.Graph) -> set[fx.Node]:
    """All nodes that inputs with gradients lead to."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        val = node.meta.get("val")
        if node.op == "placeholder":
            if isinstance(val, torch.Tensor) and val.requires_grad:
                found.add(node)
        elif any(n in found for n in node.all_input_nodes):
            if carries_gradient(node):
                found.add(node)
            if mutates(node):
                found.update(node.all_input_nodes)
    return found
