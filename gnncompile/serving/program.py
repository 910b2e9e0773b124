"""A captured model as one module of tensors, which ``torch.export`` can trace for all sizes of graphs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import SymInt, Tensor, fx, nn
from torch.utils import _pytree as pytree

from gnncompile._compat.aoti import Condition, conditions
from gnncompile.capture.compile import callable_of, compile
from gnncompile.exc import ArgumentError, ArgumentTypeError, CaptureError, InternalError
from gnncompile.layout.structure_program import StructureProgram

Source = Callable[[list[Any]], Any]
"""Computes an input of a captured graph from the leaves of a call's arguments."""


@dataclass
class Captured:
    """A model as captured, with the call that it was captured for.

    Attributes:
        rest: The graph after the passes.
        structure: The structure program, or None.
        sources: Where each input of the graph comes from, as text: ``L['args'][0]``.
        given: The inputs of the graph in that call, those from the structure program included.
        results: The results of the graph in that call.
        conditions: The conditions on sizes that the capture relies on.
        returned: The result of the model.
    """

    rest: fx.GraphModule
    structure: StructureProgram | None
    sources: list[str]
    given: Sequence[Any]
    results: Sequence[Any]
    conditions: Sequence[Condition] = ()
    returned: Any = None


class _Observer:
    """Receives the sources of a captured graph's inputs, and its structure program."""

    def __init__(self) -> None:
        self.sources: list[str] = []
        self.structure: StructureProgram | None = None
        self.environment: Any = None

    def before(self, ctx: Any, sources: list[str]) -> None:
        self.sources, self.environment = sources, ctx.fake_mode.shape_env

    def after(self, ctx: Any, structure: StructureProgram | None) -> None:
        self.structure = structure


