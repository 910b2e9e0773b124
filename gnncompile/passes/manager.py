"""The passes in the order in which they run, and the functions that run them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Literal, Protocol, get_args

import torch
from torch import fx

from gnncompile import _compat
from gnncompile.debug_dir import GraphDump
from gnncompile.layout.structure_program import StructureProgram
from gnncompile.options import Options
from gnncompile.passes.analysis import depends_on_chance, fakes_in
from gnncompile.passes.context import Context
from gnncompile.passes.joint import recompute_activations, share_exchanged_rows
from gnncompile.passes.log import PassLog
from gnncompile.passes.padded import mask_padding
from gnncompile.passes.partitioned.parts import Parts
from gnncompile.passes.post_grad import (
    copy_weights,
    cpu_gradients,
    delay_row_sums,
    exact_numbers,
    expand_small_products,
    fuse_epilogue,
    fuse_gemm_pairs,
    fuse_product_epilogue,
    fuse_product_factor,
    gemm_epilogue,
    join_products,
    lower_gemm,
    lower_moments,
    order_exchanges,
    overlap_exchanges,
    read_arithmetic,
    read_row_values,
    read_through_index,
    recompute_for_sums,
    round_compared,
    share_conversions,
    walk_own_edges_first,
)
from gnncompile.passes.pre_grad import (
    canonicalize,
    check_unbacked_sizes,
    cse,
    drop_edge_ids,
    exchange_halos,
    expand_gradients,
    factor_row_scales,
    flatten_axes,
    form_regions,
    functionalize,
    gather_embeddings,
    hoist_structure,
    lower_sparse_matrices,
    lower_unfused,
    mark_gradients,
    merge_linears,
    merge_sibling_regions,
    normalize_sizes,
    permute_edge_data,
    push_edge_linear_to_nodes,
    push_linear_through_gather,
    read_batch_metadata,
    reduce_over_parts,
    rematerialize,
    reorder_linear_aggregate,
    resolve_edge_lists,
    reuse_loader_csr,
    save_extremes,
    share_layouts,
    slice_messages,
    slice_to_seeds,
    split_concatenations,
    split_self_loops,
    sum_outer_products,
    sum_over_parts,
    trim_to_layer,
    wrap_negative_indices,
)

Stage = Literal["pre_grad", "joint", "post_grad"]


@dataclass(frozen=True)
class Pass:
    """One rewrite of a graph.

    Attributes:
        name: The name of its file.
        option: The option that turns the pass off, or None if the pass always runs.
        stage: Whether it runs before differentiation; after it, on one graph of the forward and the backward; or on
            each of the two.
        run: Rewrites the graph of a :class:`Context` (before differentiation), or an ``fx.Graph`` (after it).
    """

    name: str
    option: str | None
    stage: Stage
    run: Callable[[Any], None]


def _pass(stage: Stage, module: ModuleType, option: str | None = None) -> Pass:
    return Pass(module.__name__.rpartition(".")[2], option, stage, module.run)


_before, _joint, _after = (partial(_pass, stage) for stage in get_args(Stage))

PRE_GRAD: tuple[Pass, ...] = (
    _before(read_batch_metadata),
    _before(lower_sparse_matrices),
    _before(functionalize),
    _before(normalize_sizes),
    _before(resolve_edge_lists),
    _before(canonicalize),
    _before(flatten_axes),
    _before(expand_gradients),
    _before(check_unbacked_sizes),
    _before(slice_to_seeds),
    _before(mask_padding),
    _before(reduce_over_parts),
    _before(trim_to_layer),
    _before(cse),
    _before(gather_embeddings),
    _before(push_linear_through_gather),
    _before(slice_messages),
    _before(push_edge_linear_to_nodes, "per_node"),
    _before(sum_outer_products, "per_node"),
    _before(factor_row_scales),
    _before(merge_linears),
    _before(split_concatenations),
    _before(mark_gradients),
    _before(reorder_linear_aggregate, "narrower"),
    _before(exchange_halos),
    _before(form_regions, "regions"),
    _before(merge_sibling_regions, "siblings"),
    _before(lower_unfused),
    _before(share_layouts),
    _before(permute_edge_data),
    _before(rematerialize),
    _before(save_extremes),
    _before(split_self_loops),
    _before(reuse_loader_csr),
    _before(drop_edge_ids),
    _before(wrap_negative_indices),
    _before(sum_over_parts),
    _before(hoist_structure, "hoist"),
)
"""These passes run once on each captured graph, in this order. ``hoist_structure`` is last: it splits the graph."""

JOINT: tuple[Pass, ...] = (_joint(share_exchanged_rows), _joint(recompute_activations))
"""These passes run after differentiation, on the graph of a forward and its backward, in this order."""

POST_GRAD: tuple[Pass, ...] = (
    _after(expand_small_products),
    _after(round_compared),
    _after(fuse_epilogue, "epilogues"),
    _after(read_through_index),
    _after(read_row_values),
    _after(read_arithmetic),
    _after(gemm_epilogue, "epilogues"),
    _after(lower_gemm, "products"),
    _after(fuse_gemm_pairs, "products"),
    _after(copy_weights),
    _after(share_conversions),
    _after(join_products, "products"),
    _after(delay_row_sums),
    _after(fuse_product_epilogue, "products"),
    _after(fuse_product_factor, "products"),
    _after(cpu_gradients),
    _after(lower_moments),
    _after(recompute_for_sums),
    _after(exact_numbers),
    _after(order_exchanges),
    _after(overlap_exchanges),
    _after(walk_own_edges_first),
)
"""These passes run after differentiation, on each forward graph and each backward graph, in this order."""


@dataclass(frozen=True)
class Result:
    """A captured graph after the passes.

    Attributes:
        rest: The graph that Inductor compiles.
        structure: The structure program, or None if no node depends on structure alone.
        log: The rewrites that the passes made, and the ones that they skipped.
    """

    rest: fx.GraphModule
    structure: StructureProgram | None
    log: PassLog


class Observer(Protocol):
    """Is shown each captured graph before and after the passes."""

    def before(self, ctx: Context, sources: list[str]) -> None:
        """Receives the traced graph. `sources` holds Dynamo's name for the source of each input."""

    def after(self, ctx: Context, structure: StructureProgram | None) -> None:
        """Receives the graph that is left for Inductor, and the structure program."""


