"""The ops that fix the rounding of a value: ``gnncompile::stored(value)`` and ``gnncompile::rounded(value)``.

Both return a value equal to `value`. Inductor may compute a value in several kernels, each with other rounding. All
readers of ``stored(value)`` read the same numbers, from memory, and the partitioner of AOTAutograd does not compute it
again in the backward. Inductor computes values of 16 bits in float32. ``rounded(value)`` has its dtype's precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnncompile._compat import inductor_call
from gnncompile.ops.region import LIBRARY

_own = torch.ops.gnncompile


def _run(value: Tensor) -> Tensor:
    return value.clone()


def _backward(ctx: Any, cotangent: Tensor) -> Tensor:
    return cotangent


for _name in ("stored", "rounded"):
    LIBRARY.define(f"{_name}(Tensor value) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gnncompile::{_name}", _run, lib=LIBRARY)
    torch.library.register_autograd(f"gnncompile::{_name}", _backward, lib=LIBRARY)


def install() -> None:
    """Registers the lowerings with Inductor. Neither copies a value that is in memory."""
    inductor_call.install_stored(_own.stored.default)
    inductor_call.install_rounded(_own.rounded.default)
