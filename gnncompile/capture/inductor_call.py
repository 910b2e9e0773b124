"""A line of our own in the code that Inductor writes: a call that makes buffers of Inductor's, or writes to some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

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

    def filled(self) -> list[str]:
        """The results as the generated code names them."""
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


def tensor_of(result: Result) -> Any:
    """A result as the tensor that a lowering returns."""
    return ir.TensorBox(ir.StorageBox(result))


def contiguous(tensor: Any) -> Any:
    """A tensor of Inductor's graph, in memory and in order."""
    return ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(tensor))


def install(op: Any, lower: Callable[..., Any]) -> None:
    """Tells Inductor how to lower an op."""
    register_lowering(op, type_promotion_kind=None)(lower)
