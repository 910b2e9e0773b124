"""Data transforms that prepare graphs for fast message passing, installed as `gnncompile.transforms`.

They are ordinary PyG transforms (`BaseTransform`): compose them with PyG's own, or pass them to a dataset as
`transform` or `pre_transform`. None is needed for correctness: a compiled model gives the same numbers without them.
`prepare` finds the transforms that do a model's own work on the edges, and changes the model to rely on them.
"""

from .add_self_loops import AddSelfLoops
from .attach_sizes import AttachSizes
from .cheb_norm import ChebNorm
from .gcn_norm import GCNNorm
from .node_order import restore_order
from .pad_to_bucket import PadToBucket
from .prepare import Prepared, PrepareReport, prepare
from .remove_isolated import RemoveIsolated
from .reorder import Reorder
from .sort_by_destination import SortByDestination

__all__ = [
    "AddSelfLoops",
    "AttachSizes",
    "ChebNorm",
    "GCNNorm",
    "PadToBucket",
    "PrepareReport",
    "Prepared",
    "RemoveIsolated",
    "Reorder",
    "SortByDestination",
    "prepare",
    "restore_order",
]
