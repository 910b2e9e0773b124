"""``GNNCOMPILE_DEBUG_DIR=folder`` makes the compiler write its graphs and kernels to files in a folder.

- ``graph_000/00_captured.py``: the first captured graph in aten operations, then ``01_<pass>.py`` and so on, one file
  for each pass that changes the graph; ``structure.py`` is the structure program.
- ``post_grad_000/``: likewise a graph after differentiation, of a forward or of a backward.
- ``joint_000/``: likewise the graph of a forward and its backward, for a model over parts of a graph.
- ``regions/<hash>.<device>.txt``: the program of a region, and the source of its kernel.

Graphs are counted in each process. Files of earlier processes are overwritten.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path

from torch import fx

_counters: dict[str, itertools.count[int]] = {}


def folder() -> Path | None:
    """Returns the folder that ``GNNCOMPILE_DEBUG_DIR`` names, or None."""
    named = os.environ.get("GNNCOMPILE_DEBUG_DIR", "")
    return Path(named) if named else None


class GraphDump:
    """Writes a graph to a file each time the graph has changed.

    Args:
        kind: The name of the graph's folder, without its index.
        graph: The graph before the first pass.
    """

    def __init__(self, kind: str, graph: fx.Graph) -> None:
        self._graph, self._written, self._last = graph, itertools.count(), ""
        root = folder()
        number = next(_counters.setdefault(kind, itertools.count())) if root is not None else 0
        self._folder = None if root is None else root / f"{kind}_{number:03d}"
        self.after("captured")

    def after(self, step: str) -> None:
        """Writes ``<index>_<step>.py`` if the graph differs from the graph that was written last."""
        if self._folder is None:
            return
        text = _code(self._graph)
        if text != self._last:
            _write(self._folder / f"{next(self._written):02d}_{step}.py", text)
            self._last = text

    def beside(self, name: str, graph: fx.Graph) -> None:
        """Writes another graph to the same folder."""
        if self._folder is not None:
            _write(self._folder / f"{name}.py", _code(graph))


def dump_region(spec: str, device: str, text: Callable[[], str]) -> None:
    """Writes the program of a region and the source of its kernel."""
    root = folder()
    if root is not None:
        name = hashlib.sha256(spec.encode()).hexdigest()[:12]
        _write(root / "regions" / f"{name}.{device}.txt", text())


def _code(graph: fx.Graph) -> str:
    return graph.python_code("self").src.strip() + "\n"


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
