"""The ways to serve a model: in the process that compiled it, or from a package."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.measuring.clients import Serve


@dataclass(frozen=True)
class ServingRow:
    """One way to serve.

    Attributes:
        name: the name of the row.
        make: makes a function that answers requests in this process; None for a row with a package.
        package: who made the package that another process loads: "AOTInductor", "gnncompile", or "" for no package.
        is_ours: whether a failure of the row is one of gnncompile.
        devices: the types of devices that the row serves on.
        in_one_thread: whether only the thread that compiled the model can ask.
        keeps_layout: whether the caller keeps the layouts of the graphs.
        in_cpp: whether the server is the one in C++.
    """

    name: str
    make: Callable[[nn.Module], Serve] | None = None
    package: str = ""
    is_ours: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")
    in_one_thread: bool = False
    keeps_layout: bool = False
    in_cpp: bool = False


def _eager(model: nn.Module) -> Serve:
    return model


def _compiled(model: nn.Module) -> Serve:
    return torch.compile(model, dynamic=True)


def _recorded(model: nn.Module) -> Serve:
    # CUDA graphs, one for each size of request.
    return torch.compile(model, dynamic=True, mode="reduce-overhead")


def _gnncompile(model: nn.Module) -> Serve:
    import gnncompile

    return gnncompile.compile(model)


OURS = "gnncompile"
"""The packages of gnncompile."""

ROWS = (
    ServingRow("eager", _eager),
    ServingRow("torch.compile", _compiled),
    # Torch keeps CUDA graphs in the thread that recorded them.
    ServingRow("torch.compile reduce-overhead", _recorded, devices=("cuda",), in_one_thread=True),
    ServingRow("AOTInductor", package="AOTInductor"),
    ServingRow("gnncompile", _gnncompile, is_ours=True),
    ServingRow("package", package=OURS, is_ours=True),
    ServingRow("package with kept layout", package=OURS, is_ours=True, keeps_layout=True),
    ServingRow("AOTInductor in C++", package="AOTInductor", in_cpp=True),
    ServingRow("package in C++", package=OURS, is_ours=True, in_cpp=True),
    ServingRow("package with kept layout in C++", package=OURS, is_ours=True, keeps_layout=True, in_cpp=True),
)


def for_device(device: torch.device, has_server: bool) -> list[ServingRow]:
    """Returns the rows that serve on a device, in the order of the table.

    Args:
        device: the device.
        has_server: whether there is a server in C++.
    """
    return [row for row in ROWS if device.type in row.devices and (has_server or not row.in_cpp)]
