"""The ways to run a model: eager, `torch.compile` and gnncompile. Each is a row of a table."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

Runner = Callable[..., Any]


def _eager(model: nn.Module) -> Runner:
    return model


def _gnncompile(model: nn.Module, **options: Any) -> Runner:
    # Imported here: a benchmark without this row must run even if gnncompile cannot be imported.
    import gnncompile

    runner: Runner = gnncompile.compile(model, **options)
    return runner


def _compile(model: nn.Module, **options: Any) -> Runner:
    runner: Runner = torch.compile(model, **options)
    return runner


PARTITIONED = "partitioned_scatter_enabled"
"""An option of Inductor, off by default: it sums by index into several buffers, so that fewer atomic additions collide.
Inductor applies it to `index_put` with accumulation (such as `index_add`, and the gradient of `x[index]`) if sizes are
static."""


def has_option(name: str) -> bool:
    """Whether this torch's Inductor has an option; True for an empty name."""
    if not name:
        return True
    import torch._inductor

    return name in torch._inductor.list_options()


@dataclass(frozen=True)
class Variant:
    """One way to run a model: a name and what it does to the model. `build` can be pickled, for other processes."""

    name: str
    build: Callable[[nn.Module], Runner]
    devices: tuple[str, ...] = ("cpu", "cuda")
    is_baseline: bool = False  # a row of torch.compile; the best of these rows is to be beaten
    is_ours: bool = False
    option: str = ""  # an option of Inductor that some releases of torch lack


VARIANTS = (
    Variant("eager", _eager),
    Variant("compile", _compile, is_baseline=True),
    Variant("compile dynamic", partial(_compile, dynamic=True), is_baseline=True),
    Variant(
        "partitioned scatter",
        partial(_compile, options={PARTITIONED: True}),
        devices=("cuda",),
        is_baseline=True,
        option=PARTITIONED,
    ),
    Variant("reduce-overhead", partial(_compile, mode="reduce-overhead"), devices=("cuda",)),
    Variant("gnncompile", _gnncompile, is_ours=True),
    Variant("gnncompile r-o", partial(_gnncompile, mode="reduce-overhead"), devices=("cuda",), is_ours=True),
)


def for_device(device: torch.device) -> list[Variant]:
    """Returns the variants that make sense on a device and that torch has, in the order of the table."""
    return [variant for variant in VARIANTS if device.type in variant.devices and has_option(variant.option)]
