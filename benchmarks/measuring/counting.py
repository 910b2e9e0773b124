"""Counts what Dynamo did: captured graphs, graph breaks and recompiles.

This file reads private counters of `torch._dynamo`, which has no public ones.
"""

from dataclasses import dataclass

import torch
from torch._dynamo import utils as dynamo_utils


@dataclass(frozen=True)
class Counts:
    """Dynamo's work since a mark.

    Attributes:
        graphs: the number of captured graphs, including graphs captured again in a recompile.
        recompiles: the number of times that a piece of code (a function, or the rest after a graph break) was compiled
            again because a guard failed. At Dynamo's limit on recompiles both compiling and counting stop.
        graph_breaks: the number of pieces of code with a captured graph, minus one; meaningful after one call.
    """

    graphs: int
    recompiles: int
    graph_breaks: int


@dataclass(frozen=True)
class Mark:
    """A point from which to count."""

    graphs: int
    compilations: int


def reset() -> None:
    """Forgets all compiled code and sets the counters to zero."""
    torch._dynamo.reset()
    dynamo_utils.counters.clear()
    dynamo_utils.set_compilation_metrics_limit(100_000)  # the default keeps the last 64 entries only
    dynamo_utils.clear_compilation_metrics()


def mark() -> Mark:
    """Returns the present point; it becomes invalid by a later `reset`."""
    return Mark(dynamo_utils.counters["stats"]["unique_graphs"], len(dynamo_utils.get_compilation_metrics()))


def since(start: Mark) -> Counts:
    """Returns what was counted since a mark."""
    # A compile id reads `<frame>/<version>`. The version is not used: models of one class share their code, so the
    # first compilation of a model may be the second version of that code.
    seen, seen_with_graph = set(), set()
    recompiles = 0
    for entry in dynamo_utils.get_compilation_metrics()[start.compilations :]:
        if not entry.is_forward or entry.compile_id is None:
            continue  # the backward of a graph that is already counted
        frame = entry.compile_id.rsplit("/", 1)[0]
        recompiles += frame in seen
        seen.add(frame)
        if entry.graph_op_count:
            seen_with_graph.add(frame)
    graphs = dynamo_utils.counters["stats"]["unique_graphs"] - start.graphs
    return Counts(graphs, recompiles, max(0, len(seen_with_graph) - 1))


def cache_hits() -> tuple[int, int]:
    """Returns the numbers of hits and misses of compiled graphs in torch's caches on disk.

    An entry of AOTAutograd's cache holds forward and backward; a graph that it lacks may be in Inductor's cache.
    """
    aot, inductor = dynamo_utils.counters["aot_autograd"], dynamo_utils.counters["inductor"]
    return aot["autograd_cache_hit"], aot["autograd_cache_miss"] + inductor["fxgraph_cache_miss"]
