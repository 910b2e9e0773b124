"""Fuses operations of rows with regions and products, in a program that is traced for a package on a GPU.

In a process, these passes run within Inductor. There the program of a package has neither regions nor products of ours
any more, but launches. Small products are ours as well, which a process leaves to torch's library: for the host, a call
of the library takes much longer than a launch, and a small request waits for the host.
"""

from __future__ import annotations

from torch import fx

from gnncompile.options import Options
from gnncompile.passes.manager import POST_GRAD, wanted

_NAMES = (
    "expand_small_products",
    "round_compared",
    "fuse_epilogue",
    "gemm_epilogue",
    "lower_gemm",
    "fuse_gemm_pairs",
)
"""The fusions, and the passes that prepare the graph for them. They run in the order of a process."""


def run(graph: fx.Graph, options: Options) -> None:
    """Rewrites the graph in place, but for the passes that an option turns off."""
    for one in wanted(POST_GRAD, options):
        if one.name in _NAMES:
            one.run(graph)
    graph.eliminate_dead_code()
    graph.lint()
