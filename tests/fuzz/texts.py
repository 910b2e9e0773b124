"""The texts of the fuzzer's lines: what they compute, with places for the names of values, sizes and modules."""

from __future__ import annotations

from tests.fuzz.program import EDGES, GRAPHS, NODES, OTHERS, PAIRS

UNARY = (
    *("{0}.relu()", "torch.tanh({0})", "{0}.sigmoid()", "F.silu({0})", "-{0}", "{0} * 0.5", "1 - {0}"),
    *("F.leaky_relu({0}, 0.2)", "F.elu({0})", "F.gelu({0})", "F.softplus({0})", "{0}.abs()", "torch.sin({0})"),
    *("torch.exp(-{0}.abs())", "torch.log({0}.abs() + 0.5)", "({0} * {0} + 0.25).sqrt()", "1 / ({0}.abs() + 0.5)"),
    *("{0}.clamp(-0.5, 1.0)", "{0}.masked_fill({0} > 0.5, 0.25)", "torch.where({0} > 0, {0}, 0.3 * {0})"),
    *("{0}.detach()", "({0} * 1).mul_(2).add_(0.5)", "{0}.square()", "({0} > 0).to({0}.dtype)", "{0}.clone()"),
    *("{0}.abs().clamp(min=1).pow(-0.5)", "{0}.sign() * 0.5", "F.gelu({0}, approximate='tanh')"),
    "F.elu({0}, alpha=0.5)",
    *("put({0}, {0} > 0.5, 0.25)", "put({0}, slice(1, None), {0}[:-1])", "torch.zeros_like({0}).copy_({0})"),
    *("{0}.double().sin().to({0}.dtype)", "({0}.abs() + 0.5) ** 1.5", "{0}.float().to({0}.dtype)"),
    *("F.softplus({0}, beta=2, threshold=1)", "F.hardtanh({0}, -0.5, 0.25)", "F.celu({0}, alpha=0.5)"),
)
BINARY = (
    *("{0} + {1}", "{0} + {1}", "{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} * {1}", "{0} / ({1}.abs() + 0.5)"),
    *("{0} * {1}.sigmoid()", "{0} + {1}.tanh()", "({0} - {1}).relu()", "torch.maximum({0}, {1})"),
    *("{0}.clone().add_({1})", "torch.atan2({0}, {1})", "torch.where({0} > {1}, {0}, {1} * {1})"),
    *("torch.lerp({0}, {1}, 0.25)", "{0} * ({1} > 0)", "torch.add({0}, {1}, alpha=0.5)"),
    "torch.sub({0}, {1}, alpha=-2)",
    *("{0}.clone().sub_({1}, alpha=0.5)", "torch.rsub({0}, {1}, alpha=0.5)", "torch.addcmul({0}, {0}, {1}, value=0.5)"),
)
ACTIVATED = ("{0}.relu()", "F.silu({0})", "F.silu({0})", "torch.tanh({0})", "F.softplus({0})", "{0}.sigmoid()", "{0}")
FEATURES = (
    *("F.softmax({0}, dim=-1)", "{0}.log_softmax(-1)", "{0}.flip(-1)", "{0}.cumsum(-1)"),
    *("F.normalize({0}, dim=-1)", "F.layer_norm({0}, {0}.shape[-1:])", "{0} / ({0}.norm(dim=-1, keepdim=True) + 0.5)"),
    *("{0}.softmax(-1, dtype=torch.float64).to({0}.dtype)", "{0}.cumsum(-1, dtype=torch.float64).to({0}.dtype)"),
    *("{0} - {0}.var(-1, correction=0, keepdim=True)", "{0}.roll(1, -1)", "{0} - {0}.logsumexp(-1, keepdim=True)"),
    *("{0}.sort(-1).values", "{0}.topk(1, -1).values.expand_as({0})", "torch.cat([{0}[..., 1:], {0}[..., :1]], -1)"),
    *("torch.stack([{0}, {0}.tanh()], -1).amax(-1)", "torch.take_along_dim({0}, {0}.argsort(-1, descending=True), -1)"),
    *("put({0}, (..., 0), {0}[..., -1])", "put({0}, (..., slice(1, None)), 0.5)"),
)
"""Functions over the features of each row that keep the shape."""

ENDS: dict[str, dict[str, tuple[str, str]]] = {
    EDGES: {"src": (NODES, "n"), "dst": (NODES, "n"), "batch[src]": (GRAPHS, "g"), "dst[rev]": (NODES, "n")},
    PAIRS: {"row": (NODES, "n"), "col": (OTHERS, "m"), "batch[row]": (GRAPHS, "g")},
    NODES: {"batch": (GRAPHS, "g")},
}
"""For each space, its index vectors. Each index vector has the space that it points to, and that space's size."""

