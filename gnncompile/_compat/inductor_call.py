"""Adds a line to the code that Inductor writes: a call that fills buffers of Inductor's, or writes to some."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor.codegen.wrapper import WrapperLine
from torch._inductor.lowering import fallback_handler
from torch.fx.node import has_side_effect

from gnncompile._compat.inductor import V, ir, ops, register_lowering
from gnncompile._compat.inductor_guards import lower_prepare_sizes


class Result(ir.ExternKernel):
    """A buffer that Inductor allocates right before the call that fills it.

    Inductor's scheduler takes the call for the producer of the buffer, so every reader comes after the call. A result
    is not an operation. Inductor expects its class for buffers that calls to other libraries fill.

    Args:
        size: The shape of the buffer.
        dtype: The dtype of the buffer.
        device: The device of the buffer.
        over: The inputs of the call that the buffer may be written over, by their positions.
    """

    def __init__(
        self, size: Sequence[Any], dtype: torch.dtype, device: torch.device, over: tuple[int, ...] = ()
    ) -> None:
        self.over = over
        layout = ir.FixedLayout(device, dtype, list(size), ir.FlexibleLayout.contiguous_strides(list(size)))
        super().__init__(None, layout, [])
        self.name = V.graph.register_buffer(self)
        self.call: Call | None = None

    def should_allocate(self) -> bool:
        """Tells Inductor to allocate the buffer, unless :func:`overwrites.place` does so."""
        return not self.over

    def get_defining_op(self) -> Any:
        """Returns the call that fills the buffer."""
        return self.call


class _Allocation(WrapperLine):
    """The allocation of a result that nobody reads.

    In C++, an allocation declares its sizes when its text is made. Made in the order of the lines, no line uses sizes
    that are declared after it.
    """

    def __init__(self, wrapper: Any, result: Result) -> None:
        self.wrapper, self.result = wrapper, result

    def codegen(self, code: Any) -> None:
        """Writes the line."""
        code.writeline(self.wrapper.make_buffer_allocation(self.result))


class Call(ir.ExternKernel):
    """One operation of Inductor's graph. Each subclass writes its line of code.

    Args:
        inputs: All realized tensors that the call reads or adds to.
        results: The buffers that the call fills.
        written: The inputs that the call writes to. Inductor runs the call after all earlier readers of them, and
            before all later readers.
        constants: Other values that the line depends on.
    """

    def __init__(
        self,
        inputs: Sequence[Any],
        results: Sequence[Result] = (),
        written: Sequence[Any] = (),
        constants: tuple[Any, ...] = (),
    ) -> None:
        self.device: torch.device = (*results, *written)[0].get_device()
        nowhere = ir.NoneLayout(device=self.device)
        super().__init__(None, nowhere, self.unwrap_storage(inputs), constants)
        self.results = list(results)
        self.taken: dict[int, int] = {}
        """The positions of results that are written over inputs, by the inputs': see :func:`overwrites.place`."""
        self.mutation_outputs = [ir.MutationOutput(nowhere, w, self) for w in written]
        for result in results:
            result.call = self
        V.graph.register_operation(self)

    def references(self) -> list[str]:
        """Returns the names of the inputs in the generated code."""
        inputs = list[Any](self.inputs)
        for at, k in self.taken.items():
            inputs[at] = self.results[k]
        return [one.codegen_reference() for one in inputs]

    def memories(self) -> list[str]:
        """Returns names in the generated code of tensors that begin at the addresses of the inputs.

        A view that begins where its buffer begins is not made, since a kernel takes the address alone.
        """
        inputs: Sequence[Any] = self.inputs
        return [one.get_name() if _begins_with_buffer(one) else one.codegen_reference() for one in inputs]

    def filled(self, wrapper: Any) -> list[str]:
        """Returns the names of the results in the generated code.

        Inductor drops a result that nobody reads. The call fills that result as well, so the result is allocated here.
        """
        for result in self.results:
            if result.get_name() in V.graph.removed_buffers:
                wrapper.writeline(_Allocation(wrapper, result))
        return [result.codegen_reference() for result in self.results]

    def get_outputs(self) -> list[Any]:
        """Returns the results, and the written inputs in their state after the call."""
        return [*self.results, *self.mutation_outputs]

    def get_device(self) -> torch.device | None:
        """Returns the device of the buffers."""
        return self.device

    def get_unbacked_symbol_defs(self) -> Any:
        """Returns an empty set: the call makes no new sizes."""
        return type(super().get_unbacked_symbol_defs())()


def _begins_with_buffer(tensor: Any) -> bool:
    if not isinstance(tensor, ir.ReinterpretView):
        return False
    return bool(V.graph.sizevars.statically_known_equals(tensor.get_layout().offset, 0))


def tuple_text(names: Sequence[str]) -> str:
    """Returns the code of a tuple."""
    return "(" + "".join(f"{one}, " for one in names) + ")"


