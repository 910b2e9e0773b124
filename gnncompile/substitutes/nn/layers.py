"""Substitutes for layers of PyG and torch that read data or compare sizes, which avoid this if possible.

For anything but the original layer on a plain edge list, the layer's code is traced as written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch_geometric.nn import (
    Aggregation,
    BatchNorm,
    ChebConv,
    ClusterGCNConv,
    JumpingKnowledge,
    LCMAggregation,
    MessagePassing,
    MFConv,
    Set2Set,
    SuperGATConv,
    WLConv,
)
from torch_geometric.utils import add_self_loops, degree, get_laplacian, remove_self_loops, softmax, to_dense_batch

from gnncompile._compat import EDGE_INDEX, break_at, copy_of, identified, kept_with
from gnncompile.ops.opaque import opaque
from gnncompile.substitutes.message_hooks import refuse_hooks
from gnncompile.substitutes.nn.conv.typed_linear import is_plain, typed_linear
from gnncompile.substitutes.registry import substitute
from gnncompile.substitutes.relation_tables import is_edge_list

_OPS: Any = torch.ops.gnncompile

_mf_forward = copy_of(MFConv.forward)
_cheb_norm = copy_of(ChebConv.__norm__)
_cluster_gcn_forward = copy_of(ClusterGCNConv.forward)
_jumping_forward = copy_of(JumpingKnowledge.forward)
_set2set_forward = copy_of(Set2Set.forward)
_check_input = copy_of(MessagePassing._check_input)
_batch_norm_forward = copy_of(BatchNorm.forward)
_lcm_forward = copy_of(LCMAggregation.forward)
_wl_forward = copy_of(WLConv.forward)
_gru_cell = copy_of(nn.GRUCell.forward)


@substitute(SuperGATConv.positive_sampling)
def positive_sampling(self: Any, edge_index: Tensor) -> Tensor:
    """See :meth:`torch_geometric.nn.SuperGATConv.positive_sampling`."""
    live: Tensor = _OPS.live_edges(edge_index)
    p = 1.0 - self.edge_sample_ratio
    return _OPS.dropped_edges(live, p) if self.training and p > 0 else live


@substitute(SuperGATConv.negative_sampling)
def negative_sampling(self: Any, edge_index: Tensor, num_nodes: int, batch: Tensor | None = None) -> Tensor:
    """See :meth:`torch_geometric.nn.SuperGATConv.negative_sampling`."""
    ratio = self.neg_sample_ratio * self.edge_sample_ratio
    live = _OPS.live_edges(edge_index)
    return _OPS.negative_edges(live, num_nodes, ratio, self.is_undirected, batch)  # type: ignore[no-any-return]


@substitute(ChebConv.__norm__)
def cheb_norm(
    self: Any,
    edge_index: Any,
    num_nodes: Any,
    edge_weight: Any,
    normalization: Any,
    lambda_max: Any = None,
    dtype: Any = None,
    batch: Any = None,
) -> Any:
    """See :meth:`torch_geometric.nn.ChebConv.__norm__`."""
    if type(edge_index) is not Tensor or type(self).__norm__ is not ChebConv.__norm__:
        return _cheb_norm(self, edge_index, num_nodes, edge_weight, normalization, lambda_max, dtype, batch)
    index, weight = get_laplacian(edge_index, edge_weight, normalization, dtype, num_nodes)
    # The Laplacian's diagonal comes after all other edges. Removed self loops among these may be only masked.
    diagonal = torch.cat([weight.new_zeros(index.size(1) - num_nodes), weight.new_ones(num_nodes)])
    if lambda_max is None:
        alive = torch.logical_or(diagonal > 0, index[0] != index[1])
        all_in_one = _OPS.mark_dead(torch.zeros_like(index[0]), alive)
        lambda_max = 2.0 * _OPS.segment_reduce(weight, all_in_one, 1, "max")
    elif not isinstance(lambda_max, Tensor):
        lambda_max = torch.tensor(lambda_max, dtype=dtype, device=edge_index.device)
    if batch is not None and lambda_max.numel() > 1:
        lambda_max = lambda_max[batch[index[0]]]
    weight = (2.0 * weight) / lambda_max
    return index, weight.masked_fill(weight == float("inf"), 0) - diagonal


@substitute(MFConv.forward)
def mf_forward(self: Any, x: Any, edge_index: Any, size: Any = None) -> Any:
    """See :meth:`torch_geometric.nn.MFConv.forward`: multiplies every node's row by the weight of its degree.

    The products with all weights are computed, a few degrees at a time, and each node's own is selected. That is
    ``max_degree + 1`` times the arithmetic of one layer. A GPU does this faster than a sync that counts the nodes of
    each degree.
    """
    ends = (x, x) if isinstance(x, Tensor) else x
    plain = type(edge_index) is Tensor and edge_index.layout == torch.strided and ends[0].dim() == 2
    if not plain or type(self).forward is not MFConv.forward:
        return _mf_forward(self, x, edge_index, size)
    x_r = ends[1]
    num_rows = x_r.size(0) if x_r is not None else (size[1] if size is not None else ends[0].size(0))
    index = edge_index[1 if self.flow == "source_to_target" else 0]
    kind = degree(index, num_rows, dtype=torch.long).clamp(max=self.max_degree)
    h = self.propagate(edge_index, x=ends, size=size)
    out = typed_linear(self.lins_l, h, kind)
    return out if x_r is None else out + typed_linear(self.lins_r, x_r, kind)


@substitute(Aggregation.to_dense_batch)
def dense_rows(
    self: Any,
    x: Tensor,
    index: Tensor | None = None,
    ptr: Tensor | None = None,
    dim_size: int | None = None,
    dim: int = -2,
    fill_value: float = 0.0,
    max_num_elements: int | None = None,
) -> Any:
    """See ``torch_geometric.nn.Aggregation.to_dense_batch``; the check for a sorted index runs once per index."""
    self.assert_index_present(index)
    self.assert_two_dimensional_input(x, dim)
    return to_dense_batch(x, _OPS.sorted_index(index), fill_value, max_num_elements, dim_size)


@substitute(nn.GRUCell.forward)
def gru_cell(self: Any, input: Tensor, hx: Tensor | None = None) -> Tensor:
    """See :meth:`torch.nn.GRUCell.forward`; torch's code compares the number of rows with 1, which becomes a guard."""
    if input.dim() != 2 or hx is None:
        return _gru_cell(self, input, hx)  # type: ignore[no-any-return]
    ours = linear(input, self.weight_ih, self.bias_ih).chunk(3, 1)
    theirs = linear(hx, self.weight_hh, self.bias_hh).chunk(3, 1)
    reset, update = torch.sigmoid(ours[0] + theirs[0]), torch.sigmoid(ours[1] + theirs[1])
    new = torch.tanh(ours[2] + reset * theirs[2])
    return new + update * (hx - new)


