"""Measures the effect of rounding on a program: runs the program eagerly in float64, with noise on every value.

If rounding decides a comparison, a maximum or a difference, noise changes the result widely. Then a compiled model may
differ from eager as widely.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map


class _Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, size: float, generator: torch.Generator) -> Tensor:
        ctx.size, ctx.generator = size, generator
        return value * _factor(value, size, generator)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * _factor(gradient, ctx.size, ctx.generator), None, None


def _factor(like: Tensor, size: float, generator: torch.Generator) -> Tensor:
    noise = torch.rand(like.shape, generator=generator, dtype=torch.float64) * 2 - 1
    return (1 + size * noise).to(like.device)


class Shaken(TorchFunctionMode):
    """Multiplies each float64 result of a torch function, and its gradient, by random factors within 1 +- `size`."""

    def __init__(self, size: float, seed: int) -> None:
        super().__init__()
        self.size, self.generator = size, torch.Generator().manual_seed(seed)
        self.within = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if self.within or name == "__get__" or (name.endswith("_") and not name.endswith("__")) or name in _PLAIN:
            return made
        self.within = True
        try:
            return tree_map(self._shake, made)
        finally:
            self.within = False

    def _shake(self, value: Any) -> Any:
        if type(value) is not Tensor or value.dtype is not torch.float64:
            return value
        return _Noise.apply(value, self.size, self.generator)


_PLAIN = {"backward", "requires_grad_", "__set__", "__setitem__", "to", "clone", "arange"}
