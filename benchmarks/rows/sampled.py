"""The ways to train on sampled neighbourhoods: each is a loader and a step."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from benchmarks.cases.sampled import SampledCase, graph, neighbour_loader, numpy_sampler, sampled_by_numpy
from benchmarks.measuring.losses import Make, plain_loop, whole_step
from benchmarks.rows.variants import VARIANTS

Sample = Callable[[Tensor], int]
"""Samples around seeds and returns the number of edges."""

Load = Callable[[SampledCase, torch.device, int], Iterable[Data]]
"""Returns a loader, given the case, the device and the number of processes that load."""


CACHED = 5
"""A cache has the bytes of one in so many features."""


@dataclass(frozen=True)
class SampledRow:
    """One way to train.

    Attributes:
        name: the name of the row.
        make: makes a step of a model.
        load: returns the loader.
        alone: returns a sampler that is measured alone, in one thread; None if there is none.
        devices: the types of devices that the row trains on.
        is_ours: whether a failure of the row is one of gnncompile.
        is_together: whether the row is measured on several processes, unless rows are chosen.
    """

    name: str
    make: Make
    load: Load
    alone: Callable[[SampledCase], Sample] | None = None
    devices: tuple[str, ...] = ("cuda",)
    is_ours: bool = True
    is_together: bool = False


class _Moved:
    """A loader whose mini-batches are moved to a device, as PyG's examples do."""

    def __init__(self, source: Iterable[Data], device: torch.device) -> None:
        self._source, self._device = source, device

    def __iter__(self) -> Iterator[Data]:
        return (batch.to(self._device, non_blocking=True) for batch in self._source)


def _by_numpy(case: SampledCase, device: torch.device, workers: int) -> Iterable[Data]:
    return sampled_by_numpy(case, workers)


def _by_pyg(case: SampledCase, device: torch.device, workers: int) -> Iterable[Data]:
    """PyG's loader with our sampler for CPUs, which needs no further library."""
    from gnncompile.sampling.pyg import NeighborSampler

    sampler = NeighborSampler(_plain(case), list(case.fan_outs), is_sorted=True)
    pins = device.type == "cuda"
    return _Moved(neighbour_loader(case, workers, neighbor_sampler=sampler, pin_memory=pins), device)


def _by_gnncompile(cached: bool = False, **how: Any) -> Load:
    """Returns what makes a `gnncompile.loader` with these arguments; with `cached` also a cache of the features."""

    def load(case: SampledCase, device: torch.device, workers: int) -> Iterable[Data]:
        import gnncompile

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*without a 'pyg-lib' installation")
            source = neighbour_loader(case, workers)
        more = {"cache": graph(case).x.nbytes // CACHED} if cached else {}
        return gnncompile.loader(source, device=device, **how, **more)

    return load


def _plain(case: SampledCase) -> Data:
    data = graph(case)
    return Data(x=data.x, y=data.y, edge_index=data.edge_index)


def _numpy_alone(case: SampledCase) -> Sample:
    sampler = numpy_sampler(case)
    return lambda seeds: int(sampler(seeds.tolist()).edge_index.size(1))


def _gnncompile_alone(case: SampledCase) -> Sample:
    from gnncompile.sampling.pyg import NeighborSampler

    sampler = NeighborSampler(_plain(case), list(case.fan_outs), is_sorted=True)
    return lambda seeds: len(sampler._sample(seeds).row)


_BUILDS = {variant.name: variant.build for variant in VARIANTS}
_EAGER, _OURS = plain_loop(_BUILDS["eager"]), plain_loop(_BUILDS["gnncompile"])

ROWS = (
    SampledRow("eager + NumPy", _EAGER, _by_numpy, _numpy_alone, ("cpu",), is_ours=False),
    SampledRow("eager + our sampler", _EAGER, _by_gnncompile(), _gnncompile_alone, ("cpu",), is_together=True),
    SampledRow("gnncompile", _OURS, _by_gnncompile(), _gnncompile_alone, ("cpu",)),
    SampledRow("eager + PyG's loop", _EAGER, _by_pyg),
    SampledRow("TrainStep + CPU sampler", whole_step, _by_gnncompile(buckets=True, sampler="cpu")),
    SampledRow("eager + GPU sampler", _EAGER, _by_gnncompile(sampler="device")),
    SampledRow("TrainStep + GPU sampler", whole_step, _by_gnncompile(buckets=True, sampler="device"), is_together=True),
    SampledRow(
        "TrainStep + host features", whole_step, _by_gnncompile(buckets=True, sampler="device", features={"x": "host"})
    ),
    SampledRow(
        "TrainStep + cached features",
        whole_step,
        _by_gnncompile(cached=True, buckets=True, sampler="device", features={"x": "host"}),
    ),
)
