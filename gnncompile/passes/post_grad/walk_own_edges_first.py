"""A region that reads exchanged rows walks edges from own rows while halo rows arrive, and then the other edges.

Before: ``s = exchange_start(x); j = exchange_wait(s); y = region([j], ...)``
After:  ``s = exchange_start(x); o = own_edges([s], ...); j = exchange_wait(s); y = halo_edges([j], ..., o)``
Why it pays: a walk over half of the edges takes longer than the exchange of half of the rows. Where few rows arrive,
        the region is walked at once when they are there: see :data:`gnncompile.ops.own_and_halo_edges.LEAST_HALO`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx

from gnncompile.ir.region import parse
from gnncompile.ops.own_and_halo_edges import divides
from gnncompile.passes.analysis import own, value, views_rows


def run(graph: fx.Graph) -> None:
    """Rewrites the graph in place."""
    for region in list(graph.find_nodes(op="call_function", target=own.region.default)):
        waits = {at: wait for at, t in enumerate(region.args[0]) if (wait := _awaited(t)) is not None}
        if waits and _gathers(str(region.args[2]), waits) and divides(str(region.args[2])):
            _divide(graph, region, waits)


def _gathers(spec: str, positions: Iterable[int]) -> bool:
    """Whether a region reads these tensors at the other end of edges alone. Then edges tell which rows they need."""
    region = parse(spec)
    spaces = {n.space for n in region.inputs if not set(positions).isdisjoint(n.positions)}
    return spaces == {region.by.opposite}


def _awaited(tensor: fx.Node) -> fx.Node | None:
    """Returns the end of the exchange whose rows a region reads, also through a view of each row; else None."""
    node = tensor
    while views_rows(node):
        node = node.all_input_nodes[0]
    return node if node.target is own.exchange_wait.default else None


def _divide(graph: fx.Graph, region: fx.Node, waits: dict[int, fx.Node]) -> None:
    tensors, layout, spec = region.args[:3]
    starts: list[Any] = [wait.args[0] for wait in waits.values()]
    halo: Any = starts[0].args[2]
    first = min(waits.values())
    given = [t for at, t in enumerate(tensors) if at not in waits]  # type: ignore[arg-type]
    early = [*given, *layout, *starts]  # type: ignore[misc]
    if any(start.args[2] is not halo for start in starts) or any(not node < first for node in early):
        return
    with graph.inserting_before(first):
        before = [_view(graph, t, waits[at]) if at in waits else t for at, t in enumerate(tensors)]  # type: ignore[arg-type]
        joined = min(waits)
        started = graph.call_function(own.own_edges.default, (before, layout, spec, halo, joined))
    started.meta["val"] = value(halo).new_empty(0)
    region.target, region.args = own.halo_edges.default, (tensors, layout, spec, halo, joined, started)


def _view(graph: fx.Graph, tensor: fx.Node, wait: fx.Node) -> Any:
    """Returns the view of the rows of an exchange that has only started."""
    if tensor is wait:
        return wait.args[0]
    source, *rest = tensor.args
    view = graph.call_function(tensor.target, (_view(graph, source, wait), *rest), tensor.kwargs)  # type: ignore[arg-type]
    view.meta = dict(tensor.meta)
    return view
