"""Records which rewrites the passes made or skipped on a captured graph, with the user's lines."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

import torch
from torch import fx

from gnncompile import _compat
from gnncompile.layout.batch_metadata import RowLimit


@dataclass(frozen=True)
class RegionRecord:
    """A region that was formed: its program, the user's line, and the shape of its results."""

    spec: str
    line: str
    shape: str


@dataclass(frozen=True)
class Skip:
    """An operation that was not fused, the reason, and the user's line."""

    what: str
    reason: str
    line: str


@dataclass(frozen=True)
class ExchangeRecord:
    """The exchange of the halo rows of one gathered tensor.

    Attributes:
        shape: The shape of one row.
        dtype: The dtype of the rows.
        structural: Whether the rows depend on the graph alone, so that they are exchanged once per graph.
        line: The user's line.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    structural: bool
    line: str

    @property
    def bytes_per_row(self) -> int:
        """The size of one row in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        rows = "x".join(map(str, self.shape)) or "1"
        often = "once per graph" if self.structural else "in each step, and its gradient in the backward"
        return f"rows of {rows} {self.dtype}, {self.bytes_per_row:,} bytes for each halo row, {often} ({self.line})"


@dataclass
class PassLog:
    """The regions, skips and padding of one captured graph after the passes.

    Attributes:
        padded: For each result, a dict from its padded dimensions to their row types; None without padding.
        limits: The numbers of valid rows with which a padded graph may run.
        exchanges: The exchanges of halo rows in the forward, for a graph over one part.
    """

    regions: list[RegionRecord] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)
    hoisted: int = 0
    syncs: list[Skip] = field(default_factory=list)
    padded: list[dict[int, int]] | None = None
    limits: list[RowLimit] = field(default_factory=list)
    exchanges: list[ExchangeRecord] = field(default_factory=list)

    def position(self, spec: str, line: str) -> int:
        """Returns the index in `regions` of the first region with this program and line."""
        return next(i for i, r in enumerate(self.regions) if (r.spec, r.line) == (spec, line))


PADDING = "padding of mini-batches to buckets"


def not_padded(reason: str, line: str = "?") -> _compat.Recapture:
    """Returns what to raise if masks can't correct an operation on a padded mini-batch. The model then runs unpadded.

    Args:
        reason: Why not.
        line: The user's line.
    """
    return _compat.Recapture(_compat.Setting.PADDING, False, reason, PADDING, line)


def written_input() -> _compat.Recapture:
    """Returns what to raise if a graph writes to an edge list whose rows entered as tensors of their own."""
    return _compat.Recapture(_compat.Setting.SPLIT_EDGE_LISTS, False, "the model writes to an edge list")


# PyG writes the code of propagate() to temporary files that are named after the layer.
_WRITTEN_BY_OTHERS = re.compile(r"site-packages|torch_geometric|_(propagate|edge_updater)_\w+\.py")


_OURS = re.compile(r"gnncompile/(capture|substitutes)/")


def user_line(node: fx.Node) -> str:
    """Returns ``file:line: code`` of the user's innermost frame that made a node, else of the PyG layer's."""
    return line_of(node.meta.get("stack_trace") or "")


def line_of(stack: str) -> str:
    """Returns the same as :func:`user_line`, from a stack as Python prints it."""
    trace = stack.strip().splitlines()
    frames = [i for i, text in enumerate(trace) if text.lstrip().startswith('File "')]
    # A frame of gnncompile is named only if no other frame exists and it belongs to the substitute of a layer.
    others = [i for i in frames if not _OURS.search(trace[i])]
    frames = others or [i for i in frames if "gnncompile/substitutes/nn/conv" in trace[i]]
    if not frames:
        return "?"
    users = [i for i in frames if not _WRITTEN_BY_OTHERS.search(trace[i])]
    layers = [i for i in frames if "torch_geometric/nn/conv" in trace[i] and "message_passing.py" not in trace[i]]
    at = (users or layers or frames)[-1]
    path, line = trace[at].split('"')[1], trace[at].split("line ")[1].split(",")[0]
    code = trace[at + 1].strip() if at + 1 < len(trace) else ""
    return f"{'/'.join(path.split('/')[-2:])}:{line}: {code}"
