"""What torch or PyG would capture anew for a single node, for no edge or at some size of their own choosing."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg
from torch_geometric.utils import to_dense_batch

import gnncompile
from gnncompile.capture.compile import callable_of
from gnncompile.support.case import CHANNELS, Case
from gnncompile.support.check import check
from gnncompile.support.table import SECTIONS
from tests.harness import light


@pytest.fixture
def _light() -> Iterator[None]:
    with light():
        yield


class Layer(nn.Module):
    """Applies a function to features, an edge list and a weight ``[3, CHANNELS, CHANNELS]``."""

    def __init__(self, fn: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.fn, self.weight = fn, nn.Parameter(torch.randn(3, CHANNELS, CHANNELS) / 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.fn(x, edge_index, self.weight)


def one_capture(fn: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """One graph for all sizes, without a break or a sync; outputs and gradients as in eager."""
    found = check(Case("a user's layer", lambda: Layer(fn)))
    assert found.passes, found


def graphs(compiled: Any) -> int:
    program = callable_of(compiled)
    assert program is not None
    return len(program.backend.captured)


def one_product_per_weight(x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight).tanh() @ weight


def rows_by_channel(x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
    return x[edge_index[0]].t().contiguous().sin() + (weight[0] @ x[edge_index[1]].t()).reshape(CHANNELS, -1)


def written_in_turns(x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
    out = x.new_empty(edge_index.size(1), CHANNELS)
    out[0::2] = x[edge_index[0, 0::2]] @ weight[0]
    out[1::2] = x[edge_index[1, 1::2]] @ weight[1]
    return out


def heads_packed(x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
    packed = (x @ weight[0]).unsqueeze(0).unflatten(-1, (2, -1)).unsqueeze(0).transpose(0, -2).squeeze(-2)
    one, other = packed.contiguous()
    return one * other


@pytest.mark.usefixtures("_light")
@pytest.mark.parametrize("fn", [one_product_per_weight, rows_by_channel, written_in_turns, heads_packed])
def test_layouts_are_not_guarded(fn: Callable[[Tensor, Tensor, Tensor], Tensor]):
    one_capture(fn)


# -- what torch decides by sizes ----------------------------------------------------------------------------------


def distances(x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
    """Of up to 25 rows torch takes differences, of more products of matrices."""
    return torch.cdist(x @ weight[0], x[edge_index[0]]).sum(1)


def masked_attention(x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
    q, k, v = (x @ weight).unflatten(-1, (2, -1)).transpose(1, 2)[:, None]
    mask = (x.detach()[:, 0] > -1.0).view(1, 1, 1, -1)
    return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@pytest.mark.usefixtures("_light")
@pytest.mark.parametrize("fn", [distances, masked_attention])
def test_what_torch_decides_by_sizes(fn: Callable[[Tensor, Tensor, Tensor], Tensor]):
    one_capture(fn)


Spread = Callable[[Tensor], Tensor]
"""A function of rows whose number may be 0 or 1."""

SPREADS: dict[str, Spread] = {
    "std of all": lambda rows: rows.std(),
    "std of all, biased": lambda rows: rows.std(unbiased=False),
    "std of all, corrected": lambda rows: rows.std(correction=0),
    "var of all": lambda rows: rows.var(unbiased=False),
    "std of rows": lambda rows: torch.std(rows, 0),
    "var of rows": lambda rows: rows.var(0, keepdim=True),
    "var of both axes, corrected": lambda rows: torch.var(rows, dim=(0, -1), correction=1, keepdim=True),
    "std of equal values": lambda rows: (rows * 0 + 2).std(unbiased=False),
    "var of features": lambda rows: rows.var(-1).sum(),
    "var corrected by two": lambda rows: torch.cat([rows, rows.new_ones(3, CHANNELS)]).var(0, correction=2),
}


@pytest.mark.usefixtures("_light")
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("spread", SPREADS)
def test_spreads_of_no_row_and_of_one(spread: str):
    """Torch's gradients compare the number of values with the correction, or divide by the difference on the host."""
    one_capture(lambda x, edge_index, weight: x * SPREADS[spread]((x @ weight[0])[edge_index[0]]))


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_spreads_by_inductor():
    fn = SPREADS["std of all"]
    found = check(Case("a spread", lambda: Layer(lambda x, e, w: x * fn((x @ w[0])[e[0]]))), inductor=True)
    assert found.passes, found


def test_other_distances_are_as_they_are():
    x = torch.randn(5, 3)
    for p in (1.0, float("inf")):
        fn = functools.partial(torch.cdist, p=p)
        torch.testing.assert_close(torch.compile(fn, fullgraph=True, backend="aot_eager")(x, x), fn(x, x))
        torch.testing.assert_close(gnncompile.compile(lambda x, f=fn: f(x, x))(x), fn(x, x))


