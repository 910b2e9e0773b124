"""Checks a call's inputs, and takes them apart for the compiled code.

An edge list enters as two 1-D tensors (:mod:`gnncompile.capture.edge_rows`). The strides of ``[2, num_edges]``, and the
offset of its second row, depend on the number of edges: as one tensor, a graph without edges would cost a recompile.

Objects that hold tensors are taken apart by :mod:`gnncompile.capture.containers`, sparse matrices by
:mod:`gnncompile.substitutes.sparse`. An ``EdgeIndex`` or ``Index`` enters as a plain tensor.

An index, such as a batch vector, may enter with its number of segments, as the first dimension of a second tensor. The
number is read from the data once per distinct index, outside the compiled code.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric import EdgeIndex, Index
from torch_geometric.typing import SparseTensor

from gnncompile import _compat
from gnncompile.capture import edge_rows, minibatches, parts
from gnncompile.capture.containers import Collection, Opened, is_container, open_container, put_together, watch
from gnncompile.exc import ArgumentError, ArgumentTypeError
from gnncompile.layout.batch_metadata import BatchMetadata, Bucketed, Count, attached
from gnncompile.layout.halo import HaloPlan, name_rows, plan_of
from gnncompile.layout.identity_cache import IdentityCache, Seen
from gnncompile.substitutes import sparse

EDGE_INDEX = "edge_index"
_INTEGERS = (torch.int64, torch.int32)
_LEFT_AS_THEY_ARE = (type(None), float, str)
_VALUES: tuple[type[Any], ...] = (type({}.values()), type(OrderedDict().values()))
"""Views of dict values, such as ``edge_index_dict.values()``. They enter as tuples: Dynamo can't iterate over them."""
_IN_A_ROW: tuple[type[Any], ...] = (tuple, list, *_VALUES)


class Sized(NamedTuple):
    """An index with its number of segments, which is the first dimension of `carrier`.

    `carrier` is ``[num_segments]``, or ``[num_segments, longest, 0]`` with the length of the longest segment.
    """

    segment: Tensor
    carrier: Tensor


class EdgePair(NamedTuple):
    """An edge list ``[2, num_edges]`` as its two rows."""

    row: Tensor | Sized
    col: Tensor | Sized


class SizedEdges(NamedTuple):
    """An ``EdgeIndex``: its edge list, and per known size n of ``sparse_size`` a tensor ``[n, 0]``."""

    edges: EdgePair | Tensor
    tables: tuple[Tensor | None, Tensor | None]


@dataclass
class FlatInputs:
    """The record of what :func:`split` took apart in one call's inputs.

    Attributes:
        objects: Each object that holds tensors, with its copy.
        collections: Each list and dict of the caller, with what enters for it, and a copy of that.
        kinds: The tensor classes and layouts of inputs that enter as plain tensors.
        batch: The mini-batch to whose bucket the call is padded; None without padding.
        largest: The largest integer argument that a padded call may have.
        edges: The edge lists that were taken apart, by the ``id`` of their first rows.
        group: The process group of a call over one part of a graph, by name; None for whole graphs.
        plans: The plans of the part's edge lists.
        rows: The name and the number of rows of each tensor of a call over one part.
    """

    objects: list[tuple[Any, Opened]] = field(default_factory=list)
    collections: list[Collection] = field(default_factory=list)
    kinds: set[Any] = field(default_factory=set)
    batch: Bucketed | None = None
    largest: int = 0
    edges: dict[int, Tensor] = field(default_factory=dict)
    group: str | None = None
    plans: list[HaloPlan] = field(default_factory=list)
    rows: list[tuple[str, int]] = field(default_factory=list)


class Field(str):
    """The name of a field as part of a path; a plain string is a dict key."""

    __slots__ = ()


Path = tuple[Any, Any] | str
"""The place of a value in the arguments: a name such as ``"args"``, or its container's path and its key there."""