@substitute(ClusterGCNConv.forward)
def cluster_gcn_forward(self: Any, x: Tensor, edge_index: Any) -> Any:
    """See :meth:`torch_geometric.nn.ClusterGCNConv.forward`; the added self loops are found by their position."""
    if type(edge_index) is not Tensor or not self.add_self_loops or type(self).forward is not ClusterGCNConv.forward:
        return _cluster_gcn_forward(self, x, edge_index)
    nodes = x.size(self.node_dim)
    index, _ = add_self_loops(remove_self_loops(edge_index)[0], num_nodes=nodes)
    inverse = 1.0 / degree(index[1], num_nodes=nodes).clamp(min=1.0)
    weight = inverse.index_select(0, index[1])
    loops = torch.cat([weight.new_zeros(index.size(1) - nodes), weight.new_ones(nodes)])
    out = self.propagate(index, x=x, edge_weight=weight * (1.0 + self.diag_lambda * loops))
    return self.lin_out(out) + self.lin_root(x)


@substitute(Set2Set.forward)
def set2set_forward(
    self: Any,
    x: Tensor,
    index: Tensor | None = None,
    ptr: Tensor | None = None,
    dim_size: int | None = None,
    dim: int = -2,
) -> Any:
    """See :class:`torch_geometric.nn.Set2Set`; every LSTM step is written as arithmetic, which Dynamo can trace."""
    if not _is_plain(self.lstm) or index is None or ptr is not None or x.dim() != 2 or dim not in (-2, 0):
        return _set2set_forward(self, x, index, ptr, dim_size, dim)
    assert dim_size is not None  # Aggregation.__call__ has set it
    states = [(x.new_zeros(dim_size, x.size(1)),) * 2 for _ in range(self.lstm.num_layers)]
    q_star = x.new_zeros(dim_size, self.out_channels)
    for _ in range(self.processing_steps):
        q = q_star
        for layer in range(self.lstm.num_layers):
            states[layer] = _lstm_step(self.lstm, f"_l{layer}", q, states[layer])
            q = states[layer][0]
        attention = softmax((x * q.index_select(0, index)).sum(dim=-1, keepdim=True), index, None, dim_size)
        q_star = torch.cat([q, self.reduce(attention * x, index, ptr, dim_size, dim, reduce="sum")], dim=-1)
    return q_star


