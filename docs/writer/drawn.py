"""The picture of a model before and after, as a user gets it from `report.draw`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from xml.etree import ElementTree

NAME = "gat.svg"


def gat() -> str:
    """Two layers of attention, drawn as SVG."""
    import torch
    from matplotlib import rc_context
    from torch_geometric.nn.models import GAT

    import gnncompile
    from gnncompile import testing

    torch._dynamo.reset()
    graph = testing.power_law(200, 1000, 60, channels=16)
    model = gnncompile.compile(GAT(16, 16, num_layers=2, out_channels=7, heads=4), options={"inductor": False})
    report = gnncompile.explain(model, graph.x, graph.edge_index)
    with tempfile.TemporaryDirectory() as folder, rc_context({"svg.fonttype": "none", "svg.hashsalt": "gnncompile"}):
        path = Path(folder) / NAME
        report.draw(path)
        return path.read_text(encoding="utf-8")


def texts(svg: str) -> list[str]:
    """All texts of a picture, sorted: which of two neighbours is drawn first differs between processes."""
    root = ElementTree.fromstring(svg)
    return sorted("".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text"))
