"""Random message-passing layers for hypothesis, as users write them.

A message is computed from features of both ends and of the edges, and reduced in one of several ways. A message is a
tree: a leaf is the name of an input, and an inner node is ``(function, argument, ...)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import scatter, softmax

Tree = Any
LEAVES = ("x_i", "x_j", "x_j", "e", "w", "p", "number")

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": lambda a: -a,
    "abs": torch.abs,
    "relu": torch.relu,
    "leaky_relu": lambda a: F.leaky_relu(a, 0.2),
    "elu": F.elu,
    "silu": F.silu,
    "gelu": F.gelu,
    "softplus": F.softplus,
    "sigmoid": torch.sigmoid,
    "tanh": lambda a: a.tanh(),
    "sin": torch.sin,
    "exp": lambda a: torch.exp(-a.abs()),
    "log": lambda a: torch.log(a.abs() + 0.5),
    "log1p": lambda a: a.abs().log1p(),
    "sqrt": lambda a: (a * a + 0.25).sqrt(),
    "rsqrt": lambda a: torch.rsqrt(a.square() + 1),
    "square": lambda a: a**2,
    "power": lambda a: (a.abs() + 0.5) ** 1.5,
    "reciprocal": lambda a: 1 / (a.abs() + 0.5),
    "from one": lambda a: 1 - a,
    "sign": torch.sign,
    "floor": lambda a: (2 * a).floor(),
    "trunc": lambda a: torch.trunc(2 * a),
    "clamp": lambda a: a.clamp(-0.5, 1.0),
    "clamp_min": lambda a: a.clamp(min=-0.25),
    "hardtanh": F.hardtanh,
    "detach": lambda a: a.detach() * a,
    "masked": lambda a: a.masked_fill(a > 0.5, 0.25),
    "where": lambda a: torch.where(a > 0, a, 0.3 * a),
    "as float": lambda a: (a > 0).to(a.dtype) * a,
    "softmax": lambda a: F.softmax(a, dim=-1),
    "log_softmax": lambda a: a.log_softmax(-1),
    "sum": lambda a: a.sum(-1, keepdim=True),
    "mean": lambda a: a.mean(dim=-1, keepdim=True),
    "norm": lambda a: a / (a.norm(dim=-1, keepdim=True) + 0.5),
    "layer_norm": lambda a: F.layer_norm(a, a.shape[-1:]),
    "cumsum": lambda a: a.cumsum(-1),
    "flip": lambda a: a.flip(-1),
    "slice": lambda a: a[..., :1] * 2,
    "in place": lambda a: (a * 1).mul_(2).add_(0.5),
    "double": lambda a: torch.cat([a, a], -1).chunk(2, dim=-1)[1],
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / (b.abs() + 0.5),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "choose": lambda a, b: torch.where(a > b, a, b * b),
    "dot": lambda a, b: (a * b).sum(dim=-1, keepdim=True),
    "addcmul": lambda a, b: torch.addcmul(a, a, b, value=0.5),
    "lerp": lambda a, b: torch.lerp(a, b, 0.25),
    "mask": lambda a, b: a * (b > 0),
    "both": lambda a, b: torch.where((a > 0) & ~(b > 0), a, b),
}
TREES: st.SearchStrategy[Tree] = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from([*UNARY, "linear"]), inner),
        st.tuples(st.sampled_from([*BINARY]), inner, inner),
    ),
    max_leaves=6,
)
REDUCTIONS = ("sum", "mean", "max", "min", "mul", "std", "var", "softmax", "powermean")
BY_HAND = ("index_add", "scatter_add", "scatter_max", "scatter_reduce", "index_put")
EPILOGUES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda out, x: out,
    "relu": lambda out, x: out.relu(),
    "residual": lambda out, x: out + x,
    "normalize": lambda out, x: F.normalize(out, dim=-1),
    "squashed": lambda out, x: torch.tanh(out * 0.5) - x.sigmoid(),
}


@dataclass(frozen=True)
class Plan:
    """A layer: its message, its reduction, the logits of its attention (None without attention), and its epilogue."""

    message: Tree
    reduce: str
    logits: Tree | None = None
    epilogue: str = "none"
    heads: int = 1
    channels: int = 3


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    reduce = draw(st.sampled_from([*REDUCTIONS[:4] * 3, *REDUCTIONS, *BY_HAND]))
    logits = draw(TREES) if reduce in ("sum", "index_add", "max") and draw(st.booleans()) else None
    # The variance of equal messages is only rounding error. Divided by its norm, it has no correct value.
    epilogue = draw(st.sampled_from([e for e in EPILOGUES if e != "normalize" or reduce not in ("std", "var")]))
    heads = draw(st.sampled_from([1, 1, 2]))
    channels = draw(st.sampled_from([1, 3, 4, 8]))
    return Plan(draw(TREES), reduce, logits, epilogue, heads, channels)


class Layer(MessagePassing):
    """The layer of a plan.

    ``x_i``, ``x_j`` and ``e`` are ``[num_edges, channels]``, or ``[num_edges, heads, channels]`` with several heads.
    ``w`` has one feature per edge, and ``p`` is a parameter.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(aggr=plan.reduce if plan.reduce in REDUCTIONS else "sum", node_dim=0)
        self.plan = plan
        shape = (plan.heads, plan.channels) if plan.heads > 1 else (plan.channels,)
        self.p = nn.Parameter(torch.randn(shape, dtype=torch.float64))
        self.linear = nn.Linear(plan.channels, plan.channels, dtype=torch.float64)

    def forward(self, x_src: Tensor, x_dst: Tensor, edge_index: Tensor, e: Tensor, w: Tensor) -> Tensor:
        size = (x_src.size(0), x_dst.size(0))
        out = self.propagate(edge_index, x=(x_src, x_dst), e=e, w=w, size=size)
        return EPILOGUES[self.plan.epilogue](out, x_dst)

    def message(
        self, x_i: Tensor, x_j: Tensor, e: Tensor, w: Tensor, index: Tensor, ptr: Tensor | None, size_i: int | None
    ) -> Tensor:
        known = {"x_i": x_i, "x_j": x_j, "e": e, "w": w, "p": self.p, "number": torch.tensor(0.75, dtype=x_i.dtype)}
        message = self.value(self.plan.message, known).expand_as(x_i)
        if self.plan.logits is not None:
            logits = self.value(self.plan.logits, known).expand_as(x_i).sum(-1, keepdim=True)
            message = message * softmax(logits, index, ptr, size_i)
        return message

    def value(self, tree: Tree, known: dict[str, Tensor]) -> Tensor:
        if isinstance(tree, str):
            return known[tree]
        values = [self.value(t, known) for t in tree[1:]]
        values = [v.expand(*known["x_i"].shape[1:]) if v.dim() == 0 else v for v in values]
        if tree[0] == "linear":
            return self.linear(values[0].expand(*values[0].shape[:-1], self.plan.channels))
        return UNARY[tree[0]](*values) if tree[0] in UNARY else BINARY[tree[0]](*values)

    def aggregate(
        self, inputs: Tensor, index: Tensor, ptr: Tensor | None = None, dim_size: int | None = None
    ) -> Tensor:
        plan = self.plan
        if plan.reduce in REDUCTIONS:
            if plan.heads > 1 and plan.reduce in ("std", "var", "softmax", "powermean"):
                return super().aggregate(inputs.flatten(1), index, ptr, dim_size).view(-1, plan.heads, plan.channels)
            return super().aggregate(inputs, index, ptr, dim_size)
        zeros = inputs.new_zeros(dim_size, *inputs.shape[1:])
        wide = index.view(-1, *(1 for _ in inputs.shape[1:])).expand_as(inputs)
        if plan.reduce == "index_add":
            return zeros.index_add(0, index, inputs)
        if plan.reduce == "scatter_add":
            return zeros.scatter_add_(0, wide, inputs)
        if plan.reduce == "scatter_max":
            return scatter(inputs, index, 0, dim_size, "max")
        if plan.reduce == "scatter_reduce":
            return zeros.scatter_reduce(0, wide, inputs, "amin", include_self=False)
        return zeros.index_put((index,), inputs, accumulate=True)


def arguments(plan: Plan, sources: int, destinations: int, pairs: list[tuple[int, int]], seed: int) -> list[Tensor]:
    """Returns ``x_src``, ``x_dst``, ``edge_index``, ``e`` and ``w`` for a layer; the features are float64."""
    generator = torch.Generator().manual_seed(seed)
    shape = (plan.heads, plan.channels) if plan.heads > 1 else (plan.channels,)

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_()

    edge_index = torch.tensor(pairs, dtype=torch.long).view(-1, 2).t().contiguous()
    count = len(pairs)
    weight = (count, 1, 1) if plan.heads > 1 else (count, 1)
    return [randn(sources, *shape), randn(destinations, *shape), edge_index, randn(count, *shape), randn(*weight)]
