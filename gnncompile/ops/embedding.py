"""The op ``gnncompile::embedding_gradient``: the gradient of an embedding's weights, by torch's own kernel.

Inductor would add each row of the gradient atomically to a row of the weights. On a CPU, threads wait for each other at
the few rows of a small table, and the order of the sums differs from run to run. Torch's kernel gives each thread rows
of the weights, and sums in order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnncompile._compat import inductor_call
from gnncompile.ops.region import LIBRARY

_THEIRS = torch.ops.aten.embedding_dense_backward.default

LIBRARY.define(
    "embedding_gradient(Tensor gradient, Tensor indices, SymInt rows, SymInt padding, bool by_frequency) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _run(gradient: Tensor, indices: Tensor, rows: int, padding: int, by_frequency: bool) -> Tensor:
    return _THEIRS(gradient, indices, rows, padding, by_frequency)  # type: ignore[no-any-return]


LIBRARY.impl("embedding_gradient", _run, "CompositeExplicitAutograd")
torch.library.register_fake("gnncompile::embedding_gradient", _run, lib=LIBRARY)


def install() -> None:
    """Registers the lowering with Inductor: a call of torch's operation."""
    inductor_call.install_fallback(torch.ops.gnncompile.embedding_gradient.default, _THEIRS)
