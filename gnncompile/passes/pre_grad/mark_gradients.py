"""Nodes that a gradient may flow through are marked.

Before: no node is marked
After:  ``ctx.needs_grad`` holds ``x`` where ``x`` requires a gradient, and all nodes computed from ``x`` differentiably
Why it pays: a region keeps the values that its gradient reads, and prepares no gradient that is not needed.
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
    """Returns all nodes that depend on inputs with gradients, and these inputs."""
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
