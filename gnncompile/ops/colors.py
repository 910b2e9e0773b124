"""Colours of nodes by a table that a layer keeps in Python: ``gnncompile::refined_colors``.

``refined_colors(x, edge_index, number)`` is the forward of :class:`torch_geometric.nn.WLConv`, run as it is: it hashes
lists of integers on the host, for which it waits for the device, and adds what is new to the layer's table. The layer
is the object of this number (:func:`gnncompile._compat.identified`). Never run once for several steps: the table may
have been emptied in between.
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
    return found.long()  # of no node it is a float


def _fake(x: Tensor, edge_index: Tensor, number: int) -> Tensor:
    return x.new_empty(x.size(0), dtype=torch.long)


LIBRARY.impl("refined_colors", refined_colors, "CompositeExplicitAutograd")
torch.library.register_fake("gnncompile::refined_colors", _fake, lib=LIBRARY)
