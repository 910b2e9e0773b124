"""``gnncompile.loader`` with features on the host: the same mini-batches as with features on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.loader import LinkNeighborLoader, NeighborLoader

import gnncompile
from gnncompile.batches.loader import Loader
from tests import triton_regions

pytestmark = [
    *triton_regions.GPU,
    pytest.mark.filterwarnings("ignore:.*without a 'pyg-lib' installation"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of NumPy, for padded lanes in Triton's interpreter
]
DEVICE = triton_regions.DEVICE


def graph() -> Data:
    generator = torch.Generator().manual_seed(0)
    return Data(
        x=torch.randn(300, 6, generator=generator),
        half=torch.randn(300, 3, generator=generator).bfloat16(),
        edge_index=torch.randint(280, (2, 2000), generator=generator),
        edge_attr=torch.randn(2000, 2, generator=generator),
        y=torch.randint(3, (300,), generator=generator),
    )


def loader(**how: Any) -> Loader:
    source = NeighborLoader(graph(), [5, 3], batch_size=16, input_nodes=torch.arange(48))
    return gnncompile.loader(source, DEVICE, sampler="device", **how)


HOWS: list[dict[str, Any]] = [
    {"features": "host"},
    {"features": {"x": "host", "edge_attr": "host"}},
    {"features": "host", "cache": 100 * (24 + 6 + 8)},
]


@pytest.mark.parametrize("buckets", [False, True])
@pytest.mark.parametrize("how", HOWS, ids=["host", "by name", "cache"])
def test_mini_batches_do_not_depend_on_the_place(how: dict[str, Any], buckets: bool):
    torch.manual_seed(3)
    expected = list(loader(buckets=buckets))
    torch.manual_seed(3)
    found = loader(buckets=buckets, **how)
    number = 0
    for one, other in zip(found, expected, strict=True):
        assert sorted(one.keys()) == sorted(other.keys())
        for key in ("x", "half", "edge_attr", "y", "n_id", "e_id", "edge_index"):
            assert torch.equal(one[key], other[key]), key
        assert one.x.device.type == DEVICE
        number += len(one.n_id)
    report = {one.name: one for one in found.report()}
    assert set(report) == {"x", "half", "edge_attr", "y"}
    assert report["x"].place == report["edge_attr"].place == "host"
    assert report["y"].place == ("device" if "features" in how and how["features"] != "host" else "host")
    assert report["edge_attr"].cached_rows == 0
    if "cache" in how:
        rate = report["x"].hit_rate
        assert report["x"].cached_rows == 100 and report["x"].reads == report["y"].reads == number
        assert rate is not None and rate > 100 / 300  # the cache holds the nodes that are read most


def test_loader_of_links():
    found = []
    for how in ({}, {"features": "host", "cache": 100 * (24 + 6 + 8)}):
        torch.manual_seed(3)
        data = graph()
        source = LinkNeighborLoader(data, [5, 3], edge_label_index=data.edge_index[:, :32], batch_size=16)
        found.append(list(gnncompile.loader(source, DEVICE, sampler="device", **how)))
    for one, other in zip(*found, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in ("x", "edge_attr", "y", "n_id", "edge_label_index"))


@pytest.mark.parametrize("buckets", [False, True])
def test_no_row_to_read_ahead(buckets: bool):
    """Seeds without edges read no row of edges."""
    data = graph()
    source = NeighborLoader(data, [2], batch_size=3, input_nodes=torch.arange(294, 300))
    for batch in gnncompile.loader(source, DEVICE, sampler="device", buckets=buckets, features="host"):
        assert batch.num_edges == 0 and batch.edge_attr.shape == (0, 2)
        assert torch.equal(batch.x.cpu(), data.x[batch.n_id.cpu()])


def test_rows_that_have_no_room_ahead(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """They are gathered between training steps, and a log message says so once."""
    monkeypatch.setattr("gnncompile.sampling.rows_ahead.MOST_BYTES", 100)
    torch.manual_seed(3)
    expected = list(loader())
    torch.manual_seed(3)
    found = loader(features={"x": "host"})
    with caplog.at_level("WARNING", logger="gnncompile"):
        for _ in range(2):
            batches = list(found)
    assert [record.message.partition(":")[0] for record in caplog.records] == ["features"]
    assert "the rows of 'x' cross the bus between training steps" in caplog.text
    torch.manual_seed(3)
    assert all(torch.equal(one.x, other.x) for one, other in zip(found, expected, strict=True)) and batches


def test_report_before_the_first_mini_batch():
    (x,) = [one for one in loader().report() if one.name == "x"]
    assert (x.place, x.bytes, x.hit_rate) == ("device", 300 * 24, None)


def test_arguments():
    source = NeighborLoader(graph(), [5, 3], batch_size=16)
    with pytest.raises(ValueError, match="features: found 'disk', expected 'device', 'host'"):
        gnncompile.loader(source, DEVICE, features="disk")
    with pytest.raises(ValueError, match=r"features: found \{'x': 'disk'\}, expected 'device', 'host'"):
        gnncompile.loader(source, DEVICE, features={"x": "disk"})
    with pytest.raises(ValueError, match="features: found None, expected 'device', 'host'"):
        gnncompile.loader(source, DEVICE, features=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cache: found 5 bytes with features='device'"):
        gnncompile.loader(source, DEVICE, cache=5)
    with pytest.raises(ValueError, match="cache: found -1 bytes"):
        gnncompile.loader(source, DEVICE, features="host", cache=-1)
    with pytest.raises(TypeError, match=r"cache: found 1000\.0, a float, expected an int"):
        gnncompile.loader(source, DEVICE, features="host", cache=1e3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"features: found 'host' .* sampled on the device \(sampler is 'cpu'\)"):
        gnncompile.loader(source, DEVICE, sampler="cpu", features="host")
    with pytest.raises(
        ValueError, match="features: found a place for 'z', expected names of attributes of nodes or edges: "
    ):
        gnncompile.loader(source, DEVICE, sampler="device", features={"z": "host"}).report()
    with pytest.raises(ValueError, match="cache: found 9 bytes and no attribute of nodes on the host"):
        gnncompile.loader(source, DEVICE, sampler="device", features={"edge_attr": "host"}, cache=9).report()
    with pytest.raises(ValueError, match="report: found a loader that samples on the CPU"):
        gnncompile.loader(source, DEVICE, sampler="cpu").report()
