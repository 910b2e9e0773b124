"""The op that runs :class:`torch_geometric.nn.WLConv` in a captured graph: ``gnncompile::refined_colors``.

``refined_colors(x, edge_index, number)`` runs the layer's own forward. The forward waits for the device, hashes lists
of integers on the host, and adds new hashes to the layer's table. `number` identifies the layer
(:func:`gnncompile._compat.identified`). The op must run in every step, because the table may be emptied in between.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.nn import WLConv

from gnncompile import _compat
from gnncompile.ops.region import LIBRARY

LIBRARY.define(
    "refined_colors(Tensor x, Tensor edge_index, int number) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)


def refined_colors(x: Tensor, edge_index: Tensor, number: int) -> Tensor:
    """New colours ``[num_nodes]`` of nodes with colours ``[num_nodes]``, or ``[num_nodes, colors]`` one-hot."""
    found: Tensor = WLConv.forward(_compat.object_of(number), x, edge_index)
    return found.long()  # without nodes, PyG's result is a float tensor


def _fake(x: Tensor, edge_index: Tensor, number: int) -> Tensor:
    return x.new_empty(x.size(0), dtype=torch.long)


LIBRARY.impl("refined_colors", refined_colors, "CompositeExplicitAutograd")
torch.library.register_fake("gnncompile::refined_colors", _fake, lib=LIBRARY)
