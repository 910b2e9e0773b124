"""Answers questions about nodes of a captured graph: values, sizes, memory, and equal computations."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from gnncompile import _compat

aten = torch.ops.aten


own = torch.ops.gnncompile


def origins(node: fx.Node) -> tuple[str, ...]:
    """Returns the names of the traced operations that a node was made for. A traced node has its own name."""
    return node.meta.get("origins", (node.name,))  # type: ignore[no-any-return]


def carries_gradient(node: fx.Node) -> bool:
    """Whether a node's value can have a gradient at all. Sizes and indices never have one."""
    found = node.meta.get("val")
    if isinstance(found, torch.Tensor):
        return found.is_floating_point() or found.is_complex()
    return isinstance(found, (tuple, list))


def value(node: fx.Node) -> Any:
    """The fake value of a node."""
    return node.meta["val"]


def fakes_in(node: fx.Node) -> list[torch.Tensor | torch.SymInt]:
    """Returns the fake tensors and symbolic integers in a node's value, which may be nested."""
    found = pytree.tree_leaves(node.meta.get("val"))
    return [v for v in found if isinstance(v, (torch.Tensor, torch.SymInt))]


def is_tensor(node: Any) -> bool:
    """Whether a node's value is a tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def is_one(size: Any) -> bool:
    """Whether a size is known to be 1."""
    return isinstance(size, int) and size == 1


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are equal for every graph, without adding a guard."""
    return bool(statically_known_true(a == b))


def known_size(size: Any) -> int | None:
    """Returns a size that is the same number for every graph, or None for other sizes. Adds no guard."""
    now = _compat.size_now(size)
    return now if now is not None and same_size(size, now) else None


def guarded_same(a: Any, b: Any) -> bool:
    """Whether two sizes are equal. If they are equal only now, a guard recompiles when they differ."""
    if same_size(a, b):
        return True
    now = _compat.size_now(a)
    return now is not None and now == _compat.size_now(b) and bool(a == b)


def alike(one: Any, other: Any) -> bool:
    """Whether two nodes are tensors of the same dtype and shape, for every graph."""
    return same_shape(one, other) and value(one).dtype == value(other).dtype


def same_shape(one: Any, other: Any) -> bool:
    """Whether two nodes are tensors of the same shape, for every graph."""
    if not is_tensor(one) or not is_tensor(other):
        return False
    a, b = value(one).shape, value(other).shape
    return len(a) == len(b) and all(map(same_size, a, b))


def is_packed(fake: torch.Tensor) -> bool:
    """Whether the elements lie in memory row after row (contiguous), for every graph."""
    expected: Any = 1
    for size, stride in zip(reversed(fake.shape), reversed(fake.stride()), strict=True):
        if not is_one(size) and not same_size(stride, expected):
            return False
        expected = expected * size
    return True


def per_row(factor: Any) -> bool:
    """Whether a factor, a number or a tensor, is the same for all features of a row."""
    if not is_tensor(factor):
        return True
    shape = value(factor).shape
    return len(shape) == 0 or (isinstance(shape[-1], int) and shape[-1] == 1)


def sums_rows(node: fx.Node) -> bool:
    """Whether a node sums over the rows of a matrix, in the dtype of the matrix."""
    if node.target is not aten.sum.dim_IntList or node.kwargs:
        return False
    return node.args[1] in ([0], [-2]) and value(node.all_input_nodes[0]).dim() == 2


def is_switch(node: fx.Node) -> bool:
    """Whether a node changes how later nodes run (grad mode, autocast)."""
    return _called(node) in ("_set_grad_enabled", "_enter_autocast", "_exit_autocast")


def switches_gradients(node: fx.Node) -> bool:
    """Whether a node turns grad mode on or off."""
    return _called(node) == "_set_grad_enabled"


def with_grad_mode(graph: fx.Graph) -> Iterator[tuple[fx.Node, bool]]:
    """Yields each node, and whether grad mode is on there."""
    enabled = torch.is_grad_enabled()
    for node in graph.nodes:
        if switches_gradients(node):
            enabled = bool(node.args[0])
        yield node, enabled


