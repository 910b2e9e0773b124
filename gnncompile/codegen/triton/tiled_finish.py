"""Writes the kernel that finishes the rows of a walk in tiles (see :mod:`gnncompile.codegen.triton.tiled_writer`).

The first programs each take the row at the start of the share of a program of the walk. If the row began earlier and
ends in the share, they join the partial results of all programs that met the row, in their order. The other programs
write the result of rows without edges, which is 0.
"""

from __future__ import annotations

from gnncompile.codegen.triton.text import masked
from gnncompile.codegen.triton.tiled_plan import TiledPlan, padded
from gnncompile.codegen.triton.tiled_writer import head, start_of

KERNEL = "finish_rows"
"""Name of the kernel in the generated module."""

NUMBERS = ("num_rows", "share", "programs")
"""The integer arguments: the number of rows, the edges and the number of the walk's programs."""


class FinishWriter:
    """Writes the kernel.

    Args:
        plan: The parts of the region.
        rows: Rows that a program checks for edges.
        step: Partial results that a program reads at a time.
    """

    def __init__(self, plan: TiledPlan, rows: int, step: int) -> None:
        self.plan, self.nodes, self.rows, self.step = plan, plan.region.nodes, rows, step
        self.compute = f"tl.{plan.region.compute}"
        self.parameters = ["rowptr", "rows", "partial", *(s.name for s in plan.stored)]

    def module(self) -> str:
        """Returns the text of the module."""
        numbers = ", ".join(f'"{name}"' for name in NUMBERS)
        lines = [f"@triton.jit(do_not_specialize=[{numbers}])"]
        lines += [f"def {KERNEL}({', '.join((*self.parameters, *NUMBERS))}):"]
        lines += ["    program = tl.program_id(0)"]
        for length in sorted({self.nodes[i].shape[1] for i in self.plan.results}):
            lines += [f"    c{length} = tl.arange(0, {padded(length)})[None, :]"]
            lines += [f"    c{length}_in = c{length} < {length}"]
        lines += ["    if program < programs:", *(f"        {line}" for line in self._join())]
        lines += ["    else:", *(f"        {line}" for line in self._clear())]
        return "\n".join([*head("The rows that a walk in tiles leaves."), *lines]) + "\n"

    def _clear(self) -> list[str]:
        lines = [
            f"row = (program - programs) * {self.rows} + tl.arange(0, {self.rows})",
            "begin = tl.load(rowptr + row, mask=row < num_rows, other=0)",
            "end = tl.load(rowptr + row + 1, mask=row < num_rows, other=0)",
            "empty = ((row < num_rows) & (begin == end))[:, None]",
            "at = row.to(tl.int64)[:, None]",
        ]
        for one in self.plan.stored:
            length = self.nodes[one.node].shape[1]
            zero = f"tl.zeros([{self.rows}, {padded(length)}], tl.{one.dtype})"
            mask = masked(["empty", f"c{length}_in"])
            lines.append(f"tl.store({one.name} + at * {length} + c{length}, {zero}{mask})")
        return lines

    def _join(self) -> list[str]:
        lines = [
            "total = tl.load(rowptr + num_rows)",
            "first = program * share",
            "last = tl.minimum(first + share, total)",
            "cut = (first > 0) & (first < total)",
            "one = tl.load(rows + first, mask=cut, other=-1)",
            "before = tl.load(rows + first - 1, mask=cut, other=-2)",
            "after = tl.load(rows + last, mask=cut & (last < total), other=-2)",
            "if (one == before) & (one != after):",
            "    opening = tl.load(rowptr + one) // share",
            "    at_one = one.to(tl.int64)",
        ]
        return lines + [f"    {line}" for line in self._join_row()]

    def _join_row(self) -> list[str]:
        offsets, size = self.plan.offsets
        lines, stores = [], []
        for i in self.plan.results:
            shape = f"[{self.step}, {padded(self.nodes[i].shape[1])}]"
            lines.append(f"acc{i} = tl.full({shape}, {start_of(self.nodes[i].op)}, {self.compute})")
        lines.append(f"for begun in range(opening, program + 1, {self.step}):")
        lines.append(f"    part = begun + tl.arange(0, {self.step})[:, None]")
        lines.append("    slot = (part * 2 + tl.where(part == opening, 1, 0)).to(tl.int64)")
        for i in self.plan.results:
            length = self.nodes[i].shape[1]
            other = start_of(self.nodes[i].op)
            at = f"partial + slot * {size} + {offsets[i]} + c{length}"
            lines.append(f"    new{i} = tl.load({at}{masked(['(part <= program)', f'c{length}_in'], other)})")
        for i in self.plan.results:
            lines += [f"    {line}" for line in self._combine(i)]
        for i in self.plan.results:
            stores += self._finish(i)
        return lines + stores

    def _combine(self, i: int) -> list[str]:
        """Returns the statements that add a step's partial results. The ties of an extremum come before it."""
        op = self.nodes[i].op
        if op == "reduce_sum":
            return [f"acc{i} += new{i}"]
        if op == "ties":
            return []
        lines = [f"top{i} = larger(acc{i}, new{i})"]
        for t in self._ties(i):
            lines.append(f"acc{t} = ties_of_both(top{i}, acc{i}, acc{t}, new{i}, new{t})")
        return [*lines, f"acc{i} = top{i}"]

    def _ties(self, i: int) -> list[int]:
        return [t for t in self.plan.results if self.nodes[t].op == "ties" and self.nodes[t].args[0] == i]

    def _finish(self, i: int) -> list[str]:
        op = self.nodes[i].op
        if op == "ties":
            return []
        if op == "reduce_sum":
            return [f"all{i} = tl.sum(acc{i}, 0, keep_dims=True)", *self._store(i, f"all{i}")]
        lines = [f"all{i} = largest(acc{i})"]
        for t in self._ties(i):
            lines.append(f"all{t} = tl.sum(tl.where(acc{i} == all{i}, acc{t}, 0.0), 0, keep_dims=True)")
            lines += self._store(t, f"all{t}")
        return lines + self._store(i, f"{'-' if op == 'reduce_min' else ''}all{i}")

    def _store(self, i: int, value: str) -> list[str]:
        length = self.nodes[i].shape[1]
        return [
            f"tl.store({s.name} + at_one * {length} + c{length}, ({value}).to(tl.{s.dtype}){masked([f'c{length}_in'])})"
            for s in self.plan.stored
            if s.node == i
        ]