class OneHead(nn.Module):
    """Attention over graphs as dense batches, with one head.

    Args:
        call: The masks of the call, and other arguments, for the mask of the nodes that are there.
        kwargs: Arguments of the attention.
    """

    def __init__(self, call: Callable[[Tensor], dict[str, Any]], **kwargs: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(CHANNELS, 1, **kwargs)
        self.call = call

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        dense, there = to_dense_batch(x, batch)
        keys = (dense if self.attention._qkv_same_embed_dim else dense[..., :3]).sin()
        given = [dense, keys, keys] if self.attention.batch_first else [t.transpose(0, 1) for t in (dense, keys, keys)]
        out = self.attention(*given, **{"need_weights": False, **self.call(there)})[0]
        return (out if self.attention.batch_first else out.transpose(0, 1))[there]  # type: ignore[no-any-return]


def of_pairs(there: Tensor) -> Tensor:
    """A mask for each graph: a node does not attend to nodes after it."""
    return torch.ones(there.size(1), there.size(1), dtype=torch.bool).triu(1).expand(there.size(0), -1, -1)


def added(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -2.0)


MASKS: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "of keys": lambda there: {"key_padding_mask": ~there},
    "of pairs": lambda there: {"attn_mask": of_pairs(there)},
    "of both": lambda there: {"key_padding_mask": ~there, "attn_mask": of_pairs(there)},
    "of keys and of all pairs": lambda there: {"key_padding_mask": ~there, "attn_mask": of_pairs(there)[0]},
    "of numbers": lambda there: {"key_padding_mask": added(~there), "attn_mask": added(of_pairs(there))},
}


@pytest.mark.usefixtures("_light")
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize(
    "kwargs", [{"batch_first": True}, {"bias": False}, {"kdim": 3, "vdim": 3, "batch_first": True}], ids=str
)
def test_attention_with_one_head(kwargs: dict[str, Any], masks: str):
    """Torch asks whether the first size of a mask is 1, which is the number of graphs."""
    for inference in (False, True):
        found = check(Case("one head", lambda: OneHead(MASKS[masks], **kwargs), ("x", "batch")), inference)
        assert found.passes, found


@pytest.mark.usefixtures("_light")
@pytest.mark.parametrize(
    ("call", "kwargs"),
    [({"need_weights": True}, {}), ({}, {"add_bias_kv": True}), ({}, {"add_zero_attn": True})],
    ids=str,
)
def test_attention_with_one_head_that_is_left_alone(call: dict[str, Any], kwargs: dict[str, Any]):
    make = functools.partial(OneHead, lambda there: {"key_padding_mask": ~there, **call}, batch_first=True, **kwargs)
    found = check(Case("one head", make, ("x", "batch")))
    assert not found.wrong and not found.breaks, found


@pytest.mark.usefixtures("_light")
def test_attention_with_one_head_refuses_the_mask_of_another_batch():
    attention = nn.MultiheadAttention(CHANNELS, 1, batch_first=True)
    x = torch.randn(3, 5, CHANNELS)
    for mask in ({"key_padding_mask": torch.zeros(1, 5) > 0}, {"attn_mask": torch.zeros(1, 5, 5) > 0}):
        for fn in (attention, gnncompile.compile(attention)):
            with pytest.raises((RuntimeError, AssertionError)):
                fn(x, x, x, need_weights=False, **mask)


class Recurrent(nn.Module):
    """A recurrent layer over the edges as one sequence, of which every node starts one more."""

    def __init__(self, kind: type[nn.RNNBase], **kwargs: Any) -> None:
        super().__init__()
        self.layer = kind(CHANNELS, 3, **kwargs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        steps = torch.cat([x[:1], x[edge_index[0]]])
        return self.layer(torch.stack([steps, steps.flip(0)], dim=0 if self.layer.batch_first else 1))


@pytest.mark.usefixtures("_light")
@pytest.mark.parametrize("kwargs", [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}], ids=str)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_over_any_number_of_steps(kind: type[nn.RNNBase], kwargs: dict[str, Any]):
    found = check(Case("recurrent", lambda: Recurrent(kind, **kwargs)))
    assert found.passes, found


@pytest.mark.usefixtures("_light")
def test_recurrent_layers_with_states_and_projection():
    torch.manual_seed(0)
    model = nn.LSTM(3, 4, proj_size=2, bias=False)
    compiled = gnncompile.compile(model)
    for steps in (4, 1):
        args = torch.randn(steps, 5, 3), (torch.randn(1, 5, 2), torch.randn(1, 5, 4))
        torch.testing.assert_close(compiled(*args), model(*args))
    assert graphs(compiled) == 1


@pytest.mark.usefixtures("_light")
def test_recurrent_layers_that_are_left_alone():
    """On a sequence without a batch, and with dropout in training, whose numbers a gradient would need again."""
    model = nn.GRU(3, 4, num_layers=2, dropout=0.5)
    x = torch.randn(4, 2, 3)
    results = []
    for fn in (model, gnncompile.compile(model)):
        torch.manual_seed(0)
        results.append(fn(x))
    torch.testing.assert_close(*results)
    model.eval()
    torch.testing.assert_close(gnncompile.compile(model)(x[:, 0]), model(x[:, 0]))


