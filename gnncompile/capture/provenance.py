"""Finds the inputs of a captured graph that each of its results is computed from."""

from __future__ import annotations

from torch import fx

from gnncompile import _compat
from gnncompile.passes.analysis import carries_gradient, mutates


def uneven_sources(gm: fx.GraphModule) -> list[frozenset[int]] | None:
    """For each result, the positions of the inputs that it is computed from and that may have a gradient.

    None if all results that may have a gradient come from the same inputs. None also if the graph writes to a tensor
    with such inputs, or returns no sequence.
    """
    given = {node: at for at, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    sources: dict[fx.Node, frozenset[int]] = {}
    for node in gm.graph.nodes:
        own = [given[node]] if node in given and carries_gradient(node) else []
        sources[node] = frozenset(own).union(*(sources[n] for n in node.all_input_nodes))
        if sources[node] and mutates(node):  # a write without sources is harmless: num_batches_tracked of a batch norm
            return None
    results = gm.graph.output_node().args[0]
    if not isinstance(results, (tuple, list)):
        return None
    found = [sources[r] if isinstance(r, fx.Node) else frozenset[int]() for r in results]
    graded = {s for r, s in zip(results, found, strict=True) if isinstance(r, fx.Node) and carries_gradient(r)}
    return found if len(graded) > 1 else None


def kept_inputs(gm: fx.GraphModule) -> frozenset[int]:
    """The positions of a Dynamo graph's inputs that are attributes of the model, not arguments of the call."""
    sources = [_compat.input_source(node) for node in gm.graph.find_nodes(op="placeholder")]
    return frozenset(at for at, source in enumerate(sources) if source.startswith(("L['target']", "L['self']")))
