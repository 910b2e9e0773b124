"""Over one part of a graph, the gradients of parameters are summed over all parts.

Before: ``linear(x, weight)``
After:  ``linear(x, weights)``, where ``weights, ... = parameters_of_all_parts(weight, ...)`` returns the parameters as
        they are; its gradient sums the gradients of all parts
Why it pays: all gradients take one collective. The parameters of all processes stay the same bits.
"""

from __future__ import annotations

import operator

import torch

from gnncompile.ops.exchange import parameters_of_all_parts
from gnncompile.passes.analysis import is_tensor, value
from gnncompile.passes.context import Context
from gnncompile.passes.padded.graph import expression


def run(ctx: Context) -> None:
    """Rewrites the graph in place."""
    if ctx.parts is None or not torch.is_grad_enabled():
        return
    inputs = [n for n in ctx.graph.nodes if n.op == "placeholder" and is_tensor(n) and value(n).requires_grad]
    parameters = [n for n in inputs if not any(expression(s).free_symbols for s in value(n).shape)]
    parameters = [n for n in parameters if n.users]
    if not parameters:
        return
    users = [list(node.users) for node in parameters]
    with ctx.graph.inserting_after(ctx.inputs_first()):
        call = ctx.graph.call_function(parameters_of_all_parts, (ctx.parts.group, *parameters))
    call.meta["val"] = tuple(value(n).detach() for n in parameters)
    at = call
    for k, (node, readers) in enumerate(zip(parameters, users, strict=True)):
        with ctx.graph.inserting_after(at):
            at = ctx.graph.call_function(operator.getitem, (call, k))
        at.meta["val"] = value(node)
        for reader in readers:
            reader.replace_input_with(node, at)
