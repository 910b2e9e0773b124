"""Results keep only the rows of the seeds, if the user reads no others (``options={"only_seeds": True}``).

Before: ``out``, with a row for each node that was sampled
After:  ``out[:batch_size]``
Why it pays: a training loop slices results to the seeds outside the compiled code. With the slice inside the graph,
        :mod:`gnncompile.passes.pre_grad.trim_to_layer` leaves out of each layer the rows that no seed needs.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from gnncompile.passes.analysis import aten, is_tensor, value
from gnncompile.passes.context import Context, PaddedInputs


def run(ctx: Context) -> None:
    """Rewrites the graph in place."""
    if ctx.padded is None or not ctx.padded.hop_prefixes or not ctx.options.only_seeds:
        return
    (output,) = ctx.graph.find_nodes(op="output")
    results: Any = output.args[0]
    with ctx.graph.inserting_before(output):
        output.args = (tuple([_cut(ctx, ctx.padded, result) for result in results]),)


def _cut(ctx: Context, known: PaddedInputs, result: Any) -> Any:
    """Returns the rows of the seeds if a result has a row for each node, or else the result itself."""
    nodes = known.values[known.hop_prefixes[0].of[1]]
    if not is_tensor(result) or not value(result).dim() or known.kind(value(result).shape[0]) != nodes:
        return result
    seeds: fx.Node = ctx.call(aten.sym_size.int, known.hop_prefixes[0].nodes, 0)
    return ctx.call(aten.slice.Tensor, result, 0, 0, seeds)