def _called(node: fx.Node) -> str:
    return getattr(node.target, "__name__", "")


def enters_autocast(node: fx.Node) -> bool:
    """Whether a node begins an autocast mode."""
    return _called(node) == "_enter_autocast"


def autocasts(node: fx.Node) -> list[tuple[Any, ...]]:
    """Returns the arguments of the autocast modes that a node runs in, the innermost first: device type, dtype, ..."""
    found: list[tuple[Any, ...]] = []
    left: set[Any] = set()
    at = node.prev
    while at.op != "root":
        if _called(at) == "_exit_autocast":
            left.add(at.args[0])
        elif enters_autocast(at) and at not in left:
            found.append(at.args)
        at = at.prev
    return found


FRESH_EXCEPT = {
    "contiguous",
    "detach",
    "dropout",
    "expand_as",
    "feature_dropout",
    "flatten",
    "reshape",
    "reshape_as",
    "to",
    "type_as",
    "view_as",
}
"""Composite ops that may return their argument itself, although their schema does not say so."""


def makes_new_tensor(node: fx.Node) -> bool:
    """Whether a node's tensor shares memory with no other tensor."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    if any(r.alias_info is not None for r in schema.returns):
        return False
    return schema.name.split("::")[1] not in FRESH_EXCEPT


def mutates(node: fx.Node) -> bool:
    """Whether a node writes to one of its arguments."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


_COLLECTIVES = ("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd")
"""The namespaces of torch's collectives."""

_WITH_STATISTICS = (
    aten.batch_norm.default,
    aten.instance_norm.default,
    aten.native_batch_norm.default,
    aten.cudnn_batch_norm.default,
    aten.miopen_batch_norm.default,
    aten._batch_norm_impl_index.default,
)
"""Ops that write to running statistics in training, although their schemas do not say so.

The fourth and the fifth argument are the statistics, the sixth says whether they are updated.
"""


def drop_unused(graph: fx.Graph) -> None:
    """Removes nodes without users, except nodes that write to a tensor or draw random numbers."""
    graph.eliminate_dead_code(lambda node: mutates(node) or _updates_statistics(node) or node.is_impure())


