"""The one registry of benchmark cases: which model on which graph."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn.models import GAT, GCN, GIN, GraphSAGE

from benchmarks.cases.attention import ATTENTION
from benchmarks.cases.graphs import GRAPHS, Graph
from benchmarks.cases.inputs import ORDERS, MakeInputs, plain
from benchmarks.cases.layers import DTYPES, LAYERS, Layer
from benchmarks.cases.limits import Size
from benchmarks.cases.names import UnknownNameError, refuse_unknown
from benchmarks.cases.nested import map_tensors
from benchmarks.cases.science import SCIENCE
from benchmarks.cases.targets import Target
from gnncompile.report.traffic import Work

ModelFactory = Callable[[int], nn.Module]


@dataclass(frozen=True)
class Case:
    """A model with its inputs. `make_model` takes the number of channels.

    Attributes:
        order: the order of the edges, `random` or `sorted` by destination.
        layer: the layer, if the model is a single layer; None for a model of several layers.
    """

    name: str
    suite: str
    graph: Graph
    num_layers: int
    make_model: ModelFactory
    order: str = "random"
    make_inputs: MakeInputs = plain
    layer: Layer | None = None

    def model(self, device: torch.device, seed: int = 0) -> nn.Module:
        """Builds the model; the same seed gives the same parameters on every device."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make_model(self.graph.channels).to(device)

    def inputs(self, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        """Returns the model's arguments: features, edges, and further ones (see `benchmarks.cases.inputs`)."""
        generator = torch.Generator().manual_seed(seed)
        arguments = self.make_inputs(self.graph, self.order, generator)
        return tuple(map_tensors(lambda tensor: tensor.to(device), argument) for argument in arguments)

    def with_gradients(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Makes the features require a gradient, or all floating-point inputs if the layer has `all_grads`."""
        asking = len(inputs) if self.layer is not None and self.layer.all_grads else 1

        def ask(tensor: Tensor) -> Tensor:
            return tensor.requires_grad_(tensor.is_floating_point())

        return (*map_tensors(ask, inputs[:asking]), *inputs[asking:])

    def reference(self, model: nn.Module) -> nn.Module:
        """Returns the module whose results are right: the model itself, or a form of it that needs less memory."""
        if self.layer is None or self.layer.reference is None:
            return model
        return self.layer.reference(model)

    def target(self, device: torch.device) -> Target | None:
        """Returns the target on a device; None if no target was set."""
        if self.layer is None:
            return None
        return self.layer.cuda if device.type == "cuda" else self.layer.cpu

    def ends_process(self, device: torch.device) -> str:
        """Returns why `torch.compile`'s rows must not be run on a device; empty if they may."""
        return self.layer.ends_cuda if self.layer is not None and device.type == "cuda" else ""

    def limit(self) -> Work | None:
        """Returns the least work of one step; None if it was not counted."""
        if self.layer is None:
            return None
        graph = self.graph
        return self.layer.limit(Size(graph.num_nodes, graph.num_edges, graph.channels, graph.num_sources))

    def to(self, precision: str) -> "Case":
        """Returns the case of a single layer in a precision, one of `layers.DTYPES`; float32 keeps the case's name.

        Raises:
            ValueError: the model has several layers.
        """
        if self.layer is None:
            raise ValueError(f"case: got {self.name} of {self.num_layers} layers, expected a single layer")
        layer = self.layer.in_precision(precision)
        name = self.name if precision == "fp32" else f"{self.name} {precision}"
        case = _case_of(layer, name, self.suite, self.graph, self.order)
        return replace(case, num_layers=self.num_layers)

    @property
    def label(self) -> str:
        """A label that is unique among the cases of the graph."""
        return f"{self.name} {self.order}"

    def __str__(self) -> str:
        layers = f"{self.num_layers} layer{'s' * (self.num_layers > 1)}"
        order = ", edges sorted by destination" * (self.order == "sorted")
        return f"{self.name}, {layers}, {self.graph.channels} channels; {self.graph}{order}"


# PyG's own models with `num_layers=3` and otherwise default options, self loops included.
GUIDE_MODELS: dict[str, ModelFactory] = {
    "GCN": lambda channels: GCN(channels, channels, num_layers=3),
    "GraphSAGE": lambda channels: GraphSAGE(channels, channels, num_layers=3),
    "GIN": lambda channels: GIN(channels, channels, num_layers=3),
    "GAT": lambda channels: GAT(channels, channels, num_layers=3),
}


def layer_case(name: str, graph: Graph, order: str = "random") -> Case:
    """Returns the case of one layer on any graph whose number of channels is a multiple of 4."""
    return _case_of(LAYERS[name], name, "layers", graph, order)


def attention_case(name: str, graph: Graph, layer: Layer) -> Case:
    """Returns a case of the suite `attention` on any graph."""
    return _case_of(layer, name, "attention", graph, "sorted")


def science_case(name: str, precision: str, graph: Graph | None = None) -> Case:
    """Returns a case of the suite `science`; its name ends with the precision, one of `layers.DTYPES`.

    Without a graph, it has the model's own size.
    """
    model, graph = SCIENCE[name], graph or SCIENCE[name].graph(name)
    layer = model.layer(precision)
    case = _case_of(layer, f"{name} {precision}", "science", graph, "random")
    return replace(case, num_layers=model.num_layers)


def _case_of(layer: Layer, name: str, suite: str, graph: Graph, order: str) -> Case:
    return Case(name, suite, graph, 1, lambda channels: layer.make(graph), order, layer.make_inputs, layer)


CASES = (
    *(Case(name, "guide", graph, 3, make) for graph in GRAPHS.values() for name, make in GUIDE_MODELS.items()),
    *(layer_case(name, graph, order) for graph in GRAPHS.values() for name in LAYERS for order in ORDERS),
    *(attention_case(*case) for case in ATTENTION),
    *(science_case(name, precision) for name in SCIENCE for precision in DTYPES),
)


def select(
    suite: str, graph: str | None, models: Iterable[str] | None = None, orders: Sequence[str] = ("random",)
) -> list[Case]:
    """Returns the cases of a suite on one graph: all cases, or those of the named models in the given order.

    Without a graph, the cases of all graphs of the suite follow each other; a graph need not have all models.

    Raises:
        UnknownNameError: a model, an order or the graph is not among the suite's cases.
    """
    known_graphs = graphs_of(suite)
    if graph is not None and graph not in known_graphs:
        raise UnknownNameError(f"graph: got {graph!r}, expected one of {', '.join(known_graphs)}")
    chosen = known_graphs if graph is None else [graph]
    found = [case for case in CASES if case.suite == suite and case.graph.name in chosen]
    known = list(dict.fromkeys(case.name for case in found))
    names = known if models is None else list(models)
    refuse_unknown("models", names, known)
    refuse_unknown("order", orders, list(dict.fromkeys(case.order for case in found)))
    cases = {(case.graph.name, case.name, case.order): case for case in found}
    return [cases[key] for key in product(chosen, names, orders) if key in cases]


def science_cases(names: Iterable[str] | None = None, scale: float = 1.0) -> list[Case]:
    """Returns cases of the suite `science`, such as "EGNN bf16", with `scale` times their nodes and edges.

    Without names, these are all models in float32.

    Raises:
        UnknownNameError: a name is not among the suite's cases.
    """
    cases = select("science", None, [f"{model} fp32" for model in SCIENCE] if names is None else names)
    if scale == 1.0:
        return cases
    parts = [case.name.rpartition(" ") for case in cases]
    return [science_case(name, precision, SCIENCE[name].graph(name, scale)) for name, _, precision in parts]


def graphs_of(suite: str) -> list[str]:
    """Returns the names of the graphs that a suite has cases on."""
    return list(dict.fromkeys(case.graph.name for case in CASES if case.suite == suite))
