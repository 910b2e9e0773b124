"""Figures of how things work. What they show is computed by the code that they explain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from docs.writer.svg import Canvas

CELL = 34


def layout(root: Path) -> str:
    """A list of edges, one of them a self loop that was removed, and the layout that kernels walk."""
    from gnncompile.layout.csr import csr

    row, col = torch.tensor([[2, 0, 1, 3, 0, 3, 1], [0, 2, 1, 0, 1, 2, 0]])
    rowptr, source, edge = csr(col, row, 4, 4, row != col)
    canvas = Canvas("Seven edges by destination; the self loop 1 to 1 is masked, not removed", 640, 330)

    def cells(y: float, name: str, values: Sequence[int], kinds: Sequence[str]) -> None:
        canvas.text(10, y + 22, name)
        for k, (value, kind) in enumerate(zip(values, kinds, strict=True)):
            canvas.box(190 + k * CELL, y, CELL - 3, CELL - 3, kind)
            canvas.text(190 + k * CELL + (CELL - 3) / 2, y + 21, str(value), "number")

    of = [f"row{c}" if r != c else "dead" for r, c in zip(row.tolist(), col.tolist(), strict=True)]
    cells(44, "source of each edge", row.tolist(), of)
    cells(44 + CELL, "destination", col.tolist(), of)
    canvas.text(10, 136, "csr(destination, source, alive):", "small")
    starts = rowptr.tolist()
    cells(150, "rowptr", starts, ["cell"] * len(starts))
    ordered = [of[k] for k in edge.tolist()]
    cells(150 + CELL + 8, "col: sources, in order", source.tolist(), ordered)
    cells(150 + 2 * CELL + 8, "edge: its place in the list", edge.tolist(), ordered)
    y = 150 + 3 * CELL + 16
    for k in range(len(starts) - 1):
        x, to = (190 + at * CELL for at in starts[k : k + 2])
        if to > x:
            canvas.line(x, y, to - 3, y)
            canvas.text((x + to) / 2 - 3, y + 17, f"row {k}", "number")
    canvas.text(190 + starts[-1] * CELL - 2, y + 36, "behind the last row: no kernel looks there", "small")
    canvas.text(
        10, y + 60, "Row 3 has no edges: it begins where it ends. No size depends on which edges are masked.", "small"
    )
    return str(canvas)


def hop_prefixes(root: Path) -> str:
    """Rows that the layers of a sampled mini-batch work out, all of them and those that something reads."""
    from gnncompile import testing
    from gnncompile.batches.hops import hop_prefixes as found_in

    graph = testing.power_law(4000, 40000, 400, channels=None)
    nodes, edges = _sampled(graph.edge_index, torch.arange(64), fan_outs=(10, 10, 5))
    found = found_in(edges, 64, nodes)
    rows = [(one.nodes, one.edges) for one in reversed(found)]
    canvas = Canvas("Three layers over 64 seeds and their sampled neighbours", 700, 70 + 56 * len(rows) + 26)
    canvas.box(10, 36, 12, 12, "fill0")
    canvas.text(28, 47, "as the model is written")
    canvas.box(200, 36, 12, 12, "fill1")
    canvas.text(218, 47, "rows that something reads")
    for k, (some_nodes, some_edges) in enumerate(rows):
        y, longest = 66 + 56 * k, edges.size(1)
        canvas.text(10, y + 24, f"layer {k + 1}")
        parts = (("fill0", nodes, longest), ("fill1", some_nodes, some_edges))
        for at, (kind, of_nodes, of_edges) in enumerate(parts):
            width = max(of_edges / longest * 360, 1.0)
            canvas.box(80, y + at * 20, width, 16, kind)
            canvas.text(88 + width, y + at * 20 + 13, f"{of_edges:,} edges, {of_nodes:,} rows", "small")
    canvas.text(10, 66 + 56 * len(rows) + 14, "Their gradients are smaller in the same way.", "small")
    return str(canvas)


def _sampled(edge_index: Tensor, seeds: Tensor, fan_outs: Sequence[int]) -> tuple[int, Tensor]:
    """How many nodes a sampler finds, and the edges between them, sorted by destination, as loaders have them."""
    generator, chosen = torch.Generator().manual_seed(0), []
    nodes = frontier = seeds
    for fan_out in fan_outs:
        into = []
        for node in frontier.tolist():
            all_into = (edge_index[1] == node).nonzero().flatten()
            into.append(all_into[torch.randperm(all_into.numel(), generator=generator)][:fan_out])
        chosen.append(torch.cat(into))
        new = edge_index[0, chosen[-1]].unique()
        frontier = new[~torch.isin(new, nodes)]
        nodes = torch.cat([nodes, frontier])
    place = torch.full((int(edge_index.max()) + 1,), -1)
    place[nodes] = torch.arange(nodes.numel())
    edges = place[edge_index[:, torch.cat(chosen)]]
    return nodes.numel(), edges[:, edges[1].argsort(stable=True)]


def buckets(root: Path) -> str:
    """Mini-batches of molecules, and the sizes that they are padded to."""
    from torch_geometric.loader import DataLoader

    import gnncompile
    from gnncompile import testing
    from gnncompile.layout.batch_metadata import attached

    molecules = testing.molecules(1200, max_atoms=30, channels=4)
    sizes = [32, 32, 48, 32, 20, 32, 48, 32, 24, 32, 48, 20, 32, 32, 48, 24, 32, 20, 48, 32]
    groups, at = [], 0
    for size in sizes:
        groups.append(list(range(at, at + size)))
        at += size
    loader = gnncompile.loader(DataLoader(molecules, batch_sampler=groups), buckets=True)
    found = []
    for batch in loader:
        what = attached(batch.edge_index)
        assert what is not None and what.batch is not None
        kind = what.batch.kinds.index("edges")
        found.append((batch.num_edges, what.batch.sizes[kind]))
    most, width = max(size for _, size in found), 26
    canvas = Canvas("Edges of mini-batches of 20 to 48 molecules, and of their buckets", 120 + width * len(found), 300)
    for k, (edges, size) in enumerate(found):
        x = 30 + k * width
        high, low = size / most * 200, edges / most * 200
        canvas.box(x, 250 - high, width - 6, high, "dead")
        canvas.box(x, 250 - low, width - 6, low, "fill1")
    for size in sorted({size for _, size in found}):
        canvas.text(36 + width * len(found), 254 - size / most * 200, f"{size:,}", "small")
    canvas.text(
        30, 276, "filled: the mini-batch;  dashed: the size of its bucket, for which a step is recorded once", "small"
    )
    return str(canvas)


FIGURES: dict[str, Callable[[Path], str]] = {"layout.svg": layout, "fronts.svg": hop_prefixes, "buckets.svg": buckets}
"""Files of docs/figures."""