def drop_with_operands(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Removes pure operations without users, from the last of `nodes` on, and operands that then have none either."""
    todo, dropped = list(nodes), set()
    while todo:
        one = todo.pop()
        if one in dropped or one.users or one.op != "call_function" or mutates(one) or one.is_impure():
            continue
        todo += one.all_input_nodes
        dropped.add(one)
        graph.erase_node(one)


def _updates_statistics(node: fx.Node) -> bool:
    """Whether a normalisation updates running statistics."""
    return node.target in _WITH_STATISTICS and node.args[3] is not None and node.args[5] is not False


_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


def written_inputs(graph: fx.Graph) -> list[fx.Node] | None:
    """Returns the inputs that a graph writes to, or None if it may leave more behind.

    A graph leaves more behind if it takes part in a collective, or writes to its own constants. The states of random
    generators do not count: see :func:`draws_on`.
    """
    if any(map(_may_leave_something, graph.nodes)):
        return None
    statistics = [a for node in filter(_updates_statistics, graph.nodes) for a in node.args[3:5]]
    written = _with_their_bases([*_all_written_arguments(graph), *(a for a in statistics if isinstance(a, fx.Node))])
    if any(node.op == "get_attr" for node in written):
        return None
    return [node for node in graph.find_nodes(op="placeholder") if node in written]


def _may_leave_something(node: fx.Node) -> bool:
    if node.op in ("placeholder", "get_attr", "output") or node.target is operator.getitem:
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace in _COLLECTIVES
    # A function that is no operator has no schema. Arithmetic of sizes only makes numbers.
    return not is_switch(node) and not isinstance(node.meta.get("val"), _NUMBERS)


def written_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes whose memory an operation of the graph writes to, directly or through a view."""
    found = _with_their_bases(_all_written_arguments(graph))
    for node in graph.nodes:
        if node.op == "call_function" and not makes_new_tensor(node) and found & set(_aliased_arguments(node)):
            found.add(node)
    return found


def _all_written_arguments(graph: fx.Graph) -> list[fx.Node]:
    """Returns the arguments that operations write to, by their schemas, without those that they only read."""
    writing = [node for node in graph.nodes if node.op == "call_function" and mutates(node)]
    return [written for node in writing for written in _aliased_arguments(node, only_written=True)]


def _with_their_bases(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Returns some nodes and all that they may be views of."""
    found, todo = set[fx.Node](), list(nodes)
    while todo:
        at = todo.pop()
        if at not in found:
            found.add(at)
            todo.extend([] if makes_new_tensor(at) else _aliased_arguments(at))
    return found


def _aliased_arguments(node: fx.Node, only_written: bool = False) -> list[fx.Node]:
    """Returns the arguments whose memory the result of an operation may share, by its schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not any(argument.alias_info is not None for argument in schema.arguments):
        return node.all_input_nodes  # the schema does not say which
    found: list[fx.Node] = []
    for at, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and (argument.alias_info.is_write or not only_written):
            given = node.args[at] if at < len(node.args) else node.kwargs.get(argument.name)
            fx.map_arg(given, found.append)
    return found


def structural_nodes(graph: fx.Graph, written: set[fx.Node]) -> dict[fx.Node, bool]:
    """Returns the nodes that depend on integer inputs and sizes alone, as the keys of a dict.

    The value is True for a node that depends on integer data, on a sort, on a size that the host waits for, or on a
    node marked with :data:`ONCE`. It is False for a node that Inductor computes from sizes only.
    """
    found: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            val = node.meta["val"]
            if isinstance(val, torch.SymInt):
                found[node] = False
            elif isinstance(val, torch.Tensor) and not _is_float(val) and node not in written:
                found[node] = True
        elif node.op == "call_function" and node not in written and not mutates(node) and not is_switch(node):
            if node.target is aten.sym_size.int and node.args[0].op == "placeholder":
                found[node] = False
            elif _same_each_time(node) and all(s in found for s in node.all_input_nodes):
                once = node.target in _SORTS or _waits(node) or ONCE in node.meta
                found[node] = once or any(found[s] for s in node.all_input_nodes)
    return found


ONCE = "computed once"
"""The key in the metadata of nodes that are worth computing once for each graph, even from sizes alone."""


_SORTS = (
    own.csr.default,
    aten.sort.default,
    aten.sort.stable,
    aten.argsort.default,
    aten.argsort.stable,
    aten.topk.default,
)
"""Operations that sort. They are worth doing once, even for an index made from sizes."""


def _waits(node: fx.Node) -> bool:
    """Whether the host waits for a number that an operation finds in data, such as the number of selected rows."""
    return isinstance(node.target, torch._ops.OpOverload) and any(map(_compat.has_unknown_size, fakes_in(node)))


def _same_each_time(node: fx.Node) -> bool:
    """Whether a node has a value, and the same value for the same arguments."""
    return not depends_on_chance(node) and node.meta.get("val") is not None


def draws_on(graph: fx.Graph) -> set[torch.device]:
    """Returns the devices on which a graph draws random numbers; "meta" stands for an unknown one."""
    found = set[torch.device]()
    for node in filter(depends_on_chance, graph.nodes):
        made = [fake for fake in fakes_in(node) if isinstance(fake, torch.Tensor)]
        found.update({fake.device for fake in made} or {torch.device("meta")})
    return found


def depends_on_chance(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    name, tags = str(node.target), getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags or any(part in name for part in ("rand", "dropout"))


def _is_float(val: torch.Tensor) -> bool:
    return val.is_floating_point() or val.is_complex()


def needed_for(nodes: Iterable[fx.Node], known: Container[fx.Node] = ()) -> set[fx.Node]:
    """Returns some nodes and all that they are computed from. What a node of `known` is computed from is left out."""
    needed: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in needed:
            needed.add(node)
            todo += [] if node in known else node.all_input_nodes
    return needed


def arguments(node: fx.Node) -> dict[str, Any]:
    """Returns all arguments of an operation by name, in order, with the defaults filled in."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    positional = dict(zip([a.name for a in arguments], node.args, strict=False))
    return {a.name: a.default_value for a in arguments} | positional | node.kwargs


def value_numbers(graph: fx.Graph, written: set[fx.Node]) -> dict[fx.Node, int]:
    """Returns a number for each node. Nodes with equal numbers compute the same value.

    Args:
        graph: The graph of the nodes.
        written: Nodes whose memory is written to. Each of them gets a number of its own.
    """
    calls = [n for n in graph.nodes if n.op == "call_function"]
    something_is_written = any(mutates(n) or is_switch(n) for n in calls)
    found: dict[fx.Node, int] = {}
    known: dict[Any, int] = {}
    for node in graph.nodes:
        shareable = node.op == "call_function" and node not in written and _pure(node, something_is_written)
        key = _key(node, found) if shareable else None
        found[node] = known.setdefault(node if key is None else key, len(known))
    return found


def _pure(node: fx.Node, written: bool) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target.__module__ == "_operator" if callable(target) else False
    if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags or _stateful(str(target)):
        return False
    val = node.meta.get("val")
    # In a graph that writes to memory or switches gradients off, only integers (structure) are shared.
    return not written or not (isinstance(val, torch.Tensor) and val.is_floating_point())


def _stateful(name: str) -> bool:
    return any(part in name for part in ("dropout", "batch_norm", "instance_norm", "rrelu"))


def _key(node: fx.Node, numbers: dict[fx.Node, int]) -> Any:
    flat, spec = pytree.tree_flatten((node.args, node.kwargs))
    parts = tuple((type(a), numbers[a] if isinstance(a, fx.Node) else a) for a in flat)
    try:
        hash(parts)
    except TypeError:
        return None
    return node.target, parts, str(spec)


def is_pointwise(node: fx.Node) -> bool:
    """Whether a node is arithmetic on each element of tensors, or converts each element."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return node.target is torch.ops.prims.convert_element_type.default or torch.Tag.pointwise in node.target.tags


_LIBRARY = {aten.mm.default, aten.addmm.default, aten._addmm_activation.default, aten.bmm.default}


def has_kernel(node: fx.Node) -> bool:
    """Whether Inductor calls a kernel for a node, of ours or of a library for products, and fuses nothing with it."""
    made_by: Any = node.args[0] if node.target is operator.getitem else node
    if not isinstance(made_by.target, torch._ops.OpOverload) or made_by.target is own.rounded.default:  # arithmetic
        return False
    return made_by.target.namespace == "gnncompile" or made_by.target in _LIBRARY


def readers(node: fx.Node, views: Callable[[fx.Node], bool]) -> Iterator[tuple[Any, fx.Node]]:
    """Yields the nodes that read a tensor or a view of it, each with what it reads. `views` says what is a view."""
    for user in node.users:
        if views(user):
            yield from readers(user, views)
        else:
            yield user, node


def views_rows(node: fx.Node) -> bool:
    """Whether a node views each row of a tensor as a row. A view of another row length joins or cuts rows."""
    return node.target in _VIEWS and _row_length(node) == _row_length(node.all_input_nodes[0])


_VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.squeeze.dim, aten.unsqueeze.default}


def _row_length(node: fx.Node) -> Any:
    return math.prod(value(node).shape[1:])


def gradients_in(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes that depend on a gradient of a result, in the graph of a forward and its backward."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        is_gradient = node.op == "placeholder" and "tangents" in node.name
        if (node.op == "call_function" and not found.isdisjoint(node.all_input_nodes)) or is_gradient:
            found.add(node)
    return found


def backward_of(graph: fx.Graph) -> set[fx.Node]:
    """Returns gradients, and the nodes that only those read, such as a transposed matrix for a gradient."""
    found = gradients_in(graph)
    for node in reversed(graph.nodes):
        if node.op == "call_function" and node.users and found.issuperset(node.users):
            found.add(node)
    return found