def node_now() -> Any:
    """Returns the node that Inductor is lowering."""
    return V.graph.current_node


def tensor_of(buffer: Any) -> Any:
    """Returns a result, or a realized input that was written to, as the tensor that a lowering returns."""
    return ir.TensorBox.create(buffer) if isinstance(buffer, Result) else ir.TensorBox(buffer)


def realized(tensor: Any) -> Any:
    """Returns a tensor of Inductor's graph as a buffer in memory."""
    return ir.ExternKernel.realize_input(tensor)


def contiguous(tensor: Any) -> Any:
    """Returns a tensor of Inductor's graph as a contiguous buffer in memory."""
    return ir.ExternKernel.require_contiguous(realized(tensor))


def aligned(tensor: Any) -> Any:
    """Returns a tensor of Inductor's graph as a contiguous buffer that begins where memory begins.

    Inductor copies inputs of a graph whose address is no multiple of 16, with the setting ``assume_aligned_inputs``.
    """
    buffer = contiguous(tensor)
    # A buffer that is computed within a concatenation begins anywhere, and its own layout tells the offset 0.
    inside = isinstance(V.graph.get_buffer(buffer.get_name()).get_layout(), ir.NonOwningLayout)
    if not inside and V.graph.sizevars.statically_known_equals(buffer.get_layout().offset, 0):
        return buffer
    return contiguous(ir.ExternKernel.copy_input(buffer))


