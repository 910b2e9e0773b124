"""What the passes did to a captured graph and what they left alone, with the user's lines."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from torch import fx

from gnncompile import _compat


@dataclass(frozen=True)
class RegionRecord:
    """A region that was formed: its program, the user's line, and how many gradient tensors it serves."""

    spec: str
    line: str
    shape: str


@dataclass(frozen=True)
class Skip:
    """Something that was not fused, why, and the user's line."""

    what: str
    reason: str
    line: str


@dataclass
class PassLog:
    """What the passes did to one captured graph.

    Attributes:
        padded: For each result, which of its dimensions are padded, and of which kind they are; None without padding.
        least: How many things of a kind there must be at least; None for as many as any number among the arguments.
    """

    regions: list[RegionRecord] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)
    hoisted: int = 0
    syncs: list[Skip] = field(default_factory=list)
    padded: list[dict[int, int]] | None = None
    least: list[tuple[int, int | None]] = field(default_factory=list)

    def position(self, spec: str, line: str) -> int:
        """Where among the regions the first one with this program and line is."""
        return next(i for i, r in enumerate(self.regions) if (r.spec, r.line) == (spec, line))


class Masked(_compat.Recapture):
    """A masked edge tensor reached something that would count dead edges; capture again without masks."""

    def __init__(self, what: str, line: str) -> None:
        super().__init__(what)
        self.skip = Skip(what, "reads edges whose removed self loops are only masked; captured with exact sizes", line)


class Nested(_compat.Recapture):
    """A graph that is not ours to take apart holds what only our passes understand; capture again as PyG wrote it."""

    def __init__(self, skip: Skip) -> None:
        super().__init__(skip.reason)
        self.skip = skip


PADDING = "padding of mini-batches to buckets"


class NotPadded(_compat.Recapture):
    """The graph does something with a padded mini-batch that can't be undone; run it with true sizes."""

    def __init__(self, what: str, line: str) -> None:
        super().__init__(what)
        self.skip = Skip(PADDING, what, line)


class WrittenInput(_compat.Recapture):
    """The graph writes to an edge list that the caller took apart; capture again with the list itself."""


# PyG writes the code of propagate() to temporary files, named after the layer.
_WRITTEN_BY_OTHERS = re.compile(r"site-packages|torch_geometric|_(propagate|edge_updater)_\w+\.py")


_OURS = re.compile(r"gnncompile/(capture|substitutes)/")


def user_line(node: fx.Node) -> str:
    """``file:line: code`` of the innermost frame of the user's code, else of the PyG layer, that made a node."""
    return line_of(node.meta.get("stack_trace") or "")


def line_of(stack: str) -> str:
    """Likewise of a stack as Python prints it."""
    trace = stack.strip().splitlines()
    frames = [i for i, text in enumerate(trace) if text.lstrip().startswith('File "')]
    # Of our own code only what stands for a whole layer has a line worth naming, and only where nothing else has.
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
