"""Cases for the normalisations of ``torch_geometric.nn.norm``."""

from __future__ import annotations

from torch_geometric.nn import norm

from gnncompile.support.case import CHANNELS as C
from gnncompile.support.case import Absent, Case

ROWS = ("x", "batch")

NORM: tuple[Case | Absent, ...] = (
    Case("BatchNorm", lambda: norm.BatchNorm(C, allow_single_element=True), ("x",)),
    Case("HeteroBatchNorm", lambda: norm.HeteroBatchNorm(C, 2), ("x", "node_type")),
    Case("InstanceNorm", lambda: norm.InstanceNorm(C, affine=True), ROWS),
    Case("LayerNorm", lambda: norm.LayerNorm(C), ROWS),
    Case("LayerNorm [node]", lambda: norm.LayerNorm(C, mode="node"), ("x",)),
    Case("HeteroLayerNorm", lambda: norm.HeteroLayerNorm(C, 2), ("x", "node_type")),
    Case("GraphNorm", lambda: norm.GraphNorm(C), ROWS),
    Case("GraphSizeNorm", norm.GraphSizeNorm, ROWS),
    Case("PairNorm", norm.PairNorm, ROWS),
    Case("MeanSubtractionNorm", norm.MeanSubtractionNorm, ROWS),
    Case("MessageNorm", lambda: norm.MessageNorm(learn_scale=True), ("x", "x0")),
    Case("DiffGroupNorm", lambda: norm.DiffGroupNorm(C, 2), ("x",)),
)