REDUCTIONS = (
    *("scatter({0}, {i}, 0, {s}, 'sum')",) * 4,
    *("scatter({0}, {i}, 0, {s}, 'mean')",) * 2,
    *("scatter({0}, {i}, 0, {s}, 'max')", "scatter({0}, {i}, 0, {s}, 'min')") * 2,
    "scatter({0}, {i}, 0, {s}, 'mul')",
    "{0}.new_zeros({s}, *{0}.shape[1:]).index_add(0, {i}, {0})",
    "{0}.new_zeros({s}, *{0}.shape[1:]).index_add(0, {i}, {0}, alpha=0.5)",
    "{0}.new_zeros({s}, *{0}.shape[1:]).scatter_reduce(0, {wide}, {0}, 'amax', include_self=False)",
    "{0}.new_zeros({s}, *{0}.shape[1:]).scatter_reduce(0, {wide}, {0}, 'mean', include_self=True)",
    "{0}.new_zeros({s}, *{0}.shape[1:]).scatter_add_(0, {wide}, {0})",
    "{0}.new_zeros({s}, *{0}.shape[1:]).index_put(({i},), {0}, accumulate=True)",
)
FLAT_REDUCTIONS = (
    *("gnn.VarAggregation()", "gnn.StdAggregation()", "gnn.SoftmaxAggregation(learn=True)", "gnn.MeanAggregation()"),
    *("gnn.AttentionalAggregation(nn.Linear({c}, 1))", "gnn.VariancePreservingAggregation()"),
    *("gnn.PowerMeanAggregation()", "gnn.MaxAggregation()", "gnn.SumAggregation()"),
)
READOUTS = ("gnn.global_add_pool", "gnn.global_mean_pool", "gnn.global_max_pool")
NORMS = {
    "nn.BatchNorm1d({c})": "self.{k}({0})",
    "nn.LayerNorm({c})": "self.{k}({0})",
    "gnn.BatchNorm({c})": "self.{k}({0})",
}
NODE_NORMS = {
    "gnn.GraphNorm({c})": "self.{k}({0}, batch)",
    "gnn.InstanceNorm({c}, affine=True)": "self.{k}({0}, batch)",
    "gnn.InstanceNorm({c}, track_running_stats=True)": "self.{k}({0}, batch)",
    "gnn.MeanSubtractionNorm()": "self.{k}({0}, batch)",
    "gnn.LayerNorm({c})": "self.{k}({0}, batch)",
    "gnn.PairNorm()": "self.{k}({0}, batch)",
    "gnn.GraphSizeNorm()": "self.{k}({0}, batch)",
}
CONVS = {
    "gnn.GCNConv({c}, {o})": "self.{k}({0}, edge_index)",
    "gnn.SAGEConv({c}, {o})": "self.{k}({0}, edge_index)",
    "gnn.SAGEConv({c}, {o}, aggr='max')": "self.{k}({0}, edge_index)",
    "gnn.GraphConv({c}, {o})": "self.{k}({0}, edge_index, a.view(-1))",
    "gnn.GATConv({c}, 2, heads=2)": "self.{k}({0}, edge_index)",
    "gnn.GATv2Conv({c}, 2, heads=2, edge_dim=4, add_self_loops=False)": "self.{k}({0}, edge_index, {1})",
    "gnn.TransformerConv({c}, 2, heads=2, edge_dim=4)": "self.{k}({0}, edge_index, {1})",
    "gnn.GINEConv(nn.Linear({c}, {o}), edge_dim=4)": "self.{k}({0}, edge_index, {1})",
    "gnn.ResGatedGraphConv({c}, {o}, edge_dim=4)": "self.{k}({0}, edge_index, {1})",
    "gnn.CGConv({c}, dim=4)": "self.{k}({0}, edge_index, {1})",
    "gnn.EdgeConv(nn.Linear(2 * {c}, {o}))": "self.{k}({0}, edge_index)",
    "gnn.SAGEConv({c}, {o}, aggr=['mean', 'std'])": "self.{k}({0}, edge_index)",
    "gnn.GCN2Conv({c}, 0.1, 0.5, 1, shared_weights=False)": "self.{k}({0}, {0}.tanh(), edge_index)",
}

MATRICES = [
    "({0}.unsqueeze(1) @ {1}.view(-1, {k}, {c})).squeeze(1)",
    "torch.bmm({1}.view(-1, {c}, {k}), {0}.unsqueeze(-1)).squeeze(-1)",
    "torch.einsum('ek,ekc->ec', {0}, {1}.view(-1, {k}, {c}))",
    "({0}.unsqueeze(-1) * {1}.view(-1, {k}, {c})).sum(1)",
]
"""Products of rows of {k} features and matrices of {c} rows or columns."""
