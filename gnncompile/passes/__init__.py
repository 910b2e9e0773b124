"""The passes, in the order in which they run. Each file says what it changes and why that pays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx
from torch.utils import _pytree as pytree

import gnncompile.runtime.color_ops
import gnncompile.runtime.dense_ops
import gnncompile.runtime.gradient_ops
import gnncompile.runtime.matching_ops
import gnncompile.runtime.region_op
import gnncompile.runtime.sampling_ops
import gnncompile.runtime.segment_gradients
import gnncompile.runtime.segment_ops
import gnncompile.runtime.structure_ops  # noqa: F401  (the ops must exist before a pass names them)
from gnncompile import _compat
from gnncompile.passes import (
    adjacency,
    assumed,
    attached,
    axes,
    dense,
    edges,
    epilogue,
    fronts,
    functional,
    gradients,
    hoist,
    idioms,
    laid_out,
    late,
    lower,
    narrower,
    negatives,
    node_side,
    only_seeds,
    ordered,
    padding,
    pairs,
    per_node,
    products,
    recomputed,
    regions,
    scaled,
    shared,
    siblings,
    sizes,
    summed,
    unnumbered,
)
from gnncompile.passes.context import Context, Record, carries_gradient, depends_on_chance, mutates
from gnncompile.passes.hoist import Hoisted

PASSES = (
    attached,
    adjacency,
    functional,
    sizes,
    edges,
    idioms,
    axes,
    gradients,
    assumed,
    only_seeds,
    padding,
    fronts,
    shared,
    node_side,
    per_node,
    scaled,
    summed,
    narrower,
    regions,
    siblings,
    lower,
    ordered,
    recomputed,
    laid_out,
    unnumbered,
    negatives,
)
"""Run in this order; ``hoist`` comes last, because it splits the graph."""

_OPTIONS = {per_node: "per_node", narrower: "narrower", regions: "regions", siblings: "siblings"}
"""Passes that can be turned off."""


def finish(graph: fx.Graph, options: dict[str, Any]) -> None:
    """Runs what comes after differentiation on the graph of a forward, or of a backward."""
    if options["epilogues"]:
        epilogue.run(graph)
        dense.run(graph)
    if options["products"]:
        products.run(graph)
        pairs.run(graph)
    late.run(graph)


@dataclass(frozen=True)
class Result:
    """What is left for Inductor, the structure program, and the record."""

    rest: fx.GraphModule
    hoisted: Hoisted | None
    record: Record


class Observer(Protocol):
    """Who wants to know what the passes make of a graph."""

    def before(self, ctx: Context, sources: list[str]) -> None:
        """Sees the traced graph; `sources` says what each input is, as Dynamo writes it."""

    def after(self, ctx: Context, hoisted: Hoisted | None) -> None:
        """Sees what is left for Inductor, and the structure program."""


def optimise(
    gm: fx.GraphModule, options: dict[str, Any], observer: Observer | None = None, leads_on: bool = False
) -> Result:
    """Runs all passes on a Dynamo graph; `leads_on` says whether another graph may go on with its results."""
    fakes = _compat.placeholders_as_fakes(gm)
    traced = _compat.trace_aten(gm, fakes)
    mode = next(f.fake_mode for f in fakes if isinstance(f, torch._subclasses.FakeTensor))
    for node, fake in zip(_inputs(traced), fakes, strict=True):
        node.meta["val"] = fake
    for node in traced.graph.nodes:
        if depends_on_chance(node):
            node.meta.pop("recompute", None)  # it would draw other numbers
        found = [v for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, (torch.Tensor, torch.SymInt))]
        if _compat.assumed_sizes(found):
            node.meta.pop("unbacked_bindings", None)  # differentiation would look for a symbol that is gone
    ctx = Context(traced, mode, set(), options)
    sources = [_compat.input_source(node) for node in _inputs(gm)]
    ctx.edge_lists = _edge_lists(dict(zip(sources, _inputs(traced), strict=True)))
    if observer is not None:
        observer.before(ctx, sources)
    for one in PASSES:
        if one is narrower:
            ctx.needs_grad = _needs_grad(traced)
        if not options.get(_OPTIONS.get(one, ""), True):
            continue
        one.run(ctx)
        traced.graph.lint()
    moved = hoist.run(ctx, leads_on) if options["hoist"] else None
    traced.recompile()
    if observer is not None:
        observer.after(ctx, moved)
    return Result(traced, moved, ctx.record)


def _edge_lists(inputs: dict[str, fx.Node]) -> set[tuple[fx.Node, fx.Node]]:
    """The rows of the edge lists that were taken apart: see :class:`gnncompile.capture.inputs.EdgePair`."""
    found = set()
    for source, node in inputs.items():
        whole, row, segment = source.rpartition(".row")
        if _compat.takes_arguments() and row and segment in ("", ".segment", ".numbered"):
            found |= {(node, inputs[other]) for other in _others(whole) if other in inputs}
    return found


def _others(edge_list: str) -> list[str]:
    return [f"{edge_list}.col{part}" for part in ("", ".segment", ".numbered")]


def _inputs(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.op == "placeholder"]


def _needs_grad(gm: fx.GraphModule) -> set[fx.Node]:
    """Nodes that a gradient may flow through; too many costs a layout, too few is impossible."""
    if not torch.is_grad_enabled():
        return set()
    found: set[fx.Node] = set()
    for node in gm.graph.nodes:
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
