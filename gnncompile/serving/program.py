"""A captured model as one module of tensors, which ``torch.export`` can trace for all sizes of graphs."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import SymInt, Tensor, fx, nn
from torch.utils import _pytree as pytree

from gnncompile import _compat
from gnncompile._compat.aoti import Condition, conditions
from gnncompile.capture.compile import callable_of, compile
from gnncompile.exc import ArgumentError, ArgumentTypeError, CaptureError, GnncompileError, InternalError
from gnncompile.layout.structure_program import StructureProgram
from gnncompile.passes.analysis import known_size

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
        CaptureError: The model has a graph break, asks whether a tensor is empty, reads no tensor, or does not run with
            these arguments.
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
    returned = _captured_call(compiled, args, kwargs)
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
    if observers[-1].environment is None:
        raise CaptureError(
            "model: can't be packaged: it reads no tensor among its arguments, at most their sizes. Leave it to the "
            "program that serves."
        )
    seen[0].returned, seen[0].conditions = returned, conditions(observers[-1].environment)
    return seen[0]


def _captured_call(compiled: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a model, which captures it. Errors of a capture become a CaptureError, which names the line."""
    try:
        with torch.no_grad():
            return compiled(*args, **kwargs)
    except Exception as error:
        found = _compat.backend_error(error)
        if found is not error and isinstance(found, GnncompileError):
            raise found from None
        if not _compat.is_of_a_capture(error):
            raise
        why, advice = _OPERATION if _compat.is_of_an_operation(error) else _BREAK
        place = _compat.place_of(error)
        where = "" if place == "?" else f" at {place}"
        raise CaptureError(f"model: can't be packaged{where}: {why} ({_compat.reason_of(error)}). {advice}") from error


_BREAK = (
    "it is not captured as one graph",
    "Write the line with torch's operations, without a decision by values, or leave it out of the packaged model.",
)
_OPERATION = (
    "an operation refuses the example inputs",
    "Pass inputs with which the model itself runs.",
)
"""Why a model is not captured, and what to do."""


