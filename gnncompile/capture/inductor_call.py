"""A line of our own in the code that Inductor writes: a call that fills, or adds to, buffers of Inductor's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gnncompile._compat.inductor import V, ir, register_lowering


class Call(ir.ExternKernel):
    """One operation of Inductor's graph that writes to buffers; subclasses say what its line is.

    Args:
        inputs: All that it reads or writes, realized.
        written: Those of them that it writes, all on one device.
        constants: What else the line depends on.
    """

    def __init__(self, inputs: Sequence[Any], written: Sequence[Any], constants: tuple[Any, ...] = ()) -> None:
        self.device: torch.device = written[0].get_device()
        super().__init__(None, ir.NoneLayout(device=self.device), self.unwrap_storage(inputs), constants)
        self.mutation_outputs = [ir.MutationOutput(ir.NoneLayout(device=self.device), w, self) for w in written]
        V.graph.register_operation(self)

    def references(self) -> list[str]:
        """The inputs as the generated code names them."""
        inputs: Sequence[Any] = self.inputs
        return [i.codegen_reference() for i in inputs]

    def get_outputs(self) -> list[Any]:
        """The buffers as they are after the call."""
        return list(self.mutation_outputs)

    def get_device(self) -> torch.device | None:
        """The device of the buffers."""
        return self.device

    def get_unbacked_symbol_defs(self) -> Any:
        """The call makes no new sizes."""
        return type(super().get_unbacked_symbol_defs())()


def contiguous(tensor: Any) -> Any:
    """A tensor of Inductor's graph, in memory and in order."""
    return ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(tensor))


def install(op: Any, lower: Callable[..., Any]) -> None:
    """Tells Inductor how to lower an op."""
    register_lowering(op, type_promotion_kind=None)(lower)