class Borrowed(Result):
    """A buffer that its call assigns. It may share memory with an input, so Inductor must not use its memory again."""

    def __init__(self, size: Sequence[Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(size, dtype, device)
        V.graph.never_reuse_buffers.add(self.get_name())

    def should_allocate(self) -> bool:
        """Tells Inductor not to allocate the buffer."""
        return False


class Joined(ir.ConcatKernel):
    """A buffer whose first rows are computed in place by their producer, and whose other rows a call fills."""


def in_front(tensor: Any, rows: Any) -> Any:
    """Returns a new tensor of Inductor's graph with `rows` rows, which begins with the rows of a tensor.

    The producer of the tensor writes them there, unless the tensor is an input or other nodes need memory of its own.
    """
    size = [rows, *tensor.get_size()[1:]]
    layout = ir.FixedLayout(tensor.get_device(), tensor.get_dtype(), size, ir.FlexibleLayout.contiguous_strides(size))
    kernel = Joined(name=None, layout=layout, inputs=[])
    storage = ir.StorageBox(kernel)
    place = ir.SliceView.create(storage, 0, 0, tensor.get_size()[0], clamp=False)
    kernel.inputs = [_computed_in(tensor, place)]
    kernel.name = V.graph.register_buffer(kernel)
    kernel.inputs = kernel.unwrap_storage(kernel.inputs)
    V.graph.register_operation(kernel)
    return ir.TensorBox(storage)


def front(tensor: Any, rows: Any) -> Any:
    """Returns the first `rows` rows of a tensor of Inductor's graph, in the same memory."""
    return ir.TensorBox(ir.SliceView.create(tensor.data, 0, 0, rows, clamp=False))


def _computed_in(tensor: Any, place: Any) -> Any:
    """Makes a tensor's producer write to a part of another buffer, or copies the tensor there."""
    source = tensor.data
    if not isinstance(source, ir.StorageBox) or not _may_share(V.graph.current_node):
        source = ir.Pointwise.create(
            device=tensor.get_device(),
            dtype=tensor.get_dtype(),
            inner_fn=tensor.make_loader(),
            ranges=list(tensor.get_size()),
        )
    elif isinstance(source.data, Result) and isinstance(source.data.layout, ir.FixedLayout):
        storage, layout = ir.as_storage_and_layout(place)
        source.data.layout = ir.NonOwningLayout(ir.ReinterpretView(data=storage, layout=layout))
        return source.data
    return ir.ConcatKernel.realize_into(source, place)


def _may_share(node: Any) -> bool:
    """Whether the result of a node may share memory with the node's first argument.

    Results of the graph may not: the backward reuses the memory of one while it reads the other. Inductor may also turn
    a copy that changes some rows into a write, without knowing of the shared memory.
    """
    root = node.args[0]
    while root.op == "call_function" and _may_return_its_argument(root):
        root = root.all_input_nodes[0]
    readers = [*_readers(root, node), *_readers(node)]
    leaves = any(user.op == "output" for user in _readers(root, node))
    return not leaves and not any(_changes_rows(user) for user in readers)


def _readers(node: fx.Node, but: fx.Node | None = None) -> list[fx.Node]:
    """The nodes that read a tensor or its views, without those that read the result of `but`."""
    found = []
    for user in node.users:
        found.append(user)
        if user is not but and user.op == "call_function" and _may_return_its_argument(user):
            found += _readers(user, but)
    return found


def _changes_rows(node: fx.Node) -> bool:
    schema, name = getattr(node.target, "_schema", None), str(node.target)
    mutable = schema is not None and schema.is_mutable
    return mutable or any(part in name for part in ("scatter", "index_put", "auto_functionalized", "index_add"))


def lends_arguments(op: Any) -> None:
    """Notes that the lowering of an op returns its argument's tensors, which nothing may write to: see :func:`lent`."""
    _lent.add(op)


def lent(tensor: Any, position: int) -> Any:
    """Returns a tensor that the current call got, or a copy if a node writes to the item `position` of its results.

    By its schema the lowered op returns new tensors, so Inductor may have chosen to write to them.
    """
    items = [user for user in node_now().users if user.target is operator.getitem and user.args[1] == position]
    if any(_changes_rows(reader) for item in items for reader in _readers(item)):
        return contiguous(ir.ExternKernel.copy_input(tensor))
    return tensor


def returns_argument(*ops: Any) -> None:
    """Notes that the lowerings of these ops return their first argument, or a tensor in the same memory."""
    _returned.update(ops)


def writable(tensor: Any, node: Any, besides: Sequence[fx.Node] = ()) -> Any:
    """Returns a tensor that the current call may write to: the given tensor, or a copy if other nodes may read it.

    Inductor does not order readers before this point: by its schema, the lowered op writes to nothing.

    Args:
        tensor: A tensor of Inductor's graph.
        node: The node of the tensor, an argument of the lowered node.
        besides: Nodes that may read or write the tensor too: they do so before.
    """
    while len(node.users.keys() - set(besides)) == 1 and node.op == "call_function":
        if node.target is operator.getitem and node.all_input_nodes[0].target in _lent:
            break
        if not _may_return_its_argument(node):
            return realized(tensor)
        node = node.all_input_nodes[0]
    return realized(ir.ExternKernel.copy_input(tensor))


def _may_return_its_argument(node: fx.Node) -> bool:
    """Whether a node's value may share memory with its first argument, by the node's schema or lowering."""
    target = node.target
    if target is operator.getitem:
        return False  # an item of a call's results, which share no memory with other tensors
    schema = getattr(target, "_schema", None)
    if target in _returned or schema is None or any(r.alias_info is not None for r in schema.returns):
        return True
    kind = getattr(node.meta.get("val"), "dtype", None)
    converts = target in (torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default)
    return converts and kind == getattr(node.all_input_nodes[0].meta.get("val"), "dtype", None)


def _lower_stored(value: Any) -> Any:
    value.realize()
    return value


def _lower_rounded(value: Any) -> Any:
    dtype, load = value.get_dtype(), value.make_loader()

    def rounded(index: Any) -> Any:
        return ops.to_dtype_bitcast(ops.to_dtype_bitcast(load(index), torch.int16, dtype), dtype, torch.int16)

    return ir.Pointwise.create(device=value.get_device(), dtype=dtype, inner_fn=rounded, ranges=list(value.get_size()))


def install_rounded(op: Any) -> None:
    """Registers the lowering of an op that rounds values of 16 bits to their dtype: it reads their bits.

    Inductor's own conversions to the dtype, and views of memory with another dtype, leave a value as it was computed.
    """
    register_lowering(op, type_promotion_kind=None)(_lower_rounded)


def install_stored(op: Any) -> None:
    """Registers the lowering of an op that returns its argument. Inductor writes the argument to memory."""
    _returned.add(op)
    register_lowering(op, type_promotion_kind=None)(_lower_stored)


_returned: set[Any] = set()
"""The ops whose lowering returns the argument, though their schema says that the result shares no memory with it."""

_lent: set[Any] = set()
"""The ops whose lowering returns tensors that belong to the caller, though their schema says that they are new."""

installed: list[Any] = []
"""The ops that are lowered to calls."""


def install(op: Any, lower: Callable[..., Any], before: Callable[[fx.Node], None] | None = None) -> None:
    """Registers the lowering of an op with Inductor. `before` is called with each node before it is lowered."""
    installed.append(op)

    def lowered(*args: Any) -> Any:
        if before is not None:
            before(node_now())
        return lower(*args)

    register_lowering(op, type_promotion_kind=None)(lowered)


def install_fallback(op: Any, theirs: Any) -> None:
    """Registers the lowering of an op that Inductor writes as a call of torch's own op, with the same arguments."""
    register_lowering(op, type_promotion_kind=None)(fallback_handler(theirs, add_to_fallback_set=False))


def install_prepare_sizes(op: Any) -> None:
    """Registers the lowering of ``gnncompile::prepare_sizes``, which replaces Inductor's object for sizes."""
    has_side_effect(op)
    register_lowering(op, type_promotion_kind=None)(lower_prepare_sizes)
