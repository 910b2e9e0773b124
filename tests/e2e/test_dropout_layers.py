"""Dropout per edge in whole layers: one region, the right distribution, the forward's mask in the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import GATConv, GATv2Conv, MessagePassing, TransformerConv
from torch_geometric.utils import scatter

import gnncompile
from gnncompile.ir import philox
from gnncompile.ir.region import parse
from tests.harness import launched, light

CHANNELS, HEADS, P = 5, 2, 0.5
LAYERS = {"GAT": GATConv, "GATv2": GATv2Conv, "Transformer": TransformerConv}
GRAPHS = {
    "no edge": ([], [], 3),
    "one node": ([], [], 1),
    "unsorted, duplicates": ([4, 1, 2, 1, 3, 0, 0, 4, 5], [3, 0, 4, 0, 2, 3, 1, 2, 3], 6),
    "hub": ([1 + k % 5 for k in range(150)] + [0, 2], [0] * 150 + [3, 3], 6),
}


@pytest.fixture(autouse=True)
def _light() -> Iterator[None]:
    with light("cpp"):
        yield


def graph(name: str = "unsorted, duplicates") -> tuple[Tensor, Tensor]:
    src, dst, nodes = GRAPHS[name]
    x = torch.randn(nodes, CHANNELS, generator=torch.Generator().manual_seed(nodes))
    return x, torch.tensor([src, dst], dtype=torch.long).view(2, -1)


def layer(name: str, p: float = P) -> MessagePassing:
    torch.manual_seed(0)
    return LAYERS[name](CHANNELS, 4, heads=HEADS, dropout=p)


def programs(specs: list[str]) -> list[list[str]]:
    return [[n.op for n in parse(spec).nodes] for spec in specs]


# -- layers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
def test_one_region_and_nothing_per_edge(name: str):
    report = gnncompile.explain(layer(name), *graph())
    assert report.captured_graphs == 1 and not report.skipped and report.host_syncs == 0
    (region,) = report.regions
    assert region.what.startswith("softmax, dropout, ")
    compiled = gnncompile.compile(layer(name))
    x, edge_index = graph()
    with launched() as specs:
        compiled(x.requires_grad_(), edge_index).sum().backward()
    regions = [parse(s) for s in specs]
    assert all("dropout" in ops for ops in programs(specs) if "reduce_sum" in ops and "input" in ops)
    assert not any(r.per_edge(o) for r in regions for o in r.outputs)


@pytest.mark.parametrize("name", LAYERS)
def test_every_step_draws_anew_unless_seeded(name: str):
    compiled = gnncompile.compile(layer(name), fullgraph=True)
    x, edge_index = graph()
    x.requires_grad_()

    def step() -> tuple[Tensor, Tensor]:
        out = compiled(x, edge_index)
        return out.detach(), torch.autograd.grad(out.square().sum(), x)[0]

    torch.manual_seed(3)
    first, second = step(), step()
    torch.manual_seed(3)
    again = step(), step()
    assert all(
        torch.equal(a, b)
        for one, other in zip((first, second), again, strict=True)
        for a, b in zip(one, other, strict=True)
    )
    assert not torch.equal(first[0], second[0]) and not torch.equal(first[1], second[1])


@pytest.mark.parametrize("on", GRAPHS)
@pytest.mark.parametrize("name", LAYERS)
def test_result_and_gradient_are_eager_s_with_the_same_mask(name: str, on: str, monkeypatch: pytest.MonkeyPatch):
    """Eager gets the mask from the reference, by the seed that the compiled layer draws; no edge is a self loop, so
    both number edges alike.
    """
    model = layer(name)
    compiled = gnncompile.compile(model)
    x, edge_index = graph(on)

    def gradients(run: Callable[..., Tensor]) -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(11)
        out = run(x.requires_grad_(), edge_index)
        weight = torch.cos(torch.arange(out.numel())).view_as(out)
        wanted = [x, *model.parameters()]
        found = torch.autograd.grad((out * weight).sum(), wanted, allow_unused=True)
        return [out, *(torch.zeros_like(w) if g is None else g for g, w in zip(found, wanted, strict=True))]

    found = gradients(compiled)
    with monkeypatch.context() as patch:
        patch.setattr(F, "dropout", by_reference)
        expected = gradients(model)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


def by_reference(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """F.dropout by the mask of the next seed."""
    if not training or p == 0:
        return x
    seed = torch.randint(0, philox.LARGEST_SEED, [1])
    feature = torch.arange(x[:1].numel() if x.size(0) else 0).view(1, -1)
    made = philox.factors(seed, torch.arange(x.size(0)).view(-1, 1), feature, p, x.dtype)
    return x * made.view_as(x)


@pytest.mark.parametrize("name", LAYERS)
def test_expectation_is_eager_s(name: str):
    """Layers are linear in the mask: the mean over many steps tends to the result without dropout, as eager's does."""
    model = layer(name)
    compiled, steps = gnncompile.compile(model), 400
    x, edge_index = graph()
    with torch.no_grad():
        results = {
            which: torch.stack([run(x, edge_index) for _ in range(steps)])
            for which, run in (("ours", compiled), ("eager", model))
        }
        exact = model.eval()(x, edge_index)
    deviation = {which: made.std(0) / steps**0.5 + 1e-6 for which, made in results.items()}
    assert ((results["ours"].mean(0) - exact) / deviation["ours"]).abs().max() < 5
    spread = {which: made.var(0) + 1e-12 for which, made in results.items()}
    assert ((spread["ours"] / spread["eager"]).log().abs() < 0.6).float().mean() > 0.95