def run_pre_grad(
    gm: fx.GraphModule,
    options: Options,
    observer: Observer | None = None,
    leads_on: bool = False,
    parts: Parts | None = None,
) -> Result:
    """Runs :data:`PRE_GRAD` on a graph that Dynamo captured.

    Args:
        gm: The captured graph.
        options: The options of gnncompile.
        observer: Is shown the graph before the first pass and after the last one.
        leads_on: Whether another captured graph may take the results as its inputs.
        parts: The partition whose part the graph runs over; None for a whole graph.
    """
    ctx = _context(gm, options, leads_on)
    ctx.parts = parts
    sources = [_compat.input_source(node) for node in _inputs(gm)]
    ctx.edge_lists = _edge_lists(dict(zip(sources, _inputs(ctx.gm), strict=True)))
    if observer is not None:
        observer.before(ctx, sources)
    dump = GraphDump("graph", ctx.graph)
    for one in wanted(PRE_GRAD, options):
        one.run(ctx)
        ctx.graph.lint()
        dump.after(one.name)
    if ctx.structure is not None:
        dump.beside("structure", ctx.structure.module.graph)
    ctx.gm.recompile()
    if observer is not None:
        observer.after(ctx, ctx.structure)
    return Result(ctx.gm, ctx.structure, ctx.log)


def run_joint(graph: fx.Graph, options: Options) -> None:
    """Runs :data:`JOINT` on the graph of a forward and its backward, before Inductor divides it."""
    _run("joint", JOINT, graph, options)


def run_post_grad(graph: fx.Graph, options: Options) -> None:
    """Runs :data:`POST_GRAD` on a forward graph or a backward graph."""
    _run("post_grad", POST_GRAD, graph, options)


def _run(stage: Stage, passes: Iterable[Pass], graph: fx.Graph, options: Options) -> None:
    dump = GraphDump(stage, graph)
    for one in wanted(passes, options):
        one.run(graph)
        dump.after(one.name)


def wanted(passes: Iterable[Pass], options: Options) -> list[Pass]:
    """The passes that no option turns off."""
    return [one for one in passes if one.option is None or getattr(options, one.option)]


def _context(gm: fx.GraphModule, options: Options, leads_on: bool) -> Context:
    """Traces the graph to aten operations, each with its fake value, and returns the context of the passes."""
    fakes = _compat.placeholders_as_fakes(gm)
    traced = _compat.trace_aten(gm, fakes)
    mode = next(f.fake_mode for f in fakes if isinstance(f, torch._subclasses.FakeTensor))
    for node, fake in zip(_inputs(traced), fakes, strict=True):
        node.meta["val"] = fake
    for node in traced.graph.nodes:
        if depends_on_chance(node):
            node.meta.pop("recompute", None)  # a second run would draw other random numbers
        if _compat.assumed_sizes(fakes_in(node)):
            node.meta.pop("unbacked_bindings", None)  # differentiation would look for a symbol that no longer exists
    return Context(traced, mode, set(), options, leads_on=leads_on)


def _edge_lists(inputs: dict[str, fx.Node]) -> set[tuple[fx.Node, fx.Node]]:
    """Pairs of inputs that are the two rows of one edge list: see ``gnncompile.capture.inputs.EdgePair``."""
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
