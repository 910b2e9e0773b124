"""Makes cases that change one option of a layer's constructor or call, from the signatures of PyG's classes.

Only cases without a variant in brackets are varied. Whether eager PyG accepts the option shows when the case runs.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch_geometric.nn import MessagePassing

from gnncompile.support.case import CHANNELS, EDGE_CHANNELS, Absent, Argument, Case, Graph

AGGREGATIONS = ("sum", "mean", "max", "min", "mul", "var", "std", "median", "softmax", "powermean", ["mean", "max"])
"""Values to try for the option `aggr`."""

_NORMS = (None, "batch_norm", "layer_norm", "graph_norm", "instance_norm", "pair_norm", "graph_size_norm")
_NAMED: dict[str, tuple[Any, ...]] = {
    "aggr": AGGREGATIONS,
    "act": ("gelu", "leaky_relu", None),
    "edge_dim": (EDGE_CHANNELS,),
    "fill_value": (0.5,),
    "jk": ("cat", "max", "lstm", "last"),
    "norm": _NORMS,
    "normalization": (None, "sym", "rw"),
    "num_bases": (2,),
    "num_blocks": (2,),
    "min_score": (0.05,),
}
"""Values to try for options whose values follow neither from the default nor from the documentation."""

_COUNTS = re.compile(r"heads$|^num_|^n_layers|layers$|^K$|^groups$|^towers$|blocks$|^expansion$|^processing_steps$")
_NO_COUNT = re.compile(r"nodes|types|relations|targets|classes|features|workers|samples|channels|clusters|neighbors")
_NO_OPTIONS = {
    "self",
    "device",
    "verbose",
    "cached",
    "sparse",
    "add_graph_virtual",
    "is_undirected",
    "deg",
    "is_sorted",
}
_CALL_OPTIONS: dict[str, Argument] = {
    "edge_weight": "edge_weight",
    "edge_attr": "edge_attr",
    "batch": "batch",
    "size": lambda graph: (graph.nodes, graph.nodes),
    "return_attention_weights": lambda graph: True,
}
"""Optional arguments of a call, with the values to pass."""


def options_of(section: str, cases: Sequence[Case | Absent], name: str = "") -> list[Case]:
    """Returns the cases of a section's layers with one option changed.

    Args:
        section: The package of ``torch_geometric.nn``, such as ``"conv"``.
        cases: The cases of the section.
        name: The name of a case, whose layer is the only one to return cases for; "" for all layers.
    """
    if section == "utils":
        return []
    module = importlib.import_module(f"torch_geometric.nn.{section}")
    found: list[Case] = []
    for case in cases:
        if name and name.split(" [")[0] != case.name:
            continue
        kind = getattr(module, case.name, None) if isinstance(case, Case) else None
        if isinstance(case, Case) and inspect.isclass(kind) and issubclass(kind, nn.Module):
            found += [*_constructed(case, kind), *_called(case, kind)]
    return found


def _constructed(case: Case, kind: type[nn.Module]) -> Iterator[Case]:
    """Yields a case for each value of each option of the constructor."""
    given: dict[str, Any] = {}
    with _changed(kind, given.update):
        case.make()
    for name, value in _values(kind, given):
        changed = dataclasses.replace(
            case,
            name=f"{case.name} [{name}={value!r}]".replace("'", ""),
            make=functools.partial(_make, case.make, kind, name, value),
            drawn="dropout" in name,
        )
        if name == "edge_dim":
            changed = dataclasses.replace(changed, named={**case.named, "edge_attr": "edge_attr"})
        if name == "in_channels":
            changed = dataclasses.replace(changed, inputs=(_both_ends, *case.inputs[1:]))
        yield changed


def _both_ends(graph: Graph) -> Any:
    return graph.x, graph.x0


def _called(case: Case, kind: type[nn.Module]) -> Iterator[Case]:
    """Yields a case for each optional argument of the call that the given case does not pass."""
    parameters = list(inspect.signature(kind.forward).parameters)[1:]
    for name in parameters[len(case.inputs) :]:
        if name in _CALL_OPTIONS and name not in case.named:
            named = {**case.named, name: _CALL_OPTIONS[name]}
            yield dataclasses.replace(case, name=f"{case.name} [with {name}]", named=named)


def _make(make: Callable[[], Any], kind: type[nn.Module], name: str, value: Any) -> Any:
    with _changed(kind, lambda arguments: arguments.update({name: value})):
        return make()


@contextmanager
def _changed(kind: type[nn.Module], change: Callable[[dict[str, Any]], object]) -> Iterator[None]:
    """Within the block, changes the arguments of the constructor for the first object of exactly this class."""
    original, own, done = kind.__init__, "__init__" in vars(kind), False
    signature = inspect.signature(original)

    @functools.wraps(original)
    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal done
        if not done and type(self) is kind:
            done = True
            bound = signature.bind(self, *args, **kwargs)
            arguments = dict(bound.arguments)
            rest = next((n for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD), None)
            arguments.update(arguments.pop(rest, {}) if rest else {})
            del arguments["self"]
            positional = next((n for n, p in signature.parameters.items() if p.kind is p.VAR_POSITIONAL), None)
            more = arguments.pop(positional, ()) if positional else ()
            change(arguments)
            original(self, *more, **arguments)
        else:
            original(self, *args, **kwargs)

    kind.__init__ = start  # type: ignore[method-assign]
    try:
        yield
    finally:
        if own:
            kind.__init__ = original  # type: ignore[method-assign]
        else:
            del kind.__init__


def _values(kind: type[nn.Module], given: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields each option of a constructor with values that differ from the given one."""
    parameters = inspect.signature(kind.__init__).parameters
    for name, parameter in parameters.items():
        now = given.get(name, parameter.default)
        if name in _NO_OPTIONS or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        wanted = [*_values_of(kind, name, now, str(parameter.annotation)), *_documented(kind, name, now)]
        seen: list[Any] = []
        for value in wanted:
            if value != now and value not in seen:
                seen.append(value)
                yield name, value
    if issubclass(kind, MessagePassing) and any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        yield "flow", "target_to_source"
        if "aggr" not in parameters and "aggr" not in given:
            yield "aggr", "max"


def _values_of(kind: type[nn.Module], name: str, now: Any, annotation: str) -> Sequence[Any]:
    if isinstance(now, bool):
        return [not now]
    if "bool" in annotation and now is None:
        return [True, False]
    if name == "in_channels" and isinstance(now, int) and "uple" in annotation:
        return [(CHANNELS, CHANNELS)]
    if name == "aggr" and not isinstance(now, (str, list)):
        return []
    if name in _NAMED:
        return _NAMED[name]
    if isinstance(now, float | int) and "dropout" in name:
        return [0.5]
    if isinstance(now, int) and _COUNTS.search(name) and not _NO_COUNT.search(name):
        return [1, 4]
    return []


def _documented(kind: type[nn.Module], name: str, now: Any) -> list[str]:
    """Returns the strings in quotes that PyG's documentation lists for an option whose value is a string or None."""
    if not isinstance(now, str | None) or name in _NAMED:
        return []
    text = inspect.getdoc(kind) or ""
    entry = re.search(rf"^ *{name} \([^\n]*\n?(?:(?! *\w+ \().*\n?)*", text[text.find("Args:") :], re.MULTILINE)
    return re.findall(r'"(\w[\w-]*)"', entry[0]) if entry else []
