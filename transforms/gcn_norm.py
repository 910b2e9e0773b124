"""Stores GCN's normalisation as weights of edges sorted by destination."""

from collections.abc import Mapping, Sequence

from torch_geometric.data import Data, HeteroData
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.transforms import BaseTransform

from gnncompile.exc import ArgumentError

from .edges import number_of_nodes, plain, square_stores
from .self_loops import Fill, add_loops, fills, types_repr, weights
from .slices import edges_per_graph, is_batch, set_slices


@functional_transform("sorted_gcn_norm")
class GCNNorm(BaseTransform):
    r"""Adds self loops and replaces :obj:`edge_weight` by GCN's normalised weights of `"Semi-supervised Classification
    with Graph Convolutional Networks" <https://arxiv.org/abs/1609.02907>`_ (functional name: :obj:`sorted_gcn_norm`).

    .. math::
        \hat{e}_{j,i} = \frac{e_{j,i}}{\sqrt{\hat{d}_j \hat{d}_i}}, \qquad \hat{d}_i = \sum_j e_{j,i}

    over the edges and their self loops. If :obj:`edge_weight`, :obj:`[num_edges]`, is absent, all weights are 1. A
    layer with :obj:`normalize=False` then gives the results that it would otherwise get by normalising in every
    forward. If self loops are added, the edges are sorted by destination (see :class:`AddSelfLoops`); otherwise they
    keep their order.

    Works on :class:`Data`, :class:`HeteroData` (edge types that join nodes of one type) and batches of either, which
    can still be taken apart. The input object and its tensors are not changed.

    Args:
        add_self_loops: whether nodes without a self loop get one.
        improved: whether new self loops have weight 2 instead of 1; as in the layer, only if there is an
            :obj:`edge_weight`.
        flow: the direction of messages; :obj:`"source_to_target"` computes degrees over the edges of each destination.
        fill_value: the other edge attributes of new self loops, as for :class:`AddSelfLoops`.
        edge_types: the edge types of :class:`HeteroData` to normalise; all by default.

    Raises:
        ValueError: an unknown `flow`; otherwise as for :class:`AddSelfLoops`.
    """

    def __init__(
        self,
        add_self_loops: bool = True,
        improved: bool = False,
        flow: str = "source_to_target",
        fill_value: Fill | Mapping[str, Fill] = 1.0,
        edge_types: Sequence[tuple[str, str, str]] | None = None,
    ) -> None:
        if flow not in ("source_to_target", "target_to_source"):
            raise ArgumentError(f"flow: got {flow!r}, expected 'source_to_target' or 'target_to_source'")
        self.add_self_loops, self.improved, self.flow = add_self_loops, improved, flow
        self.fill_value, self.edge_types = fill_value, edge_types

    def forward(self, data: Data | HeteroData) -> Data | HeteroData:
        """Returns `data` with a normalised `edge_weight` for each edge type that joins nodes of one type."""
        for store in square_stores(data, self.edge_types):
            fill = fills(store, self.fill_value) if self.add_self_loops else {}
            loop = 2.0 if self.improved and "edge_weight" in store else 1.0
            store.edge_weight = weights(data, store)
            if self.add_self_loops:
                add_loops(data, store, {**fill, "edge_weight": loop}, "keep")
            edges, num_nodes = plain(store.edge_index), number_of_nodes(store)
            normalised = gcn_norm(edges, store.edge_weight, num_nodes, add_self_loops=False, flow=self.flow)
            store.edge_weight = normalised[1]
            if is_batch(data):
                set_slices(data, store, ["edge_weight"], edges_per_graph(data, store, edges))
        return data

    def __repr__(self) -> str:
        given = f"add_self_loops={self.add_self_loops}, improved={self.improved}, flow={self.flow!r}"
        return f"{type(self).__name__}({given}, fill_value={self.fill_value!r}{types_repr(self.edge_types)})"
