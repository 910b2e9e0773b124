"""Cases for ``torch_geometric.nn.aggr``: rows are reduced by a sorted index, without a given number of groups."""

from __future__ import annotations

from torch import nn
from torch_geometric.nn import aggr

from gnncompile.support.case import CHANNELS as C
from gnncompile.support.case import Absent, Case, degrees
from gnncompile.support.conv import mlp

ROWS = ("x", "sorted_index")


_SCALERS = ["identity", "linear"]
_PROJ = {"in_channels": C, "out_channels": C}

AGGR: tuple[Case | Absent, ...] = (
    Absent("Aggregation", "the base class"),
    Case("MultiAggregation", lambda: aggr.MultiAggregation(["mean", "max", "std"]), ROWS),
    Case(
        "MultiAggregation [projected]",
        lambda: aggr.MultiAggregation(["mean", "min"], mode="proj", mode_kwargs=_PROJ),
        ROWS,
    ),
    Case("SumAggregation", aggr.SumAggregation, ROWS),
    Case("MeanAggregation", aggr.MeanAggregation, ROWS),
    Case("MaxAggregation", aggr.MaxAggregation, ROWS),
    Case("MinAggregation", aggr.MinAggregation, ROWS),
    Case("MulAggregation", aggr.MulAggregation, ROWS),
    Case("VarAggregation", aggr.VarAggregation, ROWS),
    Case("StdAggregation", aggr.StdAggregation, ROWS),
    Case("SoftmaxAggregation", lambda: aggr.SoftmaxAggregation(learn=True), ROWS),
    Case("PowerMeanAggregation", lambda: aggr.PowerMeanAggregation(learn=True), ROWS),
    Case("MedianAggregation", aggr.MedianAggregation, ROWS),
    Case("QuantileAggregation", lambda: aggr.QuantileAggregation([0.25, 0.5]), ROWS),
    Case("LSTMAggregation", lambda: aggr.LSTMAggregation(C, C), ROWS),
    Case("GRUAggregation", lambda: aggr.GRUAggregation(C, C), ROWS),
    Case("Set2Set", lambda: aggr.Set2Set(C, 2), ROWS),
    Case(
        "DegreeScalerAggregation",
        lambda: aggr.DegreeScalerAggregation(["mean"], _SCALERS, degrees()),
        ROWS,
    ),
    Case("SortAggregation", lambda: aggr.SortAggregation(3), ROWS),
    Case("GraphMultisetTransformer", lambda: aggr.GraphMultisetTransformer(C, 3, heads=2), ROWS),
    Case("AttentionalAggregation", lambda: aggr.AttentionalAggregation(mlp(C, 1)), ROWS),
    Case("EquilibriumAggregation", lambda: aggr.EquilibriumAggregation(C, C, [C], grad_iter=2), ROWS),
    Case("MLPAggregation", lambda: aggr.MLPAggregation(C, C, 12, num_layers=1), ROWS),
    Case("DeepSetsAggregation", lambda: aggr.DeepSetsAggregation(mlp(C, C), nn.Linear(C, C)), ROWS),
    Case("SetTransformerAggregation", lambda: aggr.SetTransformerAggregation(C, heads=2), ROWS),
    Case("LCMAggregation", lambda: aggr.LCMAggregation(C, C), ROWS),
    Case("VariancePreservingAggregation", aggr.VariancePreservingAggregation, ROWS),
    Case("PatchTransformerAggregation", lambda: aggr.PatchTransformerAggregation(C, C, 2, C), ROWS),
)