def split(value: Any, path: Path, derived: Derived, taken: FlatInputs) -> Any:
    """Takes arguments apart for the compiled code; :func:`join` is the inverse.

    Edge lists, indices, matrices and objects in nested tuples, lists and dicts are replaced by named tuples of tensors.

    Args:
        value: The arguments, or a part of them.
        path: The place of the value.
        derived: The cache of tensors that were made from earlier inputs.
        taken: The record of the call, which is filled here.

    Raises:
        minibatches.Unpadded: The call can't be padded.
        Recapture: The compiled code can't take a sparse matrix among the arguments.
        TypeError: A tensor has a layout that is not supported.
    """
    kind = type(value)
    if kind is Tensor:
        if value.layout != torch.strided:
            return _matrix(value, path, derived, taken)
        if taken.group is not None:
            return _of_part(value, path, derived, taken)
        what = attached(value)
        if what is not None or taken.batch is not None:
            return _of_minibatch(value, what, path, derived, taken)
        return _plain(value, path, derived, taken)
    if kind is tuple:
        return tuple([split(v, (path, i), derived, taken) for i, v in enumerate(value)])
    if kind is list:
        return watch(value, [split(v, (path, i), derived, taken) for i, v in enumerate(value)], taken.collections)
    if kind is dict:
        return watch(value, {k: split(v, (path, k), derived, taken) for k, v in value.items()}, taken.collections)
    if kind in _VALUES:
        return split(tuple(value), path, derived, taken)
    if kind in _LEFT_AS_THEY_ARE:
        return value
    if kind is EdgeIndex:
        taken.kinds.add(kind)
        edges = split(value.as_tensor(), (path, Field("edges")), derived, taken)
        rows, cols = value.sparse_size()
        return SizedEdges(edges, (_table(rows, value.device), _table(cols, value.device)))
    if kind is Index:
        taken.kinds.add(kind)
        return split(value.as_tensor(), path, derived, taken)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return kind(*(split(v, (path, Field(k)), derived, taken) for k, v in zip(kind._fields, value, strict=True)))
    if isinstance(value, SparseTensor):
        taken.kinds.add(SparseTensor)
        return sparse.take_edges(value)
    if is_container(value):
        if taken.batch is not None:
            raise minibatches.Unpadded(f"{source_of(path)} is an object (pass its tensors)")
        parts = (path, Field("parts"))
        taken.objects.append(
            (value, open_container(value, lambda v, at, k: split(v, ((parts, at), k), derived, taken)))
        )
        return taken.objects[-1][1]
    if isinstance(value, int) and (kind is Count or taken.batch is not None):
        if taken.batch is None:
            return int(value)
        return minibatches.padded_number(value, taken.batch, taken.largest, source_of(path))
    return value


def _of_minibatch(value: Tensor, what: BatchMetadata | None, path: Path, derived: Derived, taken: FlatInputs) -> Any:
    name = source_of(path)
    if taken.batch is not None:
        if not derived.splits or name in derived.lengths:
            raise minibatches.Unpadded(f"the model writes to {name}, or asks for its longest segment")
        wanted = bool(derived.wanted) and any(f"{name}{part}" in derived.wanted for part in ("", ".row", ".col"))
        return minibatches.padded(value, what, taken.batch, name, wanted)
    assert what is not None
    if len(what.values) == 2 and what.layout is not None and derived.splits:
        taken.edges[id(what.layout.row)] = value
        return minibatches.laid_out(what.layout, what, lambda row: f"{name}.{row}" in derived.wanted)
    if len(what.values) == 1 and name not in derived.lengths:
        found = minibatches.known(value, what, name in derived.wanted)
        if found is not None:
            return found
    return _plain(value, path, derived, taken)


def _of_part(value: Tensor, path: Path, derived: Derived, taken: FlatInputs) -> Any:
    """Takes a tensor of a call over one part apart: an edge list enters with the plan of its halo."""
    assert taken.group is not None
    plan = plan_of(value)
    if plan is None:
        if value.dim():
            taken.rows.append((source_of(path), value.size(0)))
        return value if value.dtype not in _INTEGERS else _compat.without_base(value)
    if not derived.splits:
        raise ArgumentError(
            f"{source_of(path)}: the model writes to the edge list of a part, expected one that only reads it. "
            "Write to a copy (edge_index.clone())."
        )
    taken.plans.append(plan)
    row, col = derived.rows(value)
    name_rows((row, col), plan.partition)
    taken.edges[id(row)] = value
    return parts.PartEdges(row, col, plan.send, plan.halo, taken.group)


def _plain(value: Tensor, path: Path, derived: Derived, taken: FlatInputs) -> Any:
    if value.dtype not in _INTEGERS:
        return value
    if derived.splits and value.dim() == 2 and value.size(0) == 2:
        if plan_of(value) is not None:
            raise ArgumentError(
                f"{source_of(path)}: found the edge list of a part, expected one of a whole graph. Compile the model "
                "with gnncompile.compile(model, mesh=mesh)."
            )
        rows = derived.rows(value)
        taken.edges[id(rows[0])] = value
        if not derived.wanted:
            return EdgePair(*rows)
        ends = zip(rows, EdgePair._fields, strict=True)
        return EdgePair(*(derived.sized(row, f"{source_of(path)}.{end}") for row, end in ends))
    index = _compat.without_base(value)
    return derived.sized(index, source_of(path)) if derived.wanted else index


