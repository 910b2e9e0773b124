"""The substitute for attention with one head: with masks, torch asks whether the batch holds a single sequence."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from gnncompile._compat import copy_of
from gnncompile.substitutes.registry import substitute

_ordinary = copy_of(nn.MultiheadAttention.forward)


@substitute(nn.MultiheadAttention.forward)
def attention_forward(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    """See :class:`torch.nn.MultiheadAttention`.

    Torch views a mask as one per head, unless its first size is 1. With several heads the size is never 1. With one
    head it is the number of sequences, and the view only adds an axis.
    """
    masked = key_padding_mask is not None or (attn_mask is not None and attn_mask.dim() == 3)
    appended = self.bias_k is not None or self.add_zero_attn
    if self.num_heads != 1 or need_weights or not masked or query.dim() != 3 or appended or is_causal:
        return _ordinary(
            self, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        )
    inputs = [given if self.batch_first else given.transpose(0, 1) for given in (query, key, value)]
    mask = _mask(key_padding_mask, attn_mask, inputs[0], inputs[1].size(1))
    separate = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
    weights = self.in_proj_weight.chunk(3) if self._qkv_same_embed_dim else separate
    biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
    q, k, v = (
        F.linear(given, weight, bias).unsqueeze(1) for given, weight, bias in zip(inputs, weights, biases, strict=True)
    )
    found = F.scaled_dot_product_attention(q, k, v, mask, self.dropout if self.training else 0.0).squeeze(1)
    found = F.linear(found, self.out_proj.weight, self.out_proj.bias)
    return found if self.batch_first else found.transpose(0, 1), None


def _mask(of_keys: Tensor | None, of_pairs: Tensor | None, query: Tensor, keys: int) -> Tensor:
    """Returns the sum of both masks, which are added to the weights, with an axis for the head."""
    batch, rows = query.shape[:2]
    masks = []
    if of_keys is not None:
        masks.append(_added(of_keys, query).view(batch, 1, 1, keys))
    if of_pairs is not None:
        added = _added(of_pairs, query)
        masks.append(added.view(batch, 1, rows, keys) if added.dim() == 3 else added)
    return masks[0] if len(masks) == 1 else masks[0] + masks[1]


def _added(mask: Tensor, query: Tensor) -> Tensor:
    """Returns a mask as numbers to add: -inf where it is True."""
    if mask.is_floating_point():
        return mask
    return query.new_zeros(mask.shape).masked_fill(mask, -math.inf)