LAYERS = [
    "LCMAggregation", "SetTransformerAggregation", "MemPooling", "LSTMAggregation", "SortAggregation",
    "PatchTransformerAggregation", "MedianAggregation", "QuantileAggregation", "HEATConv", "DeepGraphInfomax",
]  # fmt: skip


@pytest.mark.usefixtures("_light")
@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_compare_sizes_or_look_at_data(name: str):
    (case,) = [c for cases in SECTIONS.values() for c in cases if c.name == name]
    assert isinstance(case, Case)
    found = check(case)
    assert found.passes, found


def one_graph_over_groups(model: nn.Module, groups: int | None = None, heads: tuple[int, ...] = ()) -> None:
    compiled = gnncompile.compile(model)
    for index in ([0, 0, 1, 1, 1, 3], [0, 1, 1], [0, 0, 1, 2], *([] if groups else [[0]])):
        x, rows = torch.randn(len(index), *heads, 3), torch.tensor(index)
        found, expected = (m(x, rows, dim_size=groups, dim=-x.dim()) for m in (compiled, model))
        torch.testing.assert_close(found, expected)
    assert graphs(compiled) == 1


@pytest.mark.usefixtures("_light")
@pytest.mark.parametrize("interpolation", ["linear", "lower", "higher", "nearest", "midpoint"])
def test_quantiles(interpolation: str):
    one_graph_over_groups(pyg.aggr.QuantileAggregation([0.2, 0.9], interpolation, fill_value=7.0))
    one_graph_over_groups(pyg.aggr.QuantileAggregation(0.4, interpolation), groups=4)
    one_graph_over_groups(pyg.aggr.QuantileAggregation([0.2, 0.9], interpolation), groups=4, heads=(2,))


@pytest.mark.usefixtures("_light")
@pytest.mark.parametrize("k", [1, 3, 9])
def test_sorted_rows_of_groups_shorter_and_longer(k: int):
    one_graph_over_groups(pyg.aggr.SortAggregation(k))


def two_types_joined(x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
    row, col = edge_index
    message = nn.functional.linear(torch.cat([x.float()[row], x[col]], dim=1), weight[:2].reshape(CHANNELS, -1))
    return x.new_zeros(x.shape).index_add(0, col, message)


def copies_of_containers(x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
    entries, layers = copy.copy({"x": x}), copy.copy([weight[0]])
    entries["x"], layers[0] = entries["x"] @ layers[0], weight[1]
    return entries["x"] @ layers[0]


@pytest.mark.usefixtures("_light")
@pytest.mark.parametrize("fn", [two_types_joined, copies_of_containers])
def test_users_idioms(fn: Callable[[Tensor, Tensor, Tensor], Tensor]):
    one_capture(fn)


@pytest.mark.usefixtures("_light")
@pytest.mark.parametrize("affine", [True, False])
def test_normalisation_that_takes_a_single_row(affine: bool):
    model = pyg.BatchNorm(3, affine=affine, allow_single_element=True)
    compiled = gnncompile.compile(copy.deepcopy(model))
    for rows in (7, 1, 0, 2, 1):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(compiled(x), model(x))
        torch.testing.assert_close(compiled.state_dict(), model.state_dict())
    model.eval(), compiled.eval()
    torch.testing.assert_close(compiled(x), model(x))
    assert graphs(compiled) == 2  # one in training


# -- what Inductor is told ----------------------------------------------------------------------------------------


def test_what_the_backward_reads_has_the_strides_of_each_call():
    """Of ``[3, num_nodes, CHANNELS]``, compiled by Inductor."""
    weight = torch.randn(3, CHANNELS, CHANNELS, dtype=torch.double, requires_grad=True)

    def fn(x: Tensor) -> Tensor:
        return (x @ weight).relu().sum(0)

    compiled = gnncompile.compile(fn)
    for nodes in (12, 17, 9):
        x = torch.randn(nodes, CHANNELS, dtype=torch.double, requires_grad=True)
        expected, found = (torch.autograd.grad(f(x).square().sum(), [x, weight]) for f in (fn, compiled))
        torch.testing.assert_close(found, expected)


def test_a_row_of_each_group():
    """A view of what is not contiguous, compiled by Inductor: for groups of one row as well."""
    torch.manual_seed(0)
    lstm = nn.LSTM(CHANNELS, CHANNELS, batch_first=True)

    def fn(x: Tensor) -> Tensor:
        return lstm(x)[0][:, -1].sin()

    compiled = gnncompile.compile(fn)
    for groups, rows in ((3, 4), (5, 1), (1, 1)):
        x = torch.randn(groups, rows, CHANNELS)
        torch.testing.assert_close(compiled(x), fn(x))
    assert graphs(compiled) == 1