def _matrix(value: Tensor, path: Path, derived: Derived, taken: FlatInputs) -> sparse.Matrix:
    if value.layout not in sparse.LAYOUTS:
        raise ArgumentTypeError(
            f"{source_of(path)}: found a tensor of layout {value.layout}, expected an edge_index [2, num_edges] or a "
            "matrix in COO, CSR or CSC layout. Convert it with .to_sparse_csr()."
        )
    taken.kinds.add(value.layout)
    return sparse.take_apart(value, derived.copies, derived.spread)


def _table(size: int | None, device: torch.device) -> Tensor | None:
    return None if size is None else torch.empty(size, 0, device=device)


def source_of(path: Path) -> str:
    """A path as Python code: ``args[1]['batch']``."""
    if isinstance(path, str):
        return path
    holder, key = path
    return f"{source_of(holder)}.{key}" if isinstance(key, Field) else f"{source_of(holder)}[{key!r}]"


def join(value: Any, joined: list[Any], counts: Tensor | None = None) -> Any:
    """The inverse of :func:`split`, traced by Dynamo: returns the arguments as the model sees them.

    Args:
        value: A result of :func:`split`.
        joined: Gets ``(holder, name, value)`` for each attribute that is put back into an object, and a
            :class:`~gnncompile.capture.containers.Collection` for each list and dict.
        counts: The valid rows of each row type of a padded mini-batch, int64 ``[kinds]``; None without padding.
    """
    if isinstance(value, EdgePair):
        return torch.stack([join(value.row, joined), join(value.col, joined)])
    if isinstance(value, minibatches.KINDS):
        return minibatches.join(value, counts)
    if isinstance(value, parts.PartEdges):
        return parts.join(value)
    if isinstance(value, SizedEdges):
        edges = join(value.edges, joined, counts)
        _compat.keep_with(edges, value.tables, _compat.EDGE_INDEX)
        return edges
    if isinstance(value, sparse.Matrix):
        return sparse.make(*value)
    if isinstance(value, Sized):
        return torch.ops.gnncompile.sized(value.segment, value.carrier)
    if isinstance(value, Opened):
        return put_together(value, lambda part: join(part, joined, counts), joined)
    if isinstance(value, tuple) and hasattr(type(value), "_fields"):
        return type(value)(*[join(v, joined, counts) for v in value])
    if type(value) is tuple:
        return tuple(join(v, joined, counts) for v in value)
    if type(value) is list:
        return watch(value, [join(v, joined, counts) for v in value], joined)
    if type(value) is dict:
        return watch(value, {k: join(v, joined, counts) for k, v in value.items()}, joined)
    return value


def minibatch_in(*values: Any) -> Bucketed | None:
    """The padded mini-batch of the first tensor that belongs to one; None if no tensor of a call does."""
    for value in values:
        if isinstance(value, Tensor):
            what = attached(value)
            found = None if what is None else what.batch
        elif isinstance(value, _IN_A_ROW):
            found = minibatch_in(*value)
        else:
            found = minibatch_in(*value.values()) if isinstance(value, dict) else None
        if found is not None:
            return found
    return None


def leaves(value: Any, found: list[Any]) -> None:
    """Appends the leaves of nested tuples, lists and dicts to `found`, in order."""
    if isinstance(value, _IN_A_ROW):
        for part in value:
            leaves(part, found)
    elif isinstance(value, dict):
        for part in value.values():
            leaves(part, found)
    else:
        found.append(value)


