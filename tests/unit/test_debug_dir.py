"""``GNNCOMPILE_DEBUG_DIR``: each captured graph before and after each pass, and the regions with their sources."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch_geometric.nn import GCNConv

import gnncompile
from tests.harness import forget_kernels


def _run() -> None:
    torch._dynamo.reset()
    forget_kernels()
    x, edge_index = torch.randn(4, 5, requires_grad=True), torch.tensor([[0, 1, 2, 2], [1, 2, 3, 0]])
    gnncompile.compile(GCNConv(5, 3))(x, edge_index).sum().backward()


def test_graphs_and_regions_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GNNCOMPILE_DEBUG_DIR", str(tmp_path))
    monkeypatch.setattr("gnncompile.debug_dir._counters", {})
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    with torch.compiler.config.patch(force_disable_caches=True):
        _run()
    names = sorted(file.name for file in (tmp_path / "graph_000").iterdir())
    assert names[0] == "00_captured.py" and "structure.py" in names
    formed = next(name for name in names if name.endswith("_form_regions.py"))
    before, after = ((tmp_path / "graph_000" / name).read_text() for name in ("00_captured.py", formed))
    assert "gnncompile.region" not in before and "gnncompile.region" in after
    assert len({(tmp_path / "graph_000" / name).read_text() for name in names}) == len(names)
    assert len(list(tmp_path.glob("post_grad_*"))) == 2  # of the forward and of the backward
    regions = list((tmp_path / "regions").iterdir())
    assert regions and all("reduce_sum" in file.read_text() for file in regions)
    assert {file.suffixes[-2] for file in regions} == {".cpu"}


def test_nothing_is_written_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GNNCOMPILE_DEBUG_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    _run()
    assert list(tmp_path.iterdir()) == []
