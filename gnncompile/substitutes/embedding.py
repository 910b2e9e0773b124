"""Substitutes for embeddings: an embedding with ``sparse=True`` breaks the graph and runs uncompiled.

Their gradient is a sparse tensor of the rows that were looked up. A compiled backward can't return a sparse tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gnncompile._compat import copy_of
from gnncompile.substitutes.registry import substitute

_embedding_forward = copy_of(nn.Embedding.forward)
_bag_forward = copy_of(nn.EmbeddingBag.forward)


@substitute(nn.Embedding.forward)
def embedding_forward(self: Any, input: Tensor) -> Tensor:
    """See :class:`torch.nn.Embedding`."""
    _leave_sparse(self)
    return _embedding_forward(self, input)  # type: ignore[no-any-return]


@substitute(nn.EmbeddingBag.forward)
def bag_forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
    """See :class:`torch.nn.EmbeddingBag`."""
    _leave_sparse(self)
    return _bag_forward(self, *args, **kwargs)  # type: ignore[no-any-return]


def _leave_sparse(layer: Any) -> None:
    if layer.sparse and layer.weight.requires_grad and torch.is_grad_enabled():
        torch._dynamo.graph_break(msg="the gradient of an embedding with sparse=True is a sparse tensor")