class Program(nn.Module):
    """A captured model: takes the model's arguments, and returns its results.

    Args:
        captured: What was captured.
        model: The model, for the names of its parameters and buffers.
        args: The arguments of the captured call.
        kwargs: Its arguments by name.
        only_structure: Whether only the structure program will run, so that other inputs are not kept.

    Raises:
        ArgumentTypeError: The model takes or returns something other than tensors.
    """

    def __init__(
        self,
        captured: Captured,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        only_structure: bool = False,
    ) -> None:
        super().__init__()
        self.rest = None if only_structure else captured.rest
        self.structure = None if captured.structure is None else captured.structure.module
        self.structural = () if captured.structure is None else captured.structure.inputs
        self._constants: dict[Any, str] = {}
        leaves = pytree.tree_leaves((args, kwargs))
        self.equal = _equal_sizes(captured, _paths(args, kwargs))
        read = self.structural if only_structure else range(len(captured.sources))
        self.inputs = self._sources(captured, read, _paths(args, kwargs), _names(model))
        flat, self.returned = pytree.tree_flatten(captured.returned)
        self.results = [_origin(one, captured.results, leaves) for one in flat]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the graph's inputs, the structure of the graph, and the model's results."""
        leaves = pytree.tree_leaves((args, kwargs))
        self.check_sizes(leaves)
        return self.results_of(leaves, self.layout(leaves))

    def check_sizes(self, leaves: list[Any]) -> None:
        """Tells the trace which sizes of arguments are equal."""
        for part, other in self.equal:
            torch._check(part(leaves) == other(leaves))

    def layout(self, leaves: list[Any]) -> list[Tensor]:
        """Computes the structure of the graph: the inputs that the rest gains."""
        if self.structure is None:
            return []
        return [one.contiguous() for one in self.structure(*(self.inputs[at](leaves) for at in self.structural))]

    def results_of(self, leaves: list[Any], layout: list[Tensor]) -> Any:
        """Computes the model's results, given the structure of the graph."""
        assert self.rest is not None
        results = self.rest(*(self.inputs[at](leaves) for at in sorted(self.inputs)), *layout)
        found = [results[at] if inside else leaves[at] for inside, at in self.results]
        return pytree.tree_unflatten(found, self.returned)

    def structural_parts(self) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the leaves whose entries the structure program reads, and the sizes that it reads."""
        parts = [one for one in (self.inputs[at] for at in self.structural) if isinstance(one, _Part)]
        read = sorted({one.leaf for one in parts if one.axis is None or one.counts})
        sizes = {
            (one.leaf, one.axis + (one.row is not None)) for one in parts if one.axis is not None and not one.counts
        }
        return read, sorted(sizes)

    def _sources(
        self, captured: Captured, read: Iterable[int], paths: dict[str, int], names: dict[Any, str]
    ) -> dict[int, Source]:
        found: dict[int, Source] = {}
        for at in read:
            text, given = captured.sources[at], captured.given[at]
            where = _find(text, paths)
            if where is not None:
                found[at] = where
            elif text.startswith(("L['args']", "L['kwargs']")):
                raise ArgumentTypeError(
                    f"example_inputs: {text} is part of an object. A package takes dense tensors: pass edge_index in "
                    "place of a sparse matrix, and the tensors of data objects."
                )
            elif isinstance(given, Tensor):
                found[at] = self._constant(given, names)
            else:
                found[at] = _Number(given)
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


def _arguments(captured: Captured, paths: dict[str, int]) -> Iterator[tuple[_Part, Any]]:
    """Yields the inputs of a captured graph that are parts or sizes of arguments, with their fake values."""
    placeholders = [n for n in captured.rest.graph.nodes if n.op == "placeholder"][: len(captured.sources)]
    for text, node in zip(captured.sources, placeholders, strict=True):
        part = _find(text, paths)
        if part is not None and not part.counts:
            yield part, node.meta["val"]


def _equal_sizes(captured: Captured, paths: dict[str, int]) -> list[tuple[_Part, _Part]]:
    """Returns pairs of sizes of arguments that have one symbol in the captured graph."""
    first: dict[str, _Part] = {}
    found = []
    for part, value in _arguments(captured, paths):
        sizes: Any = value.shape if isinstance(value, Tensor) else ()
        for axis, size in enumerate(sizes):
            here = replace(part, axis=axis)
            if not isinstance(size, int) and first.setdefault(str(size), here) != here:
                found.append((first[str(size)], here))
    return found


def widths(captured: Captured, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[str]:
    """Returns the symbols of sizes that are numbers of features alone.

    These are the sizes of last axes, as of integer features ``[num_edges, 3]``, and of other axes but the first that
    the model takes for a number, as of heads ``[num_nodes, 8, 32]``.
    """
    leaves, columns, rows = pytree.tree_leaves((args, kwargs)), set[str](), set[str]()
    for part, fake in _arguments(captured, _paths(args, kwargs)):
        has_columns = part.row is None and not _is_edge_list(leaves[part.leaf])
        sizes: Any = fake.shape if isinstance(fake, Tensor) else ()
        for axis, size in enumerate(sizes):
            if isinstance(size, SymInt):
                counts_features = axis == len(sizes) - 1 or known_size(size) is not None
                is_width = has_columns and axis > 0 and counts_features
                (columns if is_width else rows).add(_compat.first_symbol(size))
    return columns - rows


def dynamic_axes(
    captured: Captured, args: tuple[Any, ...], kwargs: dict[str, Any], fixed: Collection[str] = ()
) -> list[tuple[int, ...]]:
    """Returns the axes of each leaf of the arguments whose sizes differ from call to call.

    Args:
        captured: The captured model.
        args: The arguments of the captured call.
        kwargs: Its arguments by name.
        fixed: The symbols of sizes that stay as they are.
    """
    leaves, paths = pytree.tree_leaves((args, kwargs)), _paths(args, kwargs)
    found: list[set[int]] = [set() for _ in leaves]
    read: set[int] = set()
    for part, fake in _arguments(captured, paths):
        read.add(part.leaf)
        before = 0 if part.row is None else 1
        if isinstance(fake, Tensor):
            found[part.leaf] |= {before + at for at in dynamic_dimensions(fake) if str(fake.shape[at]) not in fixed}
        elif isinstance(fake, SymInt) and part.axis is not None and known_size(fake) is None and str(fake) not in fixed:
            found[part.leaf].add(before + part.axis)
    # Nothing reads the other arguments, so their rows may be any number.
    return [tuple(sorted(found[at])) if at in read else _rows(leaf) for at, leaf in enumerate(leaves)]


def dynamic_dimensions(fake: Tensor) -> tuple[int, ...]:
    """Returns the dimensions of a fake tensor whose sizes are no numbers.

    Where the captured graph had as many nodes as features, the number of features is a symbol that stands for a number.
    """
    return tuple(axis for axis, size in enumerate(fake.shape) if known_size(size) is None)


def layout_of(captured: Captured) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the results of the structure program in the captured call, and their fake values."""
    assert captured.structure is not None
    count = len(captured.sources)
    placeholders = [n for n in captured.rest.graph.nodes if n.op == "placeholder"][count:]
    return list(captured.given[count:]), [node.meta["val"] for node in placeholders]


def _rows(value: Tensor) -> tuple[int, ...]:
    return (1,) if _is_edge_list(value) else (0,) if value.dim() else ()


def _is_edge_list(value: Tensor) -> bool:
    return not value.is_floating_point() and value.dim() == 2 and value.size(0) == 2
