"""PyTorch Lightning trains compiled models: a compiled LightningModule, and one that holds a compiled network."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch_geometric.nn import SAGEConv

import gnncompile
from gnncompile.capture.compile import callable_of
from tests.harness import kernels

lightning = pytest.importorskip("pytorch_lightning")
ModelCheckpoint = pytest.importorskip("pytorch_lightning.callbacks").ModelCheckpoint

EDGES = torch.tensor([[0, 1, 2, 3, 3, 4, 2, 2, 1], [0, 1, 3, 2, 3, 0, 2, 1, 3]])
X = torch.randn(4, 6, 4, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.lin = SAGEConv(4, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.lin(self.norm(self.conv(x, edge_index)).tanh())


class Task(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.seen = net, []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x, EDGES.to(x.device))

    def training_step(self, x: Tensor, number: int) -> Tensor:
        loss = self(x).square().mean()
        self.log("loss", loss)
        self.seen.append(float(loss.detach()))
        return loss

    def validation_step(self, x: Tensor, number: int) -> None:
        self.log("valid", self(x).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    torch._dynamo.reset()
    with kernels("reference"), warnings.catch_warnings():
        warnings.filterwarnings("ignore")
        yield


def fit(task: Task, folder: Path, epochs: int, resume: str | None = None, **settings: Any) -> str:
    """Trains with validation, clipping and accumulation; returns the last checkpoint."""
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        callbacks=[ModelCheckpoint(dirpath=folder, save_last=True)],
        **settings,
    )
    rows = DataLoader(X, batch_size=None)  # type: ignore[arg-type]
    trainer.fit(task, rows, rows, ckpt_path=resume)
    return str(folder / "last.ckpt")


def compiled_task(net: nn.Module) -> Any:
    return gnncompile.compile(Task(net), options={"inductor": False})


def task_of_compiled(net: nn.Module) -> Any:
    return Task(gnncompile.compile(net, options={"inductor": False}))


@pytest.mark.parametrize("make", [compiled_task, task_of_compiled])
def test_trains_as_eager(make: Callable[[nn.Module], Any], tmp_path: Path):
    """The same losses and weights; stopped, resumed from a checkpoint, and loaded by an eager model."""
    torch.manual_seed(0)
    net = Net()
    eager, task = Task(copy.deepcopy(net)), make(copy.deepcopy(net))
    fit(eager, tmp_path / "eager", 3)
    checkpoint = fit(task, tmp_path / "ours", 2)
    resumed = make(Net())
    checkpoint = fit(resumed, tmp_path / "more", 3, resume=checkpoint)
    torch.testing.assert_close(task.seen + resumed.seen, eager.seen, rtol=1e-5, atol=1e-6)
    loaded = Task(Net())
    loaded.load_state_dict(torch.load(checkpoint, weights_only=False)["state_dict"])
    torch.testing.assert_close(loaded.net.state_dict(), eager.net.state_dict(), rtol=1e-4, atol=1e-5)
    program = callable_of(task) or callable_of(task.net)
    # Training, and validation under inference_mode.
    assert program is not None and 2 <= len(program.backend.captured) <= 3
