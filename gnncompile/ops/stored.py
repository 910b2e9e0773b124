"""The op that keeps a value in memory: ``gnncompile::stored(value)``, which is equal to `value`.

Inductor may compute a value in several kernels, each with other rounding. All readers of the op's result read the same
numbers. The partitioner of AOTAutograd does not compute the result again in the backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnncompile._compat import inductor_call
from gnncompile.ops.region import LIBRARY

LIBRARY.define("stored(Tensor value) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def _run(value: Tensor) -> Tensor:
    return value.clone()


def _backward(ctx: Any, cotangent: Tensor) -> Tensor:
    return cotangent


LIBRARY.impl("stored", _run, "CompositeExplicitAutograd")
torch.library.register_fake("gnncompile::stored", _run, lib=LIBRARY)
torch.library.register_autograd("gnncompile::stored", _backward, lib=LIBRARY)


def install() -> None:
    """Registers the lowering with Inductor: the value is written to memory, and not copied."""
    inductor_call.install_stored(torch.ops.gnncompile.stored.default)
