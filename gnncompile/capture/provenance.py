"""Finds the inputs of a captured graph that each of its results is computed from, and those that it writes to."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from gnncompile import _compat
from gnncompile.passes.analysis import aten, carries_gradient, mutates, value, with_grad_mode, written_inputs


def uneven_sources(gm: fx.GraphModule) -> list[frozenset[int]] | None:
    """For each result, the positions of the inputs that require a gradient and that a gradient reaches from the result.

    None if all results that may have a gradient come from the same inputs. None also if the graph writes to a tensor
    with such inputs, or returns no sequence.
    """
    given = {node: at for at, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    sources: dict[fx.Node, frozenset[int]] = {}
    for node, enabled in with_grad_mode(gm.graph):
        writes = mutates(node)
        own = [given[node]] if node in given and carries_gradient(node) and value(node).requires_grad else []
        behind = node.all_input_nodes if (enabled or writes) and not _ends_gradients(node) else []
        sources[node] = frozenset(own).union(*(sources[n] for n in behind))
        if sources[node] and writes:  # a write without sources is harmless: num_batches_tracked of a batch norm
            return None
    results = gm.graph.output_node().args[0]
    if not isinstance(results, (tuple, list)):
        return None
    found = [sources[r] if isinstance(r, fx.Node) else frozenset[int]() for r in results]
    graded = {s for r, s in zip(results, found, strict=True) if s and isinstance(r, fx.Node) and carries_gradient(r)}
    return found if len(graded) > 1 else None


def _ends_gradients(node: fx.Node) -> bool:
    """Whether no gradient flows through a node: what it detaches, or computes without floating-point numbers."""
    if node.target in (aten.detach.default, aten.detach_.default):
        return True
    return isinstance(node.meta.get("val"), torch.Tensor) and not carries_gradient(node)


def written_tensors(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[weakref.ref[Tensor]] | None:
    """Returns those of a graph's inputs that it writes to, or None if it may leave more behind than that."""
    written = written_inputs(gm.graph)
    if written is None:
        return None
    places = {node: at for at, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    return [weakref.ref(inputs[places[node]]) for node in written]


def attributes_of(
    gm: fx.GraphModule, inputs: Sequence[Any], kept: Iterable[int]
) -> list[tuple[str, weakref.ref[Tensor]]]:
    """Returns the tensors among a Dynamo graph's inputs that are attributes of the model, with their sources.

    Parameters are left out. `kept` are the positions from :func:`kept_inputs`.
    """
    nodes = gm.graph.find_nodes(op="placeholder")
    found = [(_compat.input_source(nodes[at]), inputs[at]) for at in sorted(kept)]
    tensors = [(s, value) for s, value in found if isinstance(value, Tensor) and not isinstance(value, nn.Parameter)]
    return [(source, weakref.ref(value)) for source, value in tensors if source.startswith("L['target']")]


def replaced(target: Any, attributes: Sequence[tuple[str, weakref.ref[Tensor]]]) -> str | None:
    """Returns the source of an attribute that is another tensor now, or None if there is none.

    Args:
        target: The captured model.
        attributes: The tensors that attributes were, from :func:`attributes_of`.
    """
    now = [(source, _compat.attribute_at(source, target), ref()) for source, ref in attributes]
    return next((source for source, new, old in now if isinstance(new, Tensor) and new is not old), None)


def kept_inputs(gm: fx.GraphModule) -> frozenset[int]:
    """The positions of a Dynamo graph's inputs that are attributes of the model, not arguments of the call."""
    sources = [_compat.input_source(node) for node in gm.graph.find_nodes(op="placeholder")]
    return frozenset(at for at, source in enumerate(sources) if source.startswith(("L['target']", "L['self']")))
