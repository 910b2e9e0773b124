"""Gives every node one self loop, and sorts the edges by destination."""

from collections.abc import Mapping, Sequence

from torch_geometric.data import Data, HeteroData
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.transforms import BaseTransform

from gnncompile.exc import ArgumentError

from .edges import square_stores
from .self_loops import Fill, add_loops, fills, types_repr


@functional_transform("add_sorted_self_loops")
class AddSelfLoops(BaseTransform):
    r"""Gives every node exactly one self loop, with the edges sorted by destination (functional name:
    :obj:`add_sorted_self_loops`).

    .. math::
        \mathcal{E}^{\prime} = \{ (j, i) \in \mathcal{E} : j \neq i \} \cup \{ (i, i) : i \in \mathcal{V} \}

    Layers like :class:`~torch_geometric.nn.GCNConv` and :class:`~torch_geometric.nn.GATConv` do this to the edges in
    every forward. Unlike PyG's transform of the same name, this one never doubles a self loop, extends all edge
    attributes, and sorts the edges by destination, so that a layout (CSR) needs no permutation. The edges of each
    destination keep their order, and its self loop comes last.

    Works on :class:`Data`, :class:`HeteroData` (edge types that join nodes of one type; others are left alone) and
    batches of either, which can still be taken apart. The input object and its tensors are not changed.

    Args:
        fill_value: the edge attributes of new self loops: a number, a tensor :obj:`[*]` that fits a row, or a reduction
            over the attributes of the node's incoming edges (:obj:`"add"`, :obj:`"mean"`, :obj:`"min"`,
            :obj:`"max"`, :obj:`"mul"`). A dictionary gives a value for each attribute; integer attributes need one.
        existing: whether to :obj:`"keep"` the attributes of existing self loops, as
            :class:`~torch_geometric.nn.GCNConv` does, or to :obj:`"replace"` them, as
            :class:`~torch_geometric.nn.GATConv` does.
        edge_types: the edge types of :class:`HeteroData` that get self loops; all by default.

    Raises:
        ValueError: an unknown `existing`; edges held as a matrix (:obj:`adj_t`); unknown `edge_types`; an edge
            attribute that is no tensor, or that `fill_value` gives no value for; or a batch made with
            :obj:`follow_batch`.
    """

    def __init__(
        self,
        fill_value: Fill | Mapping[str, Fill] = 1.0,
        existing: str = "keep",
        edge_types: Sequence[tuple[str, str, str]] | None = None,
    ) -> None:
        if existing not in ("keep", "replace"):
            raise ArgumentError(f"existing: got {existing!r}, expected 'keep' or 'replace'")
        self.fill_value, self.existing, self.edge_types = fill_value, existing, edge_types

    def forward(self, data: Data | HeteroData) -> Data | HeteroData:
        """Returns `data` with one self loop at every node of each edge type among nodes of one type."""
        for store in square_stores(data, self.edge_types):
            add_loops(data, store, fills(store, self.fill_value), self.existing)
        return data

    def __repr__(self) -> str:
        types = types_repr(self.edge_types)
        return f"{type(self).__name__}(fill_value={self.fill_value!r}, existing={self.existing!r}{types})"
