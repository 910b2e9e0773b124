"""The same bits over processes and numbers of threads, and under ``torch.use_deterministic_algorithms``.

Over runs in one process: tests/kernels/test_repeatable.py; dropout with a seed and without:
tests/e2e/test_dropout_layers.py.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import (
    GATConv,
    GCNConv,
    GINEConv,
    MessagePassing,
    PNAConv,
    SAGEConv,
    global_max_pool,
    global_mean_pool,
)
from torch_geometric.utils import softmax

import gnncompile
from gnncompile.runtime import launch
from tests.harness import light

NODES, EDGES, WIDTH, FEATURES = 3000, 20_000, 16, 8


class Scaled(MessagePassing):
    """Parameters that every message reads: of one number, of a number per channel; the second needs sums over all rows,
    the first over all elements as well.
    """

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.scale, self.channels = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, ptr: Tensor | None, size_i: int | None) -> Tensor:
        logits = (x_i * x_j * self.channels).tanh().sum(-1, keepdim=True) * self.scale
        return x_j * softmax(logits, index, ptr, size_i)


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(WIDTH, WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        batch = torch.arange(NODES, device=x.device) // 500
        x = self.conv(x, edge_index)
        return torch.cat([global_mean_pool(x, batch, 6), global_max_pool(x, batch, 6)], -1)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "scaled": Scaled,
    "pooled": Pooled,
    "SAGE max": lambda: SAGEConv(WIDTH, WIDTH, aggr="max"),
    "GAT dropout": lambda: GATConv(WIDTH, 4, heads=4, dropout=0.5),
    "GINE": lambda: GINEConv(nn.Linear(WIDTH, WIDTH), edge_dim=FEATURES),
    "PNA": lambda: PNAConv(WIDTH, WIDTH, ["mean", "min", "max", "std"], ["identity"], torch.tensor([0, 5, 3])),
}


def problem(name: str, device: str = "cpu") -> tuple[nn.Module, list[Tensor]]:
    """A layer and its inputs: a graph with a hub, worth several threads; all from one seed."""
    torch.manual_seed(0)
    edges = torch.randint(0, NODES, (2, EDGES))
    edges[1, : EDGES // 4] = 7
    x, e = torch.randn(NODES, WIDTH), torch.randn(EDGES, FEATURES)
    inputs = [x.to(device).requires_grad_(), edges.to(device), e.to(device)]
    return LAYERS[name]().to(device), inputs if name == "GINE" else inputs[:2]


def step(model: Callable[..., Tensor], layer: nn.Module, inputs: list[Tensor]) -> dict[str, Tensor]:
    """The output and all gradients, by name."""
    torch.manual_seed(1)
    out = model(*inputs)
    leaves = {"x": inputs[0], **dict(layer.named_parameters())}
    cotangent = torch.cos(torch.arange(out.numel(), device=out.device)).view_as(out)
    return {"out": out.detach(), **dict(zip(leaves, torch.autograd.grad(out, leaves.values(), cotangent), strict=True))}


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", LAYERS)
def test_numbers_of_threads(name: str, threads: Callable[[int], None]):
    layer, inputs = problem(name)
    with light("cpp"):
        compiled, results = gnncompile.compile(layer, fullgraph=True), []
        for count in (1, 2, 5):
            threads(count)
            results.append(step(compiled, layer, inputs))
        assert launch.fallbacks == {}
    # Other gradients of weights are products of matrices over all nodes: torch's, which adds by threads, as in eager.
    same = [k for k in results[0] if not k.endswith("weight") or (name, k) == ("GINE", "lin.weight")]
    assert len(same) >= 3
    for other in results[1:]:
        for k in same:
            assert torch.equal(results[0][k], other[k]), k


PROCESS_NAMES = ("GAT dropout",)


def digests() -> list[str]:
    """What the steps of some layers give, as hashes."""
    found = []
    with light("cpp"):
        for name in PROCESS_NAMES:
            layer, inputs = problem(name)
            results = step(gnncompile.compile(layer, fullgraph=True), layer, inputs).values()
            found.append(hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in results)).hexdigest())
    return found


def test_processes(threads: Callable[[int], None], tmp_path: Path):
    """Another process has other hashes of strings, other addresses, and no kernel in its cache."""
    threads(2)
    code = (
        "import torch\nfrom tests.kernels.test_determinism import digests\ntorch.set_num_threads(2)\nprint(*digests())"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7", "GNNCOMPILE_CACHE_DIR": str(tmp_path / "cache")}
    env["PYTHONPATH"] = str(Path(__file__).parents[2])
    other = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert other.stdout.split()[-len(PROCESS_NAMES) :] == digests()


@pytest.mark.parametrize("inductor", [False, True])
def test_deterministic_algorithms(inductor: bool, device: str):
    """Nothing is refused, the bits are the same, and none is of memory that was not initialised, which holds NaN."""
    results = []
    for strict in (False, True, True):
        torch._dynamo.reset()
        layer, inputs = problem("GAT dropout" if inductor else "PNA", device)
        torch.use_deterministic_algorithms(strict)
        try:
            compiled = gnncompile.compile(layer, fullgraph=True, options={"inductor": inductor})
            results.append(step(compiled, layer, inputs))
        finally:
            torch.use_deterministic_algorithms(False)
    assert all(t.isfinite().all() for t in results[1].values())
    for other in (results[0], results[2]):
        for k, value in results[1].items():
            torch.testing.assert_close(value, other[k], rtol=0 if other is results[2] else 1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYERS)
def test_beside_other_work_on_the_gpu(name: str):
    """Kernels of another stream take processors and caches from ours, in another way each time."""
    layer, inputs = problem(name, "cuda")
    compiled = gnncompile.compile(layer, fullgraph=True)
    alone, other = step(compiled, layer, inputs), torch.cuda.Stream()
    matrix = torch.randn(1024, 1024, device="cuda")
    for products in (1, 3, 10, 30):
        with torch.cuda.stream(other):
            for _ in range(products):
                matrix = (matrix @ matrix).sin_()
        for k, value in step(compiled, layer, inputs).items():
            assert torch.equal(alone[k], value), k
        torch.cuda.synchronize()
