"""The op ``gnncompile::prepare_sizes()``, with which each graph begins that Inductor lowers. It runs nothing.

Its lowering is the first that Inductor calls for a graph. There Inductor's object that knows the graph's sizes becomes
one of ours.
"""

from __future__ import annotations

import torch
from torch import fx

from gnncompile._compat import inductor_call
from gnncompile.ops.region import LIBRARY

_OP = "prepare_sizes"


def _run() -> None:
    return None


LIBRARY.define(f"{_OP}() -> ()", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.impl(_OP, _run, "CompositeExplicitAutograd")
torch.library.register_fake(f"gnncompile::{_OP}", _run, lib=LIBRARY)


def begin(graph: fx.Graph) -> None:
    """Makes a graph begin with the op, after its inputs."""
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        graph.call_function(torch.ops.gnncompile.prepare_sizes.default).meta["val"] = None


def install() -> None:
    """Registers the lowering with Inductor."""
    inductor_call.install_prepare_sizes(torch.ops.gnncompile.prepare_sizes.default)