@substitute(JumpingKnowledge.forward)
def jumping_forward(self: Any, xs: list[Tensor]) -> Any:
    """See :class:`torch_geometric.nn.JumpingKnowledge`; every LSTM step is written as arithmetic."""
    if self.mode != "lstm":
        return _jumping_forward(self, xs)
    both = []
    for suffix, order in (("", xs), ("_reverse", xs[::-1])):
        state = (xs[0].new_zeros(xs[0].size(0), self.lstm.hidden_size),) * 2
        found = []
        for x in order:
            state = _lstm_step(self.lstm, f"_l0{suffix}", x, state)
            found.append(state[0])
        both.append(found[::-1] if suffix else found)
    scores = [self.att(torch.cat([ahead, back], dim=-1)) for ahead, back in zip(*both, strict=True)]
    weights = torch.softmax(torch.cat(scores, dim=-1), dim=-1)
    return (torch.stack(xs, dim=1) * weights.unsqueeze(-1)).sum(dim=1)


@substitute(nn.GRU.forward, nn.LSTM.forward, nn.RNN.forward)
def recurrent_forward(self: Any, input: Any, hx: Any = None) -> Any:
    """See :class:`torch.nn.LSTM`, :class:`torch.nn.GRU` and :class:`torch.nn.RNN`.

    Traced, a layer would be unrolled over time, and recompiled for every length. So it runs as one op. With dropout or
    autocast, or on packed or unbatched sequences, it breaks the graph.
    """
    dropped = self.training and self.dropout > 0
    if not isinstance(input, Tensor) or input.dim() != 3 or dropped or torch.is_autocast_enabled(input.device.type):
        return uncaptured()
    lstm, ways = isinstance(self, nn.LSTM), 2 if self.bidirectional else 1
    if hx is None:
        rows, count = input.size(0 if self.batch_first else 1), self.num_layers * ways
        first = input.new_zeros(count, rows, self.proj_size or self.hidden_size)
        hx = (first, input.new_zeros(count, rows, self.hidden_size)) if lstm else first
    weights = [weight for layer in self.all_weights for weight in layer]
    found = opaque(
        "recurrent",
        [input, *(hx if lstm else [hx]), *weights],
        mode=self.mode,
        layers=self.num_layers,
        biases=self.bias,
        both_ways=self.bidirectional,
        batch_first=self.batch_first,
    )
    return found[0], (found[1], found[2]) if lstm else found[1]


@substitute(BatchNorm.forward)
def batch_norm_forward(self: Any, x: Tensor) -> Any:
    """See :class:`torch_geometric.nn.BatchNorm`; a single row uses the running statistics, chosen without a guard."""
    norm = self.module
    if self.allow_single_element and not norm.training and norm.running_mean is not None:
        return norm(x)
    by_hand = self.allow_single_element and is_plain(norm, nn.BatchNorm1d) and norm.momentum is not None
    if not by_hand or norm.running_mean is None or x.dim() != 2 or x.dtype != norm.running_mean.dtype:
        return _batch_norm_forward(self, x)
    rows = torch.ones((), dtype=torch.float32, device=x.device) * x.size(0)
    many = rows > 1
    mean = x.mean(0)
    var = (x - mean).square().mean(0)
    with torch.no_grad():
        unbiased = (rows / (rows - 1).clamp(min=1)).to(x.dtype) * var
        for running, new in ((norm.running_mean, mean), (norm.running_var, unbiased)):
            running.copy_(torch.where(many, running.lerp(new, norm.momentum), running))
        norm.num_batches_tracked.add_(many)
    mean, var = torch.where(many, mean, norm.running_mean), torch.where(many, var, norm.running_var)
    out = (x - mean) * torch.rsqrt(var + norm.eps)
    return out * norm.weight + norm.bias if norm.affine else out


