"""Fuses operations of rows with regions and products, in a program that is traced for a package on a GPU.

In a process, these passes run within Inductor. There the program of a package has neither regions nor products of ours
any more, but launches. Small products are ours as well, which a process leaves to torch's library: for the host, a call
of the library takes much longer than a launch, and a small request waits for the host.
"""

from __future__ import annotations

from torch import fx

from gnncompile.options import Options
from gnncompile.passes.post_grad import (
    expand_small_products,
    fuse_epilogue,
    fuse_gemm_pairs,
    gemm_epilogue,
    lower_gemm,
    round_compared,
)

_PASSES = (
    (expand_small_products, None),
    (round_compared, None),
    (fuse_epilogue, "epilogues"),
    (gemm_epilogue, "epilogues"),
    (lower_gemm, "products"),
    (fuse_gemm_pairs, "products"),
)
"""The passes and their options, in the order of a process: those before the fusions prepare the graph for them."""


def run(graph: fx.Graph, options: Options) -> None:
    """Rewrites the graph in place, but for the passes that an option turns off."""
    for one, option in _PASSES:
        if option is None or getattr(options, option):
            one.run(graph)
    graph.eliminate_dead_code()
    graph.lint()