@pytest.mark.parametrize("name", LAYERS)
def test_evaluation_and_no_dropout_are_eager(name: str):
    x, edge_index = graph()
    model = layer(name)
    compiled = gnncompile.compile(model).eval()
    with launched() as specs:
        torch.testing.assert_close(compiled(x, edge_index), model(x, edge_index), rtol=1e-6, atol=1e-6)
    plain = layer(name, p=0.0)
    with launched() as more:
        torch.testing.assert_close(gnncompile.compile(plain)(x, edge_index), plain(x, edge_index), rtol=1e-6, atol=1e-6)
    assert not any("dropout" in ops for ops in programs(specs + more))


@pytest.mark.parametrize("name", LAYERS)
def test_everything_dropped(name: str):
    x, edge_index = graph()
    model = layer(name, p=1.0)
    torch.testing.assert_close(gnncompile.compile(model)(x, edge_index), model(x, edge_index))


def test_sizes_and_modes_share_one_capture():
    compiled = gnncompile.compile(layer("GAT"), fullgraph=True)
    for name in GRAPHS:
        x, edge_index = graph(name)
        compiled(x.requires_grad_(), edge_index).sum().backward()
    assert len(gnncompile.capture.compile.callable_of(compiled).backend.captured) == 1  # type: ignore[union-attr]


# -- masks that something else reads too --------------------------------------------------------------------------


def test_returned_attention_weights_are_those_of_the_result():
    """The softmax leaves its region per edge here, and the dropout that the caller sees has the region's mask."""
    model = layer("GAT")
    x, edge_index = graph()
    out, (edges, alpha) = gnncompile.compile(model)(x, edge_index, return_attention_weights=True)
    assert 0 < (alpha == 0).sum() < alpha.numel()
    rows = model.lin(x).view(-1, HEADS, 4)[edges[0]] * alpha.unsqueeze(-1)
    expected = scatter(rows, edges[1], 0, x.size(0)).flatten(1) + model.bias
    torch.testing.assert_close(out, expected)


def test_two_reductions_and_a_caller_see_one_mask():
    def run(x: Tensor, edge_index: Tensor) -> tuple[Tensor, ...]:
        message = F.dropout(x[edge_index[0]], P)
        return *(scatter(message, edge_index[1], 0, x.size(0), reduce=r) for r in ("sum", "max", "mul")), message

    x, edge_index = graph()
    *found, message = gnncompile.compile(run)(x, edge_index)
    assert 0 < (message == 0).sum() < message.numel()
    for out, reduce in zip(found, ("sum", "max", "mul"), strict=True):
        torch.testing.assert_close(out, scatter(message, edge_index[1], 0, x.size(0), reduce=reduce))


def test_dropouts_of_one_model_differ():
    def run(x: Tensor, edge_index: Tensor) -> list[Tensor]:
        ones = torch.ones_like(x)[edge_index[0]]
        dropped = [F.dropout(ones, P), F.dropout(ones, P), F.dropout(F.dropout(ones, P), P)]
        return [scatter(d, edge_index[1], 0, x.size(0)) for d in dropped]

    x, edge_index = graph("hub")
    first, second, twice = gnncompile.compile(run)(x, edge_index)
    assert not torch.equal(first, second)
    counts = [150 * CHANNELS * share for share in (0.5, 0.5, 0.25)]
    for out, kept, scale in zip((first, second, twice), counts, (2, 2, 4), strict=True):
        assert abs(out[0].sum() / scale - kept) < 5 * kept**0.5


# -- messages of any shape ----------------------------------------------------------------------------------------


def weights(x: Tensor, e: Tensor, edge_index: Tensor) -> Tensor:
    return F.dropout(e[:, 0], P).view(-1, 1) * x[edge_index[0]]


def heads(x: Tensor, e: Tensor, edge_index: Tensor) -> Tensor:
    return F.dropout(e[:, :HEADS], P).unsqueeze(-1) * x[edge_index[0]].unsqueeze(1)


def channels(x: Tensor, e: Tensor, edge_index: Tensor) -> Tensor:
    return F.dropout(F.relu(x[edge_index[0]] - x[edge_index[1]]), 0.2) * e[:, :1]


def heads_and_channels(x: Tensor, e: Tensor, edge_index: Tensor) -> Tensor:
    return F.dropout(x[edge_index[0]].unsqueeze(1) * e[:, :HEADS].unsqueeze(-1), P)


def dot_product(x: Tensor, e: Tensor, edge_index: Tensor) -> Tensor:
    score = (F.dropout(x[edge_index[0]], P) * x[edge_index[1]]).sum(-1)
    return F.dropout(score, P, inplace=True).view(-1, 1) * x[edge_index[0]]


@pytest.mark.parametrize("message", [weights, heads, channels, heads_and_channels, dot_product])
def test_messages(message: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch):
    def run(x: Tensor, e: Tensor, edge_index: Tensor) -> Tensor:
        return scatter(message(x, e, edge_index), edge_index[1], 0, x.size(0))

    x, edge_index = graph("hub")
    e = torch.randn(edge_index.size(1), CHANNELS, generator=torch.Generator().manual_seed(0))
    report = gnncompile.explain(run, x, e, edge_index)
    assert len(report.regions) == 1 and not any("per edge" in s.what for s in report.skipped)

    def results(fn: Callable[..., Any]) -> tuple[Tensor, ...]:
        torch.manual_seed(5)
        inputs = [x.clone().requires_grad_(), e.clone().requires_grad_()]
        out = fn(*inputs, edge_index)
        return out, *torch.autograd.grad(out.square().sum(), inputs, materialize_grads=True)

    found = results(gnncompile.compile(run))
    with monkeypatch.context() as patch:
        patch.setattr(F, "dropout", by_reference)
        expected = results(run)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
