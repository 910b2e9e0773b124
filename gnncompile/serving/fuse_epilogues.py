"""Fuses operations of rows with regions and products, in a program that is traced for a package on a GPU.

In a process, these passes run within Inductor. There the program of a package has no regions any more, only launches.
"""

from __future__ import annotations

from torch import fx

from gnncompile.passes.post_grad import expand_small_products, fuse_epilogue, gemm_epilogue, round_compared

_PASSES = (expand_small_products, round_compared, fuse_epilogue, gemm_epilogue)
"""The passes in the order of a process: those before the fusions prepare the graph for them."""


def run(graph: fx.Graph) -> None:
    """Rewrites the graph in place."""
    for one in _PASSES:
        one.run(graph)
    graph.eliminate_dead_code()
    graph.lint()