@substitute(LCMAggregation.forward)
def lcm_forward(
    self: Any,
    x: Tensor,
    index: Tensor | None = None,
    ptr: Tensor | None = None,
    dim_size: int | None = None,
    dim: int = -2,
    max_num_elements: int | None = None,
) -> Any:
    """See :class:`torch_geometric.nn.LCMAggregation`; its tree runs as one op, whose depth the longest segment sets."""
    cell = self.gru_cell
    if type(cell) is not nn.GRUCell or torch.is_autocast_enabled(x.device.type):
        return _lcm_forward(self, x, index, ptr, dim_size, dim, max_num_elements)
    x = self.lin(x).relu() if self.project else x
    dense, _ = self.to_dense_batch(x, index, ptr, dim_size, dim, max_num_elements=max_num_elements)
    weights = [cell.weight_ih, cell.weight_hh, *([cell.bias_ih, cell.bias_hh] if cell.bias else [])]
    return opaque("paired", [dense.permute(1, 0, 2).contiguous(), *weights])[0]


def uncaptured(*args: Any, **kwargs: Any) -> None:
    """Breaks the graph, so that the calling layer runs uncompiled."""
    torch._dynamo.graph_break()


@substitute(WLConv.forward)
def wl_forward(self: Any, x: Tensor, edge_index: Any) -> Any:
    """See :class:`torch_geometric.nn.WLConv`, which runs as one op: it hashes in Python and fills the layer's table."""
    if not is_edge_list(edge_index) or type(self).forward is not WLConv.forward:
        return _wl_forward(self, x, edge_index)
    break_at(self, "hashmap", _TABLE)
    return _OPS.refined_colors(x.detach(), edge_index, identified(self))


_TABLE = "the model reads the table of a WLConv, which the layer fills"


@substitute(WLConv.histogram)
def wl_histogram(*args: Any, **kwargs: Any) -> None:
    """Breaks the graph where the model reads the table of a :class:`torch_geometric.nn.WLConv`.

    The layer fills its table when it runs.
    """
    torch._dynamo.graph_break(msg=_TABLE)


def _is_plain(lstm: nn.LSTM) -> bool:
    return not (lstm.bidirectional or lstm.batch_first or lstm.dropout or lstm.proj_size)


def _lstm_step(lstm: nn.LSTM, which: str, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Hidden and cell state after one step of one layer (the formula of :class:`torch.nn.LSTM`)."""
    biases = (getattr(lstm, f"bias_ih{which}"), getattr(lstm, f"bias_hh{which}")) if lstm.bias else (None, None)
    gates = linear(x, getattr(lstm, f"weight_ih{which}"), biases[0])
    gates = gates + linear(state[0], getattr(lstm, f"weight_hh{which}"), biases[1])
    into, forget, new, out = gates.chunk(4, 1)
    cell = torch.sigmoid(forget) * state[1] + torch.sigmoid(into) * torch.tanh(new)
    return torch.sigmoid(out) * torch.tanh(cell), cell


@substitute(MessagePassing._check_input)
def check_input(self: Any, edge_index: Any, size: Any) -> Any:
    """See ``torch_geometric.nn.MessagePassing._check_input``; for an ``EdgeIndex``, its own sizes are returned.

    Every message-passing layer calls this, so layers with hooks are refused here.
    """
    refuse_hooks(self)
    tables = kept_with(edge_index, EDGE_INDEX)
    if tables is None:
        return _check_input(self, edge_index, size)
    return [None if table is None else table.size(0) for table in tables]
