"""What the examples share: flags, data on disk, processes, and eager beside compiled: numbers first, then times."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch_geometric import seed_everything
from torch_geometric.data.dataset import files_exist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # examples run in a checkout, installed or not

ROUNDING = 2e-4  # of the largest value; float32, and sums over many edges


def parser(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """The flags of an example, named as PyG's examples name theirs: these and the ones that all have."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in defaults.items():
        made.add_argument(f"--{name}", type=type(value), default=value, help="default: %(default)s")
    made.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--quick", action="store_true", help="a smoke test: less of everything")
    return made


def parse(made: argparse.ArgumentParser, **quick: float) -> argparse.Namespace:
    """Parses the command line; with `--quick`, nothing is more than in `quick`."""
    args = made.parse_args()
    for name, most in quick.items() if args.quick else ():
        setattr(args, name, min(getattr(args, name), most))
    if "names" in args:
        args.asked_for, args.dataset = args.dataset is not None, args.dataset or args.names[0]
    seed_everything(args.seed)
    return args


def add_dataset(made: argparse.ArgumentParser, names: list[str], offline: str) -> None:
    """Adds flags for public datasets; the first one is the default where it is on disk."""
    made.add_argument(
        "--dataset", choices=[*names, offline], help=f"default: {names[0]} if it is on disk, or {offline}"
    )
    made.add_argument("--root", default="data", help="where public datasets are, default: %(default)s")
    made.add_argument("--download", action="store_true", help="fetch the dataset if it is not there")
    made.set_defaults(names=names, offline=offline)


def load(args: argparse.Namespace, kind: Any, folder: str, **kwargs: Any) -> Any | None:
    """The public dataset that was asked for, or is on disk; None for the offline one. Downloads only if told to."""
    if args.dataset == args.offline:
        return None
    root = Path(args.root, folder)
    try:
        return _offline(kind, args.download)(str(root), **kwargs)
    except FileNotFoundError:
        if args.asked_for:
            sys.exit(f"--dataset: {args.dataset} is not in {root}. Say where by --root, or add --download.")
        print(f"{args.dataset} is not in {root} (--download fetches it): this is {args.offline} instead.")
        args.dataset = args.offline
        return None


def _offline(kind: Any, download: bool) -> Any:
    def fetch(self: Any) -> None:
        if not download and not files_exist(self.raw_paths):
            raise FileNotFoundError(self.raw_dir)
        kind._download(self)

    return type(kind.__name__, (kind,), {"_download": fetch})


def check(eager: nn.Module, compiled: nn.Module, loss: Callable[[nn.Module], Tensor]) -> None:
    """Compares loss and gradients of two models with the same weights; exits where more than rounding differs."""
    found: list[dict[str, Tensor]] = []
    for model in (eager, compiled):
        value = loss(model)
        value.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append({"the loss": value.detach(), **gradients})
        model.zero_grad()
    highest = max(float(g.abs().max()) for g in found[0].values())
    if others := found[0].keys() ^ found[1].keys():
        sys.exit(f"PROBLEM: other parameters have gradients: {', '.join(sorted(others))}")
    apart = {
        name: float((found[1][name] - value).abs().max()) / max(float(value.abs().max()), 1e-2 * highest)
        for name, value in found[0].items()
    }
    worst = max(apart, key=lambda name: apart[name])
    if not apart[worst] <= ROUNDING:
        sys.exit(f"PROBLEM: {worst} differs from eager's by {apart[worst]:.1e} of its largest value")
    print(f"The loss and {len(apart) - 1} gradients agree with eager's: at most {apart[worst]:.0e} apart.\n")


class Steps:
    """Calls training steps, which return their loss; keeps how long each took."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.losses: list[Tensor] = []
        self.times: list[float] = []

    def __call__(self, step: Callable[..., Tensor], *args: Any, **kwargs: Any) -> None:
        start = self._now()
        loss = step(*args, **kwargs)
        self.times.append(self._now() - start)
        self.losses.append(loss.detach())

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @property
    def ms(self) -> float:
        return 1000 * median(self.times[len(self.times) // 3 :])  # the first ones compile


def compare(fits: dict[str, Callable[[Steps], float]], device: torch.device, what: str, within: float) -> int:
    """Trains in each way; prints time, loss and result; returns the exit status: 1 if results are not `within`."""
    print(f"{'':12}{'ms/step':>10}{'faster':>9}{'first loss':>13}{'last loss':>12}{what:>20}", flush=True)
    results: list[float] = []
    times: list[float] = []
    for name, fit in fits.items():
        steps = Steps(device)
        results.append(fit(steps))
        times.append(steps.ms)
        losses = f"{steps.losses[0].item():13.4f}{steps.losses[-1].item():12.4f}"
        print(f"{name:12}{times[-1]:10.2f}{times[0] / times[-1]:8.2f}x{losses}{results[-1]:20.4f}", flush=True)
    if all(abs(result - results[0]) <= within for result in results):
        print(f"All agree: {what} within {within} of eager's.")
        return 0
    print(f"PROBLEM: {what} differs from eager's by more than {within}")
    return 1


def join_processes(device: str, command: str) -> torch.device:
    """Joins the other processes, and returns what this one computes on: its GPU (NCCL), or its CPU cores (gloo).

    Args:
        device: "cuda" or "cpu".
        command: The program and its arguments, for the message if torchrun has not started it.
    """
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"Start this with torchrun: torchrun --nproc-per-node 2 {command}")
    if device == "cpu":
        torch.set_num_threads(max((os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"]), 1))
        dist.init_process_group("gloo")
        return torch.device("cpu")
    gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl", device_id=gpu)
    return gpu
