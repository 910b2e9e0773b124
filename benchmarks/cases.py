"""The one registry of benchmark cases: which model on which graph."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch_geometric.nn.models import GAT, GCN, GIN, GraphSAGE

from .graphs import GRAPHS, Graph

ModelFactory = Callable[[int], nn.Module]


@dataclass(frozen=True)
class Case:
    """A model with its inputs. `make_model` takes the number of channels."""

    name: str
    suite: str
    graph: Graph
    num_layers: int
    make_model: ModelFactory

    def model(self, device: torch.device, seed: int = 0) -> nn.Module:
        """Builds the model; the same seed gives the same parameters on every device."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make_model(self.graph.channels).to(device)

    def inputs(self, device: torch.device, seed: int = 0) -> tuple[Tensor, ...]:
        """Returns the model's arguments `x`, `[num_nodes, channels]`, float32, and `edge_index`, `[2, num_edges]`."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(self.graph.num_nodes, self.graph.channels, generator=generator)
        return x.to(device), self.graph.make().to(device)

    def __str__(self) -> str:
        return f"{self.name}, {self.num_layers} layers, {self.graph.channels} channels; {self.graph}"


# PyG's own models with their default options: what `num_layers=3` alone gives, self loops included.
GUIDE_MODELS: dict[str, ModelFactory] = {
    "GCN": lambda channels: GCN(channels, channels, num_layers=3),
    "GraphSAGE": lambda channels: GraphSAGE(channels, channels, num_layers=3),
    "GIN": lambda channels: GIN(channels, channels, num_layers=3),
    "GAT": lambda channels: GAT(channels, channels, num_layers=3),
}

CASES = tuple(
    Case(name, "guide", graph, 3, make_model) for graph in GRAPHS.values() for name, make_model in GUIDE_MODELS.items()
)


def select(suite: str, graph: str, models: Iterable[str] | None = None) -> list[Case]:
    """Returns the cases of a suite on one graph, all of them or the named models in the order given.

    Raises:
        ValueError: a model or the graph is not among the suite's cases.
    """
    cases = {case.name: case for case in CASES if case.suite == suite and case.graph.name == graph}
    if not cases:
        raise ValueError(f"graph: got {graph!r}, expected one of {', '.join(GRAPHS)}")
    names = list(cases) if models is None else list(models)
    unknown = [name for name in names if name not in cases]
    if unknown:
        raise ValueError(f"models: got {', '.join(unknown)}, expected some of {', '.join(cases)}")
    return [cases[name] for name in names]
