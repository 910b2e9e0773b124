"""`python -m benchmarks.measuring.answers`: a process that loads a package without gnncompile, and answers requests."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor.package.package import load_package

from benchmarks.measuring import processes
from benchmarks.measuring.clients import Served, measure


def measure_package(
    path: str,
    requests: Sequence[tuple[Tensor, ...]],
    expected: Tensor,
    clients: Sequence[int],
    seconds: float,
    device: torch.device,
    limit: float,
    keeps_layout: bool = False,
) -> list[Served]:
    """Measures a package in another process; see `clients.measure`.

    Args:
        path: the package.
        requests: the arguments of each request, on the CPU.
        expected: all answers in float64, on the CPU.
        clients: the numbers of clients.
        seconds: how long each number of clients asks.
        device: the device that answers. The requests are copied to it before any time is taken.
        limit: the seconds after which the process is killed, besides the time of asking.
        keeps_layout: whether the layout of each graph is made before any time is taken, and kept.

    Raises:
        ProcessError: the process did not end in time, or had an error.
    """
    asked = Path(path).with_name("asked.pt")
    torch.save({"requests": list(requests), "expected": expected}, asked)
    settings = {
        "package": path,
        "asked": str(asked),
        "clients": list(clients),
        "seconds": seconds,
        "device": str(device),
        "keeps_layout": keeps_layout,
    }
    return [Served(**one) for one in processes.run("answers", settings, limit + seconds * len(clients))]


def _serve(settings: dict[str, Any]) -> list[dict[str, Any]]:
    device, path, runners = torch.device(settings["device"]), settings["package"], max(settings["clients"])
    place = int(settings["device"].partition(":")[2] or -1)
    asked = torch.load(settings["asked"])
    requests = [tuple(one.to(device) for one in request) for request in asked["requests"]]
    # One runner for each thread: calls of one runner wait for each other.
    name = "with_layout" if settings["keeps_layout"] else "model"
    serve = load_package(path, name, num_runners=runners, device_index=place)
    if settings["keeps_layout"]:
        layout_of = load_package(path, "layout", device_index=place)
        with torch.no_grad():
            requests = [(layout_of(*request), *request) for request in requests]
    found = measure(serve, requests, asked["expected"], settings["clients"], settings["seconds"], device)
    if "gnncompile" in sys.modules:
        raise RuntimeError("the process that serves a package has imported gnncompile")
    return [asdict(one) for one in found]


if __name__ == "__main__":
    sys.exit(processes.main(_serve))