def with_leaves(value: Any, new: Iterator[Any]) -> Any:
    """A copy of nested tuples, lists and dicts with the leaves of `new`, in order."""
    if isinstance(value, (tuple, list)):
        parts = [with_leaves(part, new) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {key: with_leaves(part, new) for key, part in value.items()}
    return next(new)


class Derived:
    """Makes rows and sizes of integer inputs before the compiled code runs, and caches them per distinct tensor.

    Attributes:
        wanted: The inputs whose number of segments the model needs, as :func:`source_of` names them.
        lengths: The inputs among these whose longest segment the model needs too.
        splits: Whether edge lists are taken apart. False once a model writes to an edge list.
        looks: How often data was read for sizes. On a GPU each read is a sync.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self.wanted: set[str] = set()
        self.lengths: set[str] = set()
        self.splits = True
        self.looks = 0
        self._shared_once = Seen(max_entries)
        self._copies = IdentityCache(max_entries, max_bytes)
        self._spread = IdentityCache(max_entries, max_bytes)
        self._carriers = IdentityCache(max_entries, max_bytes)
        self._long_carriers = IdentityCache(max_entries, max_bytes)

    def rows(self, edge_index: Tensor) -> Sequence[Tensor]:
        """Both rows of an edge list as contiguous tensors.

        They share the edge list's memory. They are copies if they can't share it, or if the same memory enters as a new
        tensor object in each call.
        """
        found = edge_rows.shared(edge_index)
        if found is None and edge_rows.can_share(edge_index) and self._shared_once.add(edge_index):
            found = edge_rows.share(edge_index)
        return found or self.copies(edge_index)

    def copies(self, edge_index: Tensor) -> list[Tensor]:
        """Copies of both rows of an edge list, made once per distinct edge list."""
        return self._copies.get((edge_index,), lambda e: [_copy(row) for row in e.unbind(0)])

    def spread(self, pointers: Tensor, others: Tensor) -> list[Tensor]:
        """The row and the column of each entry of a compressed matrix.

        Args:
            pointers: The first entry of each row, ``[num_rows + 1]``.
            others: The column of each entry, ``[num_entries]``.
        """

        def make(starts: Tensor, columns: Tensor) -> list[Tensor]:
            rows = torch.arange(starts.numel() - 1, device=starts.device)
            return [rows.repeat_interleave(starts.diff(), output_size=columns.numel()), _copy(columns)]

        return self._spread.get((pointers, others), make)

    def sized(self, index: Tensor, source: str) -> Tensor | Sized:
        """The index, with its number of segments if the model needs it for this input.

        An index with negative values has no number of segments, and is returned alone.
        """
        if source in self.lengths:
            carriers = self._long_carriers.get((index,), self._look_longer)
        elif source in self.wanted:
            carriers = self._carriers.get((index,), self._look)
        else:
            return index
        return Sized(index, carriers[0]) if carriers else index

    def _look_longer(self, index: Tensor) -> list[Tensor]:
        self.looks += 1
        if index.numel() and int(index.min()) < 0:
            return []
        lengths = torch.bincount(index) if index.numel() else index
        longest = int(lengths.max()) if index.numel() else 0
        return [torch.empty(lengths.numel(), longest, 0, device=index.device)]

    def _look(self, index: Tensor) -> list[Tensor]:
        self.looks += 1
        count = int(index.max()) + 1 if index.numel() else 0
        return [torch.empty(count, dtype=torch.bool, device=index.device)] if count >= 0 else []


def _copy(row: Tensor) -> Tensor:
    return row.clone(memory_format=torch.contiguous_format)  # else the copy of an empty row keeps its strides


class Checker:
    """Checks a call's arguments: the argument named ``edge_index``, and the devices of all tensors.

    Attributes:
        position: The position of ``edge_index`` among the parameters of ``forward``; None if it has no such parameter.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        try:
            names = list(inspect.signature(forward).parameters)
        except (TypeError, ValueError):
            names = []
        self.position = names.index(EDGE_INDEX) if EDGE_INDEX in names else None

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raises TypeError or ValueError, which names the argument, if an argument is wrong."""
        if self.position is not None:
            found = args[self.position] if self.position < len(args) else kwargs.get(EDGE_INDEX)
            if type(found) is Tensor and found.layout == torch.strided and not found.is_nested:
                check_edge_index(found)
        self._check_devices(args, kwargs)

    def _check_devices(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        first: tuple[str, torch.device] | None = None
        for name, value in (*enumerate(args), *kwargs.items()):
            if type(value) is not Tensor:
                continue
            if value.is_nested:
                raise ArgumentTypeError(
                    f"argument {name!r}: found a nested tensor, expected a plain one. Put graphs into one with "
                    "torch_geometric.data.Batch, and pass its tensors."
                )
            if value.dim() == 0:
                continue
            if first is None:
                first = f"argument {name!r}", value.device
            elif value.device != first[1]:
                raise ArgumentError(
                    f"argument {name!r}: found on {value.device}, expected {first[1]} like {first[0]}. "
                    "Move all inputs to one device with .to(device)."
                )


def check_edge_index(edge_index: Tensor) -> None:
    """Raises TypeError or ValueError unless `edge_index` is an integer tensor ``[2, num_edges]``."""
    if edge_index.dtype not in _INTEGERS:
        raise ArgumentTypeError(
            f"edge_index: found dtype {edge_index.dtype}, expected torch.int64 (or int32). "
            "Convert it with edge_index.long()."
        )
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        hint = " Transpose it with edge_index.t().contiguous()." if edge_index.shape[-1:] == (2,) else ""
        raise ArgumentError(
            f"edge_index: found shape {tuple(edge_index.shape)}, expected [2, num_edges] "
            f"(row 0 sources, row 1 destinations).{hint}"
        )
