"""A program of the fuzzer: values, lines of Python, and the source of a module that runs the lines.

Both eager and compiled models run this source. So the printed source of a finding is the code that failed.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch_geometric.utils import add_self_loops, degree, scatter, softmax

NODES, OTHERS, EDGES, PAIRS, GRAPHS = "node", "other", "edge", "pair", "graph"
"""The spaces. A value has a row per node, node of the second kind, edge, edge between both kinds, or graph."""

CHANNELS = 4
TYPES = 3

FLOATS: dict[str, tuple[str, tuple[int, ...]]] = {
    "x": (NODES, (CHANNELS,)),
    "y": (NODES, (CHANNELS,)),
    "z": (OTHERS, (CHANNELS,)),
    "w": (EDGES, (CHANNELS,)),
    "a": (EDGES, (1,)),
    "q": (PAIRS, (CHANNELS,)),
    "u": (GRAPHS, (CHANNELS,)),
}
"""Float inputs by name: the space of their rows, and the shape of their features."""

INTEGERS = ("atom", "bond", "edge_index", "pairs", "rev", "batch")
INPUTS = (*FLOATS, *INTEGERS)

DERIVED = {
    "src": "src, dst = edge_index",
    "dst": "src, dst = edge_index",
    "row": "row, col = pairs",
    "col": "row, col = pairs",
    "n": "n = x.size(0)",
    "m": "m = z.size(0)",
    "g": "g = u.size(0)",
}
"""Names that ``forward`` defines in its first lines if another line reads them."""

HEADER = """\
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import nn
from torch_geometric.utils import degree, scatter, softmax
from tests.fuzz.program import looped, put
"""


def put(x: Tensor, at: Any, value: Any) -> Tensor:
    """Returns a copy of a tensor, with `value` assigned to some elements."""
    x = x.clone()
    x[at] = value
    return x


def looped(values: Tensor, edge_index: Tensor, nodes: int, fill: Any) -> Tensor:
    """Sums values of edges over the edges that enter each node, after self loops have been added."""
    edge_index, values = add_self_loops(edge_index, values, fill, nodes)
    return scatter(values, edge_index[1], 0, nodes, "sum")


NAMES: dict[str, Any] = {"torch": torch, "F": F, "gnn": gnn, "nn": nn, "scatter": scatter, "softmax": softmax}
NAMES |= {"put": put, "looped": looped, "degree": degree}
_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Value:
    """A value: its name, the space of its rows, and the shape of its features."""

    name: str
    space: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Line:
    """A line ``name = text`` of ``forward``; `setup` lists the modules that it calls, as ``(name, constructor)``."""

    name: str
    text: str
    setup: tuple[tuple[str, str], ...] = ()

    @property
    def reads(self) -> set[str]:
        return set(_NAME.findall(self.text))


@dataclass(frozen=True)
class Program:
    """The lines of ``forward`` in order, and the names of the results."""

    lines: tuple[Line, ...]
    results: tuple[str, ...]

    def pruned(self) -> Program:
        """Returns the program without lines that no result needs."""
        needed, kept = set(self.results), []
        for line in reversed(self.lines):
            if line.name in needed:
                needed |= line.reads
                kept.append(line)
        return Program(tuple(reversed(kept)), self.results)

    @property
    def inputs(self) -> list[str]:
        """The names of the model's inputs, in order."""
        read = self._read()
        for name in [d for d in DERIVED if d in read]:
            read |= set(_NAME.findall(DERIVED[name]))
        return [name for name in INPUTS if name in read]

    def _read(self) -> set[str]:
        read = set(self.results)
        for line in self.lines:
            read |= line.reads
        return read

    @property
    def source(self) -> str:
        """The Python source of the module."""
        read = self._read()
        setup = [f"self.{name} = {made}" for line in self.lines for name, made in line.setup]
        body = list(dict.fromkeys(DERIVED[name] for name in DERIVED if name in read))
        body += [f"{line.name} = {line.text}" for line in self.lines]
        body.append(f"return {', '.join(self.results)}")
        lines = ["class Net(nn.Module):"]
        if setup:
            lines += ["    def __init__(self):", *_indented(["super().__init__()", *setup]), ""]
        lines += [f"    def forward(self, {', '.join(self.inputs)}):", *_indented(body)]
        return "\n".join(lines) + "\n"


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"        {line}" for line in lines]


def load(source: str) -> type[nn.Module]:
    """Executes a source and returns its class ``Net``."""
    filename = f"<program {abs(hash(source)):x}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    names = dict(NAMES)
    exec(compile(source, filename, "exec"), names)
    found: type[nn.Module] = names["Net"]
    return found
