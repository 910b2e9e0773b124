"""The ways a model is run: each is one row of a table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

Runner = Callable[..., Any]


def _gnncompile(**options: Any) -> Callable[[nn.Module], Runner]:
    def build(model: nn.Module) -> Runner:
        # Here, not at the top: a benchmark without this row must run where gnncompile cannot be imported.
        import gnncompile

        runner: Runner = gnncompile.compile(model, **options)
        return runner

    return build


def _compile(**options: Any) -> Callable[[nn.Module], Runner]:
    def build(model: nn.Module) -> Runner:
        runner: Runner = torch.compile(model, **options)
        return runner

    return build


@dataclass(frozen=True)
class Variant:
    """One way to run a model: a name and what it does to the model."""

    name: str
    build: Callable[[nn.Module], Runner]
    devices: tuple[str, ...] = ("cpu", "cuda")
    is_baseline: bool = False  # one of torch.compile's rows, the best of which is to be beaten
    is_ours: bool = False


VARIANTS = (
    Variant("eager", lambda model: model),
    Variant("compile", _compile(), is_baseline=True),
    Variant("compile dynamic", _compile(dynamic=True), is_baseline=True),
    Variant("reduce-overhead", _compile(mode="reduce-overhead"), devices=("cuda",)),
    Variant("gnncompile", _gnncompile(), is_ours=True),
    Variant("gnncompile r-o", _gnncompile(mode="reduce-overhead"), devices=("cuda",), is_ours=True),
)


def for_device(device: torch.device) -> list[Variant]:
    """Returns the variants that make sense on a device, in the order of the table."""
    return [variant for variant in VARIANTS if device.type in variant.devices]


class UnknownNameError(ValueError):
    """Something that the command line names is not known; the exit status is 2."""


class Named(Protocol):
    """What has a name in a table."""

    @property
    def name(self) -> str:
        """The name."""


N = TypeVar("N", bound=Named)


def named(variants: Sequence[N], names: Sequence[str]) -> list[N]:
    """Returns the variants with the given names, in the order of the table.

    Raises:
        UnknownNameError: a name is not among the variants.
    """
    known = [variant.name for variant in variants]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UnknownNameError(f"rows: got {', '.join(unknown)}, expected some of {', '.join(known)}")
    return [variant for variant in variants if variant.name in names]


def chosen(variants: Sequence[N], names: str | None) -> list[N]:
    """Returns the variants that `--rows` names, comma-separated; all of them if it was not given.

    Raises:
        UnknownNameError: a name is not among the variants.
    """
    return list(variants) if not names else named(variants, names.split(","))
