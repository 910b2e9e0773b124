"""One self loop at every node, with the edges in the order of their destinations."""

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

    This is what layers like :class:`~torch_geometric.nn.GCNConv` and :class:`~torch_geometric.nn.GATConv` do to the
    edges in every forward. Unlike PyG's transform of the same name it doubles no self loop, extends all edge
    attributes, and keeps the order that makes a layout (CSR) free of a permutation: the edges of one destination keep
    their order, its self loop is the last of them.

    Works on :class:`Data`, :class:`HeteroData` (edge types that join nodes of one type; others are left alone) and
    batches of either, which can still be taken apart. The input object and its tensors are not changed.

    Args:
        fill_value: what edge attributes of new self loops are: a number, a tensor :obj:`[*]` that fits a row, or how to
            reduce those of the edges that lead to the node (:obj:`"add"`, :obj:`"mean"`, :obj:`"min"`, :obj:`"max"`,
            :obj:`"mul"`); or a dictionary of these by attribute, which attributes of integers need.
        existing: what becomes of the attributes of self loops that are there: :obj:`"keep"` them as
            :class:`~torch_geometric.nn.GCNConv` does, or :obj:`"replace"` them as :class:`~torch_geometric.nn.GATConv`
            does.
        edge_types: of :class:`HeteroData`, the edge types that get self loops; all by default.

    Raises:
        ValueError: an unknown `existing`; edges held as a matrix (:obj:`adj_t`), unknown `edge_types`, an edge
            attribute that is no tensor or needs a value of its own, or a batch made with :obj:`follow_batch`.
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
