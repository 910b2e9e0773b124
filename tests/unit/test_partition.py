"""``gnncompile.partition``: every edge and every halo row of the parts, saved parts, reports and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Batch, Data, HeteroData

import gnncompile
from gnncompile import Partition, testing
from gnncompile.layout.halo import plan_of, splits
from gnncompile.ops.exchange import counted_once

METHODS = ("contiguous", "rcm")


def recommendations() -> HeteroData:
    """Two node types and three edge types, with edge features; one type of edges has no edge."""
    made = torch.Generator().manual_seed(3)
    data = HeteroData()
    data["user"].x, data["item"].x = torch.randn(13, 4, generator=made), torch.randn(29, 5, generator=made)
    for kind, count in ((("user", "buys", "item"), 60), (("item", "of", "user"), 45), (("item", "like", "item"), 0)):
        high = torch.tensor([[data[kind[0]].num_nodes], [data[kind[2]].num_nodes]])
        data[kind].edge_index = (torch.rand(2, count, generator=made) * high).long()
        data[kind].edge_attr = torch.randn(count, 3, generator=made)
    return data


GRAPHS: dict[str, Any] = {**testing.awkward(), "typed": testing.typed(40, 120), "hetero": recommendations()}


def whole_edges(data: Any, kind: Any) -> Tensor:
    return data.edge_index if kind == "" else data[kind].edge_index  # type: ignore[no-any-return]


def check(data: Data | HeteroData, parts: Partition) -> None:
    """Checks that the parts hold each node and edge once, and that what is sent is what the halos name."""
    every = list(parts)
    for kind in every[0].nodes:
        found = torch.cat([part.nodes[kind] for part in every])
        assert found.sort().values.tolist() == list(range(found.numel()))
    for kind in every[0].edges:
        found = torch.cat([part.edges[kind] for part in every])
        assert found.sort().values.tolist() == list(range(whole_edges(data, kind).size(1)))
    for part in every:
        for store in part.data.edge_stores:
            kind = "" if store._key is None else store._key
            source, destination = ("", "") if kind == "" else (kind[0], kind[2])
            rows = torch.cat([part.nodes[source], part.halo[source]])
            whole = whole_edges(data, kind)[:, part.edges[kind]]
            assert torch.equal(rows[store.edge_index[0]], whole[0])
            assert torch.equal(part.nodes[destination][store.edge_index[1]], whole[1])
        for kind, exchange in part.exchanges.items():
            arriving = []
            for other in every:
                sent = other.exchanges[kind].send.split(other.exchanges[kind].sent)[part.rank]
                arriving.append(other.nodes[kind][sent])
                assert exchange.received[other.rank] == sent.numel()
            assert torch.equal(torch.cat(arriving), part.halo[kind])
            assert exchange.received[part.rank] == 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", GRAPHS)
def test_parts_hold_every_edge_once(name: str, method: str) -> None:
    for n in (1, 2, 5):
        parts = gnncompile.partition(GRAPHS[name], n, method)
        check(GRAPHS[name], parts)
        report = parts.report()
        assert report.nodes == [sum(rows.numel() for rows in part.nodes.values()) for part in parts]
        assert report.edges == [sum(rows.numel() for rows in part.edges.values()) for part in parts]
        assert report.halo == [sum(rows.numel() for rows in part.halo.values()) for part in parts]
        assert sum(report.halo) == sum(report.sent)


def test_metis_cuts_few_edges() -> None:
    pytest.importorskip("pymetis")
    grid = testing.grid(16, 16)
    shuffled = Data(
        x=grid.x, edge_index=torch.randperm(256, generator=torch.Generator().manual_seed(0))[grid.edge_index]
    )
    metis, contiguous = (gnncompile.partition(shuffled, 4, method) for method in ("metis", "contiguous"))
    check(shuffled, metis)
    assert metis.report().cut < contiguous.report().cut / 3
    assert metis.report().balance < 1.2


def test_rows_go_with_their_nodes_and_edges() -> None:
    data = testing.typed(40, 120)
    data.weight, data.y, data.name = torch.arange(120.0), torch.arange(40), "a graph"
    for part in gnncompile.partition(data, 3, "rcm"):
        assert torch.equal(part.data.y, part.nodes[""]) and torch.equal(part.data.weight, part.edges[""].float())
        assert torch.equal(part.data.x, data.x[part.nodes[""]])
        assert part.data.num_nodes == part.nodes[""].numel() and part.data.name == "a graph"


def test_edges_are_balanced_and_a_grid_has_small_halos() -> None:
    report = gnncompile.partition(testing.power_law(2000, 20_000, 300), 8).report()
    assert report.balance < 1.3
    grid = gnncompile.partition(testing.grid(64, 64), 4, "rcm").report()
    assert grid.largest <= 2 * 128 and grid.balance < 1.1
    assert grid.seconds(128, 1e9) == grid.largest * 128 * 4 / 1e9
    assert "4 parts" in str(grid)


def test_results_come_back_in_order() -> None:
    data = testing.power_law(100, 400, 20)
    parts = gnncompile.partition(data, 3, "rcm")
    assert torch.equal(parts.gather([part.data.x for part in parts]), data.x)
    hetero = gnncompile.partition(recommendations(), 3)
    assert torch.equal(hetero.gather([p.data["item"].x for p in hetero], "item"), recommendations()["item"].x)
    with pytest.raises(ValueError, match="kind: found '', expected a node type: 'user', 'item'"):
        hetero.gather([p.data["item"].x for p in hetero])
    with pytest.raises(ValueError, match=r"results: found tensors of .* rows, expected"):
        hetero.gather([p.data["item"].x for p in hetero], "user")


@pytest.mark.parametrize("name", ["typed", "hetero"])
def test_saved_parts_are_the_same(name: str, tmp_path: Path) -> None:
    parts = gnncompile.partition(GRAPHS[name], 2)
    parts.save(tmp_path)
    for part in parts:
        loaded = gnncompile.load_part(tmp_path, part.rank, 2)
        assert loaded.partition == part.partition and type(loaded.data) is type(part.data)
        for ours, theirs in zip(part.data.edge_stores, loaded.data.edge_stores, strict=True):
            assert torch.equal(ours.edge_index, theirs.edge_index)
            before, after = plan_of(ours.edge_index), plan_of(theirs.edge_index)
            assert before is not None and after is not None
            assert (before.sent, before.received, before.own) == (after.sent, after.received, after.own)
            assert splits(after.send) == (after.sent, after.received, after.own)
    with pytest.raises(ValueError, match=r"found no part-0-of-3\.pt .* part-0-of-2\.pt"):
        gnncompile.load_part(tmp_path, 0, 3)


def test_a_moved_part_keeps_its_exchange() -> None:
    part = gnncompile.partition(testing.grid(6, 6), 2)[1]
    moved = part.to("cpu")
    assert plan_of(moved.data.edge_index) is not None
    assert plan_of(part.data.edge_index) is not None
    assert plan_of(part.data.edge_index.clone()) is None


def test_indices_of_the_whole_graph_stay_where_they_are() -> None:
    part = gnncompile.partition(testing.grid(6, 6), 2)[1]
    moved = part.to("meta")
    assert moved.data.edge_index.is_meta and moved.data.x.is_meta and moved.exchanges[""].send.is_meta
    kept = (moved.nodes[""], moved.edges[""], moved.halo[""])
    assert all(a is b for a, b in zip(kept, (part.nodes[""], part.edges[""], part.halo[""]), strict=True))


def test_a_shared_result_keeps_its_value_and_takes_a_share_of_the_gradient() -> None:
    x = torch.tensor([1.5, torch.inf, -torch.inf, torch.nan], requires_grad=True)
    once = counted_once(x, 4)
    assert torch.equal(once.detach()[:3], x.detach()[:3]) and once[3].isnan()
    once[0].backward()
    assert x.grad is not None and x.grad[0] == 0.25


@pytest.mark.parametrize("values", [torch.ones(3, dtype=torch.bool), torch.ones(3, dtype=torch.long), torch.ones(())])
def test_means_are_of_floating_point_rows(values: Tensor) -> None:
    with pytest.raises(ValueError, match=r"values: found torch\.\w+ \(.*\), expected floating-point"):
        gnncompile.mean_over_parts(values, None)  # type: ignore[arg-type]


def test_partitions_have_names_of_their_own() -> None:
    grid = testing.grid(6, 6)
    names = {gnncompile.partition(grid, n, m).fingerprint for n in (2, 3) for m in METHODS}
    assert len(names) == 4
    assert gnncompile.partition(grid, 2).fingerprint == gnncompile.partition(grid.clone(), 2).fingerprint


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a", 2), "data: found str"),
        ((testing.grid(2, 2), 0), "n: found 0"),
        ((testing.grid(2, 2), True), "n: found True"),
        ((testing.grid(2, 2), 2, "best"), "method: found 'best', expected one of 'contiguous'"),
        ((Batch.from_data_list([testing.grid(2, 2)]), 2), "found batch"),
        ((Data(x=torch.ones(2, 1), face=torch.zeros(3, 1, dtype=torch.long)), 2), "found face"),
    ],
)
def test_errors_name_what_is_wrong(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        gnncompile.partition(*arguments)
    outside = recommendations()
    outside["user", "buys", "item"].edge_index[0, 5] = 13
    with pytest.raises(
        IndexError, match=r"found source 13 in edge_index of \('user', 'buys', 'item'\), expected 0 to 12"
    ):
        gnncompile.partition(outside, 2)
    with pytest.raises(IndexError, match="rank: found 2, expected 0 to 1"):
        gnncompile.partition(testing.grid(2, 2), 2)[2]
