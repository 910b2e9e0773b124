"""PyG's layers with typed edges, without their loop over boolean masks (whose sizes depend on data).

What is not PyG's own layer on a plain edge list (a subclass with another message, a sparse matrix) is
traced as written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_geometric.nn import FastRGCNConv, FiLMConv, HeteroLinear, HGTConv, RGATConv, RGCNConv

from gnncompile.substitutes.nn.conv.film import film_forward
from gnncompile.substitutes.nn.conv.hgt import hgt_forward
from gnncompile.substitutes.nn.conv.rgat import rgat_forward
from gnncompile.substitutes.nn.conv.rgcn import fast_rgcn_forward, rgcn_forward
from gnncompile.substitutes.nn.conv.typed_linear import hetero_linear_forward

METHODS: dict[Callable[..., Any], Callable[..., Any]] = {
    RGCNConv.forward: rgcn_forward,
    FastRGCNConv.forward: fast_rgcn_forward,
    HeteroLinear.forward: hetero_linear_forward,
    FiLMConv.forward: film_forward,
    HGTConv.forward: hgt_forward,
    RGATConv.forward: rgat_forward,
}
"""What is traced in place of PyG's methods."""
