"""A line of our own in the code that Inductor writes: a call that makes buffers of Inductor's, or writes to some."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from gnncompile._compat.inductor import V, ir, register_lowering


class Result(ir.ExternKernel):
    """A buffer that Inductor allocates right before the call that fills it.

    For Inductor's scheduler the call is its producer, so every reader comes after the call. A result is no operation of
    its own. It is of the class that Inductor expects of buffers which calls to other libraries fill.

    Args:
        size: Its shape.
        dtype: Its type.
        device: Where it lives.
    """

    def __init__(self, size: Sequence[Any], dtype: torch.dtype, device: torch.device) -> None:
        layout = ir.FixedLayout(device, dtype, list(size), ir.FlexibleLayout.contiguous_strides(list(size)))
        super().__init__(None, layout, [])
        self.name = V.graph.register_buffer(self)
        self.call: Call | None = None

    def should_allocate(self) -> bool:
        """Inductor allocates it."""
        return True

    def get_defining_op(self) -> Any:
        """The call that fills it."""
        return self.call


class Call(ir.ExternKernel):
    """One operation of Inductor's graph; subclasses say what its line is.

    Args:
        inputs: All that it reads or adds to, realized.
        results: The buffers that it fills.
        written: Those of the inputs that it writes to. Inductor runs the call after all earlier readers of them, and
            before all later ones.
        constants: What else the line depends on.
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
        self.mutation_outputs = [ir.MutationOutput(nowhere, w, self) for w in written]
        for result in results:
            result.call = self
        V.graph.register_operation(self)

    def references(self) -> list[str]:
        """The inputs as the generated code names them."""
        inputs: Sequence[Any] = self.inputs
        return [i.codegen_reference() for i in inputs]

    def filled(self, wrapper: Any) -> list[str]:
        """The results as the generated code names them.

        Inductor drops a result that nobody reads. The call fills it all the same, so it is allocated here.
        """
        for result in self.results:
            if result.get_name() in V.graph.removed_buffers:
                wrapper.writeline(wrapper.make_buffer_allocation(result))
        return [result.codegen_reference() for result in self.results]

    def get_outputs(self) -> list[Any]:
        """The results, and the written inputs as they are after the call."""
        return [*self.results, *self.mutation_outputs]

    def get_device(self) -> torch.device | None:
        """The device of the buffers."""
        return self.device

    def get_unbacked_symbol_defs(self) -> Any:
        """The call makes no new sizes."""
        return type(super().get_unbacked_symbol_defs())()


def tensor_of(buffer: Any) -> Any:
    """A result, or a realized input that was written to, as the tensor that a lowering returns."""
    return ir.TensorBox.create(buffer) if isinstance(buffer, Result) else ir.TensorBox(buffer)


def realized(tensor: Any) -> Any:
    """A tensor of Inductor's graph, in memory."""
    return ir.ExternKernel.realize_input(tensor)


def contiguous(tensor: Any) -> Any:
    """A tensor of Inductor's graph, in memory and in order."""
    return ir.ExternKernel.require_contiguous(realized(tensor))


def writable(tensor: Any, position: int) -> Any:
    """A tensor of Inductor's graph that the current call may write to: itself, or a copy if anybody else may read it.

    The order of readers is not kept before this point: the op that is lowered writes to nothing, by its schema.

    Args:
        tensor: The tensor.
        position: Where it is among the arguments of the node that is lowered.
    """
    node: Any = V.graph.current_node.args[position]
    while len(node.users) == 1 and node.op == "call_function":
        if not _may_return_its_argument(node):
            return realized(tensor)
        node = node.all_input_nodes[0]
    return realized(ir.ExternKernel.copy_input(tensor))


def _may_return_its_argument(node: fx.Node) -> bool:
    """Whether a node's value may share memory with its first argument, by its schema or by how it is lowered."""
    target = node.target
    if target is operator.getitem:
        return False  # of what a call makes, which shares no memory with anything else
    schema = getattr(target, "_schema", None)
    if schema is None or any(r.alias_info is not None for r in schema.returns):
        return True
    kind = getattr(node.meta.get("val"), "dtype", None)
    converts = target in (torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default)
    return converts and kind == getattr(node.all_input_nodes[0].meta.get("val"), "dtype", None)


installed: list[Any] = []
"""The ops that are lowered to calls."""


def install(op: Any, lower: Callable[..., Any]) -> None:
    """Tells Inductor how to lower an op."""
    installed.append(op)
    register_lowering(op, type_promotion_kind=None)(lower)
