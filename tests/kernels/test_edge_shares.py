"""Shares of edges, and the memory that walks in tiles take for one share."""

from __future__ import annotations

import itertools

import pytest

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

from gnncompile.codegen.triton import edge_shares
from gnncompile.codegen.triton.tiled_plan import TiledPlan
from gnncompile.ir.residuals import with_residuals
from tests.tiled_regions import REGIONS, D, E, Maker, S, tiled_gradient_of

pytestmark = triton_regions.INTERPRETED


@pytest.mark.parametrize("edges", [0, 1, 999, 1_000, 1_001, 7_777, 2**31 - 1])
@pytest.mark.parametrize("each", [0, 1, 4_000])
@pytest.mark.parametrize("wave", [1, 128, 10_000])
def test_shares_are_all_edges_once(edges: int, each: int, wave: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_shares, "BYTES", max(4_000_000, edges // 50))
    shares = edge_shares.divide(edges, each, wave)
    assert shares[0].first == 0 and shares[-1].end == edges
    assert all(one.end == other.first for one, other in itertools.pairwise(shares))
    assert all(share.size % wave == 0 for share in shares[:-1]) and (edges == 0 or min(s.size for s in shares) > 0)
    if len(shares) > 1:
        assert (shares[0].size - wave) * each < edge_shares.BYTES < edges * each


def test_large_graphs_have_more_shares() -> None:
    assert [len(edge_shares.divide(edges, 2_000, 1_000)) for edges in (500_000, 600_000, 3_000_000)] == [1, 2, 6]


def plans(name: str, unmasked: bool = True) -> list[TiledPlan]:
    """The plans of a region and of its gradient."""
    region = REGIONS[name](Maker("float32", unmasked))
    kept = with_residuals(region)
    return [TiledPlan(kept), TiledPlan(tiled_gradient_of(kept, len(region.outputs)))]


@pytest.mark.parametrize("name", REGIONS)
def test_values_are_kept_from_the_walk_that_stores_them_to_the_last_that_reads_them(name: str) -> None:
    for plan in plans(name):
        alive, done = set[int](), list[int]()
        for phase, turn in zip(plan.phases, edge_shares.turns(plan), strict=True):
            assert {*turn.stores} == plan.brief.intersection(phase.stores)
            alive |= {*turn.stores}
            assert alive >= plan.brief & phase.loads
            for k in turn.products:
                assert alive.issuperset(plan.region.nodes[plan.region.outputs[k].node].args)
                done.append(k)
            assert alive >= {*turn.done}
            alive -= {*turn.done}
        assert not alive
        assert sorted(done + edge_shares.products(plan, brief=False)) == [
            k for k, out in enumerate(plan.region.outputs) if out.node in plan.products
        ]


def test_memory_is_free_again_before_the_last_walk() -> None:
    """The gradient of EGNN's edge layer stores six values, and holds five at most."""
    _, plan = plans("equivariant")
    alive, most = set[int](), 0
    for turn in edge_shares.turns(plan):
        alive |= {*turn.stores}
        most = max(most, len(alive))
        alive -= {*turn.done}
    assert (len(plan.brief), most) == (6, 5)


@pytest.mark.parametrize("name", REGIONS)
def test_rows_of_masked_edges_are_zero_in_products_so_all_are_stored(name: str) -> None:
    assert not any(plan.brief for plan in plans(name, unmasked=False))


def test_what_rows_or_products_with_inputs_read_is_stored_for_all_edges() -> None:
    make = Maker()
    b = make.b
    given = make.input(E, 20)
    hidden = make.layer(b.op("add", given, make.input(S, 20)), 24)
    last = make.layer(b.op("tanh", hidden), 24)
    of_input = b.outer(given, b.op("tanh", hidden), (1, 24))
    plan = TiledPlan(make.finish(b.reduce("sum", last), of_input, make.input(D, 1)))
    assert {plan.region.nodes[i].op for i in plan.stored} == {"tanh", "add"} and not plan.brief
