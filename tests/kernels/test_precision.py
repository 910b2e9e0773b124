"""Autocast gives eager's types; hubs of a million edges keep float32's accuracy; NaN and infinities go as in eager.

Small hubs in half precision: tests/kernels/test_repeatable.py. Special numbers in kernels:
tests/kernels/test_cpp_kernels.py and tests/kernels/test_triton_kernels.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import (
    GATConv,
    GCNConv,
    GINEConv,
    PNAConv,
    SAGEConv,
    SimpleConv,
    TransformerConv,
    global_max_pool,
    global_mean_pool,
)
from torch_geometric.nn.aggr import SoftmaxAggregation
from torch_geometric.utils import scatter, softmax

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

import gnncompile
from tests.harness import light

NAN, INF = float("nan"), float("inf")
GENERATOR = {"cpu": "cpp", "cuda": "triton"}


def cosines(like: Tensor) -> Tensor:
    return torch.cos(torch.arange(like.numel(), device=like.device)).view_as(like)


# -- autocast -----------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Two layers, norm and a pool: types change on the way; no kink, at which a rounding would decide."""

    def __init__(self, conv: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.first, self.norm, self.second = conv(8, 8), nn.LayerNorm(8), conv(8, 4)

    def forward(self, x: Tensor, edge_index: Tensor, *edge: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.first(x, edge_index, *edge)
        last = self.second(self.norm(hidden).tanh(), edge_index, *edge)
        batch = torch.arange(x.size(0), device=x.device) % 2
        return hidden, last, global_mean_pool(last, batch, 2)


NETS: dict[str, Callable[[], nn.Module]] = {
    "GCN": lambda: Net(GCNConv),
    "SAGE max": lambda: Net(lambda a, b: SAGEConv(a, b, aggr="max")),
    "GAT": lambda: Net(lambda a, b: GATConv(a, b // 2, heads=2)),
    "GINE": lambda: Net(lambda a, b: GINEConv(nn.Linear(a, b), edge_dim=3)),
    "Transformer": lambda: Net(lambda a, b: TransformerConv(a, b // 2, heads=2, edge_dim=3)),
    "PNA": lambda: Net(lambda a, b: PNAConv(a, b, ["mean", "max", "min"], ["identity"], torch.tensor([0, 5, 3]))),
}


def example(name: str, device: str, edges: int = 60) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 8, generator=generator).to(device).requires_grad_()
    edge_index = torch.randint(12, (2, edges), generator=generator).to(device)
    features = torch.randn(edges, 3, generator=generator).to(device).requires_grad_()
    return [x, edge_index, features] if name in ("GINE", "Transformer") else [x, edge_index]


@pytest.mark.parametrize(
    "name, dtype", [*((name, torch.bfloat16) for name in NETS), ("GAT", torch.float16), ("SAGE max", torch.float16)]
)
def test_autocast_gives_eager_s_types(name: str, dtype: torch.dtype, device: str):
    """Of all results and gradients, with values within the rounding of the type; without edges too."""
    torch.manual_seed(0)
    model = NETS[name]().to(device)
    with light(GENERATOR[device]):
        compiled = gnncompile.compile(model, fullgraph=True)
        for edges in (60, 0):
            inputs = example(name, device, edges)
            wanted = [t for t in (*inputs, *model.parameters()) if t.requires_grad]
            results = []
            for run in (compiled, model, None):
                with torch.autocast(device, dtype, enabled=run is not None):
                    outputs = (run or model)(*inputs)
                total = sum((out.float() * cosines(out)).sum() for out in outputs)
                grads = torch.autograd.grad(total, wanted, allow_unused=True)
                filled = (torch.zeros_like(w) if g is None else g for g, w in zip(grads, wanted, strict=True))
                results.append([*outputs, *filled])
            for k, (ours, theirs, exact) in enumerate(zip(*results, strict=True)):
                assert ours.dtype == theirs.dtype, f"{edges} edges, tensor {k}: {ours.dtype}, eager has {theirs.dtype}"
                # Eager rounds more often; neither may be far from float32.
                scale, error, limit = (
                    float(t.abs().max()) if t.numel() else 0.0 for t in (exact, ours - exact, theirs - exact)
                )
                allowed = 2 * limit + 8 * torch.finfo(dtype).eps * max(1.0, scale)
                assert error <= allowed, f"{edges} edges, tensor {k}: {error}, eager has {limit}"


@pytest.mark.parametrize("scale", [2.0**10, 2.0**60])
def test_scaled_gradients_in_float16(scale: float, device: str):
    """GradScaler finds the same overflows as in eager, and steps to the same weights where there are none."""
    torch.manual_seed(0)
    eager = NETS["GAT"]().to(device)
    ours = copy.deepcopy(eager)
    before = [p.detach().clone() for p in eager.parameters()]
    scales = []
    with light(GENERATOR[device]):
        for model, run in ((ours, gnncompile.compile(ours)), (eager, eager)):
            scaler = torch.amp.GradScaler(device, init_scale=scale, growth_interval=1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                with torch.autocast(device, torch.float16):
                    loss = run(*example("GAT", device))[2].square().sum()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            scales.append(scaler.get_scale())
    assert scales[0] == scales[1] == scale * (4 if scale < 2.0**20 else 0.25)
    moved = [not torch.equal(p, q) for p, q in zip(ours.parameters(), before, strict=True)]
    assert any(moved) == (scale < 2.0**20)
    for p, q in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-2, atol=2e-3)


# -- sums over large hubs -----------------------------------------------------------------------------------------

MANY = 1_000_000


@pytest.mark.parametrize("reduce", ["sum", "mean", "softmax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_million_edges(dtype: torch.dtype, reduce: str, device: str):
    """To one row, and from one row in the gradient, against float64, as near as float32 can be summed in order."""
    sources = torch.arange(MANY, device=device) % 7
    to_hub = torch.stack([sources, torch.zeros_like(sources)])
    x = torch.linspace(0.25, 1.75, 7 * 2, device=device).view(7, 2).to(dtype)
    x = x * (1.0 if reduce != "sum" else 2.0**-7)
    conv = SimpleConv(aggr=SoftmaxAggregation() if reduce == "softmax" else reduce)
    with light(GENERATOR[device]):
        compiled = gnncompile.compile(conv, fullgraph=True)
        for edges, row in ((to_hub, 0), (to_hub.flip(0), slice(0, 7))):
            results = []
            for value in (x, x.double()):
                leaf = value.clone().requires_grad_()
                out = compiled(leaf, edges) if value is x else exact(leaf, edges, reduce)
                results.append([out[row], *torch.autograd.grad(out[row].sum() * 2.0**-5, leaf)])
            assert results[0][0].dtype == dtype
            rounding = torch.finfo(dtype).eps
            for ours, expected in zip(*results, strict=True):
                scale = float(expected.abs().max())
                # float32 sums of a million equal signs lose up to 1e-4 where they are taken one after the other.
                torch.testing.assert_close(ours.double(), expected, rtol=0, atol=(rounding + 2e-4) * scale)


def exact(x: Tensor, edges: Tensor, reduce: str) -> Tensor:
    message = x[edges[0]]
    if reduce == "softmax":
        message = message * softmax(message, edges[1], num_nodes=7)
    return scatter(message, edges[1], 0, 7, "sum" if reduce == "softmax" else reduce)


# -- NaN and infinities -------------------------------------------------------------------------------------------

# Rows: no edge, finite, with NaN, with +inf, with -inf, both infinities, all -inf, NaN and inf.
VALUES = [[], [1.0, -2.0, 1.0], [NAN, 1.0], [INF, 1.0], [-INF, 1.0], [INF, -INF, 2.0], [-INF, -INF], [NAN, INF, -INF]]


def special(device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Features ``[nodes, 2]`` of sources, of which the second is the first's negative, and edges in mixed order."""
    flat = [(value, row) for row, values in enumerate(VALUES) for value in values]
    x = torch.tensor([value for value, _ in flat])
    order = torch.randperm(len(flat), generator=torch.Generator().manual_seed(0))
    edge_index = torch.stack([torch.arange(len(flat)), torch.tensor([row for _, row in flat])])
    y = torch.linspace(0.1, 0.9, 2 * len(VALUES)).view(-1, 2)
    return torch.stack([x, -x], 1).to(device), y.to(device), edge_index[:, order].to(device)


def _attended(x: Tensor, y: Tensor, edge_index: Tensor) -> Tensor:
    alpha = softmax(x[edge_index[0]] + y[edge_index[1]], edge_index[1], num_nodes=y.size(0))
    return scatter(alpha * torch.arange(1.0, 3.0, device=x.device), edge_index[1], 0, y.size(0))


def _masked_attention(x: Tensor, y: Tensor, edge_index: Tensor) -> Tensor:
    """Logits that a mask has put out of the running, all of a row's among them."""
    logits = x[edge_index[0]].nan_to_num(0, 0, 0)
    logits = logits.masked_fill(x[edge_index[0]].isfinite().logical_not(), -INF)
    return scatter(softmax(logits, edge_index[1], num_nodes=y.size(0)), edge_index[1], 0, y.size(0))


def _difference(x: Tensor, y: Tensor, edge_index: Tensor) -> Tensor:
    """inf - inf in a message."""
    return scatter(x[edge_index[0]] - x[edge_index[0]].abs() + y[edge_index[1]], edge_index[1], 0, y.size(0))


def _chosen(x: Tensor, y: Tensor, edge_index: Tensor) -> Tensor:
    """What is not chosen may be anything."""
    message = torch.where(x[edge_index[0]].isfinite(), x[edge_index[0]], y[edge_index[1]])
    return scatter(message, edge_index[1], 0, y.size(0), "max")


def _activations(x: Tensor, y: Tensor, edge_index: Tensor) -> Tensor:
    message = x[edge_index[0]]
    made = [message.relu(), message.sigmoid(), torch.tanh(message), message.clamp(-1, 1), nn.functional.gelu(message)]
    return scatter(torch.cat(made, 1), edge_index[1], 0, y.size(0), "min")


SPECIAL: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    **{
        kind: lambda x, y, e, kind=kind: scatter(x[e[0]], e[1], 0, y.size(0), kind)
        for kind in ("sum", "mean", "max", "min", "mul")
    },
    "std": lambda x, y, e: (
        scatter(x[e[0]] ** 2, e[1], 0, y.size(0)) - scatter(x[e[0]], e[1], 0, y.size(0)) ** 2
    ).sqrt(),
    "pool": lambda x, y, e: global_max_pool(x[e[0]], e[1], y.size(0)),
    "attention": _attended,
    "masked attention": _masked_attention,
    "difference": _difference,
    "chosen": _chosen,
    "activations": _activations,
}


def step(run: Callable[..., Tensor], rows: slice, device: str) -> list[Tensor]:
    x, y, edge_index = special(device)
    leaves = [x.requires_grad_(), y.requires_grad_()]
    out = run(*leaves, edge_index)
    grads = torch.autograd.grad(out[rows].sum(), leaves, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(w) if g is None else g for g, w in zip(grads, leaves, strict=True))]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of lanes that hold anything
@pytest.mark.parametrize("which", triton_regions.GENERATORS)
@pytest.mark.parametrize("name", SPECIAL)
def test_nan_and_infinity_go_where_eager_s_go(name: str, which: str):
    """Element by element: of results, of gradients of the finite rows, and of all.

    An extremum that is NaN no element is equal to. Eager divides its gradient by their number, 0, and gives NaN to all
    elements of the row even where nothing depends on it (torch 2.13); ours is 0, since no element gets a share.
    """
    fn, device = SPECIAL[name], triton_regions.home(which)
    with light(which):
        compiled = gnncompile.compile(fn, fullgraph=True)
        for rows in (slice(0, 2), slice(None)):
            for k, (ours, theirs) in enumerate(zip(step(compiled, rows, device), step(fn, rows, device), strict=True)):
                if k and name in EXTREMA:
                    assert name == "activations" or ours.isfinite().all()
                    ours = ours.masked_fill(theirs.isnan(), NAN)
                torch.testing.assert_close(ours, theirs, equal_nan=True)


EXTREMA = ("max", "min", "pool", "activations")
