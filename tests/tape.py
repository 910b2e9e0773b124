"""A substitute for CUDA graphs on a CPU: a tape records operations, and replays them over the same memory.

The capture of a CUDA graph runs nothing. So after a capture, a tape restores the tensors that existed before and that
`work` wrote to. It fills the new tensors with NaN; a CUDA graph leaves their values undefined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gnncompile.cudagraphs import cuda_graph
from gnncompile.cudagraphs.eligibility import host_waits


class Tape(TorchDispatchMode):
    """The operations of one capture."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.made: dict[int, Tensor] = {}
        self.before: list[tuple[Tensor, Tensor]] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if host_waits(func, args, kwargs):
            raise RuntimeError(f"{func} waits for the device")
        for given, argument in zip(args, func._schema.arguments, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tree_leaves(given):
                    if tensor.untyped_storage()._cdata not in self.made:
                        self.before.append((tensor.detach(), tensor.detach().clone()))
        result = func(*args, **kwargs)
        new = [r.alias_info is None for r in func._schema.returns]
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)] if all(new) else []
        for output in outputs:
            self.made[output.untyped_storage()._cdata] = output.detach()
        self.steps.append((func, args, kwargs, [o.detach() for o in outputs]))
        return result

    def undo(self) -> None:
        for tensor, value in reversed(self.before):
            with torch.autograd._unsafe_preserve_version_counter(tensor):
                tensor.copy_(value)
        for tensor in self.made.values():
            if tensor.is_floating_point():
                with torch.autograd._unsafe_preserve_version_counter(tensor):
                    tensor.fill_(float("nan"))

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, outputs in self.steps:
                again = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, Tensor)]
                for output, value in zip(outputs, again, strict=False):
                    output.copy_(value)


class Tapes:
    """Captures the work of one recording. `captures` counts the captures of all recordings."""

    captures = 0

    def __call__(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        Tapes.captures += 1
        tape = Tape()
        try:
            with tape:
                made = work()
        finally:
            tape.undo()
        return tape.replay, made

    def reset(self) -> None:
        """A tape holds nothing that must be freed."""


@contextmanager
def tapes() -> Iterator[type[Tapes]]:
    """Makes recordings on a CPU use tapes inside this block."""
    Tapes.captures = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graph, "supports_cuda_graphs", lambda device: True)
        patch.setattr(cuda_graph, "recorder", lambda device: Tapes())
        patch.setattr(cuda_graph, "context", lambda device: 0)
        yield Tapes