def capture(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: dict[str, Any]) -> Captured:
    """Captures a call of a model as one graph.

    Raises:
        ArgumentError: The model is captured as several graphs.
        CaptureError: The model asks whether a tensor is empty. Dynamo's error for a graph break names the line.
    """
    compiled = compile(model, fullgraph=True, options=options)
    program = callable_of(compiled)
    assert program is not None
    backend, seen = program.backend, []
    observers: list[_Observer] = []

    def observer() -> _Observer:
        observers.append(_Observer())
        return observers[-1]

    def finish(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        here = observers[-1]

        def run(*given: Any) -> Any:
            results = gm.forward(*given)
            seen.append(Captured(gm, here.structure, here.sources, given, results))
            return results

        return run

    backend.observer, backend.finish = observer, finish
    with torch.no_grad():
        returned = compiled(*args, **kwargs)
    if program.empty_is_special:
        raise CaptureError(
            "model: can't be packaged: it asks whether a tensor is empty, and a package has the code of one answer. "
            "Compute the same for empty tensors, or ask outside of the packaged model."
        )
    if len(seen) != 1:
        raise ArgumentError(
            f"model: found {len(seen)} captured graphs, expected one. A package holds a model that computes with "
            "tensors alone; call gnncompile.explain(model) to see what is captured."
        )
    seen[0].returned, seen[0].conditions = returned, conditions(observers[-1].environment)
    return seen[0]


class Program(nn.Module):
    """A captured model: takes the model's arguments, and returns its results.

    Args:
        captured: What was captured.
        model: The model, for the names of its parameters and buffers.
        args: The arguments of the captured call.
        kwargs: Its arguments by name.

    Raises:
        ArgumentTypeError: The model takes or returns something other than tensors.
    """

    def __init__(self, captured: Captured, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.rest = captured.rest
        self.structure = None if captured.structure is None else captured.structure.module
        self.structural = () if captured.structure is None else captured.structure.inputs
        self._constants: dict[Any, str] = {}
        leaves = pytree.tree_leaves((args, kwargs))
        self.equal = _equal_sizes(captured, _paths(args, kwargs))
        self.inputs = self._sources(captured, _paths(args, kwargs), _names(model))
        flat, self.returned = pytree.tree_flatten(captured.returned)
        self.results = [_origin(one, captured.results, leaves) for one in flat]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the graph's inputs, the structure of the graph, and the model's results."""
        leaves = pytree.tree_leaves((args, kwargs))
        for part, other in self.equal:
            torch._check(part(leaves) == other(leaves))
        values: list[Any] = [source(leaves) for source in self.inputs]
        if self.structure is not None:
            made = self.structure(*(values[at] for at in self.structural))
            values += [one.contiguous() for one in made]
        results = self.rest(*values)
        found = [results[at] if inside else leaves[at] for inside, at in self.results]
        return pytree.tree_unflatten(found, self.returned)

    def _sources(self, captured: Captured, paths: dict[str, int], names: dict[Any, str]) -> list[Source]:
        found: list[Source] = []
        for text, given in zip(captured.sources, captured.given, strict=False):
            where = _find(text, paths)
            if where is not None:
                found.append(where)
            elif text.startswith(("L['args']", "L['kwargs']")):
                raise ArgumentTypeError(
                    f"example_inputs: {text} is part of an object. A package takes dense tensors: pass edge_index in "
                    "place of a sparse matrix, and the tensors of data objects."
                )
            elif isinstance(given, Tensor):
                found.append(self._constant(given, names))
            else:
                found.append(_Number(given))
        return found

    def _constant(self, value: Tensor, names: dict[Any, str]) -> Source:
        """Keeps a parameter, a buffer, or another tensor of the model."""
        known = self._constants.get(_place(value)) if value.numel() else None
        if known is None:
            known = f"model_{names.get(_place(value), 'constant')}".replace(".", "_")
            while hasattr(self, known):
                known += "_"
            self.register_buffer(known, value.detach())
            self._constants[_place(value)] = known
        name: str = known
        return lambda leaves: getattr(self, name)


def _place(value: Tensor) -> Any:
    return value.data_ptr(), tuple(value.shape), value.stride(), value.dtype


def _names(model: nn.Module) -> dict[Any, str]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {_place(value): name for name, value in named if value.numel()}


def _paths(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, int]:
    """The position of each leaf of the arguments, by its path as Dynamo writes it."""
    found: dict[str, int] = {}
    pairs: Any = pytree.tree_flatten_with_path((args, kwargs))[0]
    for at, (path, _value) in enumerate(pairs):
        found[f"L['{'kwargs' if path[0].idx else 'args'}']{pytree.keystr(path[1:])}"] = at
    return found


_PARTS = re.compile(
    r"(?P<path>.*?)(?P<part>\.row|\.col)?(?P<sized>\.segment|\.carrier)?(\.size\(\)\[(?P<axis>\d+)\])?$"
)
"""The text of a source: an argument, one of its rows, what a count was attached to or the count, and a size."""


@dataclass(frozen=True)
class _Number:
    """A number that is the same in every call."""

    value: Any

    def __call__(self, leaves: list[Any]) -> Any:
        return self.value


@dataclass(frozen=True)
class _Part:
    """An argument, or a part of it.

    Attributes:
        leaf: The position of the argument among the leaves.
        row: The row of an edge list, or None.
        counts: Whether the part is a tensor with as many rows as the argument has segments.
        axis: The axis whose size is the part, or None.
    """

    leaf: int
    row: int | None
    counts: bool
    axis: int | None

    def __call__(self, leaves: list[Any]) -> Any:
        value = leaves[self.leaf] if self.row is None else leaves[self.leaf][self.row]
        if self.counts:
            value = value.new_empty((count_of(value),), dtype=torch.bool)
        return value if self.axis is None else value.size(self.axis)


def count_of(index: Tensor) -> Any:
    """Returns one more than the largest entry of an index: 0 for an index without entries."""
    least = torch.cat([index, index.new_full((1,), -1)])
    count = least.max().item() + 1
    torch._check(count >= 0)
    return count


def _find(text: str, paths: dict[str, int]) -> _Part | None:
    """The part of an argument that a source names; None if it names a part of the model."""
    parts = _PARTS.match(text)
    assert parts is not None
    at = paths.get(parts["path"])
    if at is None:
        return None
    row = {None: None, ".row": 0, ".col": 1}[parts["part"]]
    return _Part(at, row, parts["sized"] == ".carrier", None if parts["axis"] is None else int(parts["axis"]))


def _origin(value: Any, results: Sequence[Any], leaves: list[Any]) -> tuple[bool, int]:
    """Whether a returned tensor is a result of the graph (else an argument), and its position."""
    for inside, places in ((True, results), (False, leaves)):
        for at, one in enumerate(places):
            if one is value:
                return inside, at
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(
            f"model: returns {type(value).__name__}, expected tensors, in tuples, lists or dicts. A package can return "
            "tensors alone."
        )
    raise InternalError("a returned tensor is no result of the captured graph; please report it")


def _equal_sizes(captured: Captured, paths: dict[str, int]) -> list[tuple[_Part, _Part]]:
    """Returns pairs of sizes of arguments that have one symbol in the captured graph."""
    first: dict[str, _Part] = {}
    found = []
    placeholders = [n for n in captured.rest.graph.nodes if n.op == "placeholder"][: len(captured.sources)]
    for text, node in zip(captured.sources, placeholders, strict=True):
        part = _find(text, paths)
        value: Any = node.meta["val"]
        if part is None or part.counts or not isinstance(value, Tensor):
            continue
        sizes: Any = value.shape
        for axis, size in enumerate(sizes):
            here = replace(part, axis=axis)
            if not isinstance(size, int) and first.setdefault(str(size), here) != here:
                found.append((first[str(size)], here))
    return found


def dynamic_axes(captured: Captured, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[int, ...]]:
    """Returns the axes of each leaf of the arguments whose sizes differ from call to call."""
    leaves, paths = pytree.tree_leaves((args, kwargs)), _paths(args, kwargs)
    found: list[set[int]] = [set() for _ in leaves]
    read: set[int] = set()
    placeholders = [n for n in captured.rest.graph.nodes if n.op == "placeholder"][: len(captured.sources)]
    for text, node in zip(captured.sources, placeholders, strict=True):
        part = _find(text, paths)
        fake: Any = node.meta["val"]
        if part is None or part.counts:
            continue
        read.add(part.leaf)
        before = 0 if part.row is None else 1
        if isinstance(fake, Tensor):
            sizes: Any = fake.shape
            found[part.leaf] |= {before + axis for axis, size in enumerate(sizes) if not isinstance(size, int)}
        elif isinstance(fake, SymInt) and part.axis is not None:
            found[part.leaf].add(before + part.axis)
    # Nothing reads the other arguments, so their rows may be any number.
    return [tuple(sorted(found[at])) if at in read else _rows(leaf) for at, leaf in enumerate(leaves)]


def _rows(value: Tensor) -> tuple[int, ...]:
    is_edge_list = not value.is_floating_point() and value.dim() == 2 and value.size(0) == 2
    return (1,) if is_edge_list else (0,) if value.dim() else ()
