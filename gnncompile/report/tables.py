"""The findings of :func:`gnncompile.explain`, as data and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gnncompile.passes.log import Skip
from gnncompile.report.model_graph import ModelGraph
from gnncompile.report.traffic import Work


@dataclass(frozen=True)
class KernelReport:
    """One kernel of a region: its own kernel, or a kernel of its gradient.

    Attributes:
        gradient: Whether the kernel runs in the backward.
        generator: The generator that made it: "triton", "cpp" or "reference".
        program: The program that it computes, as text: that of the region, with the fused epilogue.
        source: The generated code; the reference interpreter has none, so it is the program.
        launches: The number of launches in a call.
        moved: The bytes that one launch moves on the given inputs, counted from the program; None for the reference
            interpreter.
        limit: The bytes that a launch would move if it read the data of each edge only once.
        milliseconds: The median time of all its launches in a call together; None if not measured.
    """

    gradient: bool
    generator: str
    program: str
    source: str
    launches: int
    moved: Work | None
    limit: Work | None
    milliseconds: float | None


@dataclass(frozen=True)
class RegionReport:
    """One fused region.

    Attributes:
        what: Its reductions, feature shape and inputs, in words.
        kernel: The generator that made its kernel: "triton", "cpp" or "reference".
        line: The line of the user's or PyG's code that it came from.
        result: Shape of its result, symbolic counts included.
        program: The region's program as text.
        kernels: The kernels that run in a call: the region's own, and those of its gradient if measured.
        unfused: The bytes that the region's operations would read and write if each ran on its own.
    """

    what: str
    kernel: str
    line: str
    result: str
    program: str
    kernels: tuple[KernelReport, ...] = ()
    unfused: float = 0.0

    @property
    def milliseconds(self) -> float | None:
        """The time of all its kernels in a call; None if not measured."""
        times = [k.milliseconds for k in self.kernels if k.milliseconds is not None]
        return sum(times) if times else None


@dataclass(frozen=True)
class Findings:
    """The fields of a report: see :class:`gnncompile.Report`."""

    regions: tuple[RegionReport, ...]
    skipped: tuple[Skip, ...]
    graph_breaks: int
    recompiles: int
    host_syncs: int
    captured_graphs: int
    structure_nodes: int
    notes: tuple[str, ...]
    model: str = ""
    device: str = "cpu"
    graphs: tuple[ModelGraph, ...] = ()
    forward: float | None = None
    backward: float | None = None
    others: tuple[KernelReport, ...] = ()
    breaks: tuple[Skip, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"captured graphs {self.captured_graphs}, graph breaks {self.graph_breaks}, recompiles {self.recompiles}, "
            f"host syncs in a steady call {self.host_syncs}",
            f"{len(self.regions)} regions; {self.structure_nodes} operations on graph structure run once per graph",
            "",
        ]
        head = ["region", "what", "result", "kernel", "from"]
        rows = [[str(i), r.what, r.result, r.kernel, r.line] for i, r in enumerate(self.regions)]
        if self.forward is not None:
            head.insert(4, "ms")
            for row, region in zip(rows, self.regions, strict=True):
                row.insert(4, "-" if region.milliseconds is None else f"{region.milliseconds:.3f}")
        lines += _table(head, rows)
        if self.skipped:
            lines += ["", *_table(("not fused", "why", "from"), [(s.what, s.reason, s.line) for s in self.skipped])]
        return "\n".join([*lines, *(f"note: {n}" for n in self.notes)])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(r[k]) for r in (head, *rows)) for k in range(len(head))]
    text = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)]
    return [text[0], "  ".join("-" * w for w in widths), *text[1:]]
