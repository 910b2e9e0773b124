"""``GNNCOMPILE_DEBUG_DIR=folder``: what the compiler makes of a model, as files to read.

- ``graph_000/00_captured.py``: the first captured graph in aten operations, then ``01_<pass>.py`` and so on, one file
  for each pass that changes the graph; ``structure.py`` is the structure program.
- ``post_grad_000/``: likewise a graph after differentiation, of a forward or of a backward.
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
    """The folder that the environment names, or None."""
    named = os.environ.get("GNNCOMPILE_DEBUG_DIR", "")
    return Path(named) if named else None


class GraphDump:
    """Writes a graph each time that it has changed.

    Args:
        kind: What the graph's folder is called, beside its number.
        graph: The graph before the first pass.
    """

    def __init__(self, kind: str, graph: fx.Graph) -> None:
        self._graph, self._written, self._last = graph, itertools.count(), ""
        root = folder()
        number = next(_counters.setdefault(kind, itertools.count())) if root is not None else 0
        self._folder = None if root is None else root / f"{kind}_{number:03d}"
        self.after("captured")

    def after(self, step: str) -> None:
        """Writes ``<number>_<step>.py`` if the graph differs from what was written last."""
        if self._folder is None:
            return
        text = _code(self._graph)
        if text != self._last:
            _write(self._folder / f"{next(self._written):02d}_{step}.py", text)
            self._last = text

    def beside(self, name: str, graph: fx.Graph) -> None:
        """Writes another graph into the same folder."""
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
