"""Every pass on small traced graphs: operations before and after, results and gradients against eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch_geometric.utils import add_remaining_self_loops, remove_self_loops, scatter, softmax

import gnncompile
from gnncompile import _compat
from gnncompile.capture.compile import callable_of
from gnncompile.ir.region import Space, parse
from gnncompile.passes.analysis import written_nodes
from gnncompile.passes.log import Skip
from tests.harness import light
from tests.tracing import WIDTH, Traced, add, check, data, wide, zeros

HEADS = 2
WEIGHT = torch.arange(16.0).view(WIDTH, WIDTH) / 10


@pytest.fixture(autouse=True, scope="module")
def _light() -> Iterator[None]:
    # Edges are masked for PyG's own layers only, and these functions stand for such layers.
    with light(), mock.patch.object(_compat, "calling_file", return_value="torch_geometric"):
        yield


# -- functional ---------------------------------------------------------------------------------------------------


def test_functional_turns_writes_to_fresh_tensors_into_values():
    found = check(lambda x, row, col: zeros(x).scatter_add_(0, wide(col, x[row]), x[row]).mul_(2), *data())
    assert found is not None
    assert found.count("captured", "scatter_add_.default") == 1 and found.count("captured", "mul_.Scalar") <= 1
    assert found.count("functionalize", "scatter_add.default") == 1
    assert not any(op.split(".")[1].endswith("_") for op in found.after["functionalize"] if op.startswith("aten."))


def test_functional_leaves_writes_to_views_and_inputs():
    def fn(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
        out = x * 1
        out[0].mul_(3)
        return out

    found = check(fn, *data())
    assert found is not None and found.count("functionalize", "mul_") == 1


@pytest.mark.parametrize(
    "write",
    [
        lambda x: (x.to(torch.bfloat16) * 2).add_(x),
        lambda x: x.to(torch.bfloat16).clone().sub_(x.double(), alpha=0.5),
        lambda x: (x * 2).mul_(x.double()),
        lambda x: torch.zeros_like(x, dtype=torch.float64).copy_(x).view(-1),
        lambda x: torch.empty_like(x).copy_(x[:1]),
        lambda x: x.new_empty(x.size(1), x.size(0)).copy_(x.t()).view(-1),
        lambda x: x.detach().clone().gt_(0.5),
        lambda x: (x > 0).int().clone().add_(x > 1),
    ],
)
def test_functional_keeps_what_is_written(write: Callable[[Tensor], Tensor]):
    """Dtypes, as under autocast, where results of layers in 16 bits meet values in 32; and the layout of copies."""
    found = check(lambda x, row, col: write(x), *data())
    assert found is not None and not any(op.split(".")[1].endswith("_") for op in found.after["functionalize"])


def test_functional_drops_dropout_that_does_nothing():
    found = check(lambda x, row, col: add(x, col, F.dropout(x[row], 0.5, training=False)), *data())
    assert (
        found is not None
        and found.count("functionalize", "dropout") == 0
        and found.count("lower_unfused", "region") == 1
    )


# -- sizes, edges, shared -----------------------------------------------------------------------------------------


def test_sizes_come_from_the_inputs():
    found = check(lambda x, row, col: add(x, col, torch.ones_like(x[row])), *data())
    assert found is not None
    assert found.count("captured", "ones_like") == 1 and found.count("normalize_sizes", "ones_like") == 0
    assert found.count("normalize_sizes", "aten.full.default") == 2
    assert found.count("normalize_sizes", "aten.index.Tensor") == 0  # nothing is gathered only to learn a length


def test_rows_of_an_edge_list_are_followed_to_where_they_came_from():
    def fn(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
        edge_index = torch.stack([row, col])
        loops = torch.arange(x.size(0)).view(1, -1).expand(2, -1)
        edge_index = torch.cat([edge_index, loops], dim=1)
        source, destination = edge_index[0], edge_index[1]
        return add(x, destination, x[source])

    found = check(fn, *data())
    assert found is not None
    assert found.count("normalize_sizes", "aten.stack") == 1 and found.count("resolve_edge_lists", "aten.stack") == 0


def test_equal_structure_is_made_once():
    def fn(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
        for _ in range(3):
            edge_index, _ = add_remaining_self_loops(torch.stack([row, col]), num_nodes=x.size(0))
            x = add(x, edge_index[1], x[edge_index[0]]).relu()
        return x

    found = check(fn, *data())
    assert found is not None
    assert found.count("canonicalize", "aten.arange") == 3 and found.count("cse", "aten.arange") == 1
    assert (
        found.count("lower_unfused", "gnncompile.csr") == 2 and found.count("lower_unfused", "gnncompile.region") == 3
    )


def test_random_numbers_are_not_shared():
    def fn(x: Tensor) -> Tensor:
        return torch.rand_like(x) - torch.rand_like(x)

    assert Traced(fn, torch.ones(50, 4)).result.abs().max() > 0


# -- idioms -------------------------------------------------------------------------------------------------------

GATHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x[idx]": lambda x, idx: x[idx],
    "index_select": lambda x, idx: x.index_select(0, idx),
    "index_select of dim -2": lambda x, idx: x.index_select(-2, idx),
    "gather": lambda x, idx: x.gather(0, idx.view(-1, 1).expand(-1, x.size(1))),
    "embedding": lambda x, idx: F.embedding(idx, x),
    "take rows of int32": lambda x, idx: x.index_select(0, idx.int()),
}


@pytest.mark.parametrize("spelling", GATHERS)
def test_spellings_of_a_gather(spelling: str):
    found = check(lambda x, row, col: add(x, col, GATHERS[spelling](x, row).exp()), *data())
    assert found is not None and found.count("lower_unfused", "gnncompile.region") == 1
    if spelling != "embedding":
        assert found.count("lower_unfused", "index_select") + found.count("lower_unfused", "gather") == 0


EXCLUDE = {"include_self": False}
REDUCTIONS: dict[str, tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "index_add_": ("sum", lambda x, i, m: zeros(x).index_add_(0, i, m)),
    "index_add": ("sum", lambda x, i, m: zeros(x).index_add(0, i, m)),
    "scatter_add_": ("sum", lambda x, i, m: zeros(x).scatter_add_(0, wide(i, m), m)),
    "scatter_add of zeros_like": ("sum", lambda x, i, m: torch.zeros_like(x).scatter_add(0, wide(i, m), m)),
    "index_put_": ("sum", lambda x, i, m: zeros(x).index_put_((i,), m, accumulate=True)),
    "scatter_reduce sum": ("sum", lambda x, i, m: zeros(x).scatter_reduce(0, wide(i, m), m, "sum")),
    "scatter_reduce_ mean": ("sum", lambda x, i, m: zeros(x).scatter_reduce_(0, wide(i, m), m, "mean", **EXCLUDE)),
    "scatter_reduce amax": ("max", lambda x, i, m: zeros(x).scatter_reduce(0, wide(i, m), m, "amax", **EXCLUDE)),
    "scatter_reduce amin": ("min", lambda x, i, m: zeros(x).scatter_reduce(0, wide(i, m), m, "amin", **EXCLUDE)),
    **{f"PyG {r}": (k, lambda x, i, m, r=r: scatter(m, i, 0, x.size(0), r)) for r, k in
       [("sum", "sum"), ("add", "sum"), ("mean", "sum"), ("max", "max"), ("min", "min")]},
}  # fmt: skip


@pytest.mark.parametrize("spelling", REDUCTIONS)
def test_spellings_of_a_reduction(spelling: str):
    kind, reduction = REDUCTIONS[spelling]
    found = check(lambda x, row, col: reduction(x, col, x[row] * x[col]), *data())
    assert found is not None and found.count("canonicalize", "segment_reduce") == 1
    (region,) = found.ctx.log.regions
    program = parse(region.spec)
    assert program.nodes[program.reductions[0]].op == f"reduce_{kind}"  # others are for the gradient
    assert found.count("lower_unfused", "aten.index") + found.count("lower_unfused", "scatter") == 0
    assert found.ctx.log.skipped == []


OTHER_MEANINGS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "a base of which few rows change": lambda x, i, m: (zeros(x) + 1).index_add_(0, i[:2], zeros(x)[:2]),
    "index_put without accumulate": lambda x, i, m: zeros(x).index_put((i.unique(),), m[: i.unique().numel()]),
    "the base is counted": lambda x, i, m: zeros(x).scatter_reduce(0, wide(i, m), m, "amax", include_self=True),
    "another dimension": lambda x, i, m: x.new_zeros(x.size(1), x.size(0)).index_add_(1, i, m.t()),
    "an index that differs by column": lambda x, i, m: zeros(x).scatter_add(
        0, torch.stack([i, i.flip(0)], 1).repeat(1, 2), m
    ),
}


@pytest.mark.parametrize("spelling", [s for s in OTHER_MEANINGS if "without" not in s])
def test_reductions_that_mean_something_else_stay(spelling: str):
    found = check(lambda x, row, col: OTHER_MEANINGS[spelling](x, col, x[row]), *data())
    assert found is not None and found.count("canonicalize", "segment_reduce") == 0


# -- regions ------------------------------------------------------------------------------------------------------


def attention(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
    h = x.unsqueeze(1).expand(-1, HEADS, -1) * torch.arange(1.0, HEADS + 1).view(1, HEADS, 1)
    score = h.sum(-1)
    alpha = softmax(F.leaky_relu(score[row] + score[col], 0.2), col, num_nodes=x.size(0))
    return add(x, col, h[row] * alpha.unsqueeze(-1))


def test_attention_is_one_region():
    found = check(attention, *data())
    assert found is not None
    (region,) = found.ctx.log.regions
    assert len(parse(region.spec).softmaxes) == 1 and found.count("lower_unfused", "softmax") == 0


def test_softmax_that_leaves_is_a_region_of_its_own():
    found = check(lambda x, row, col: softmax(x[row] * x[col], col, num_nodes=x.size(0)), *data())
    assert found is not None and found.count("lower_unfused", "gnncompile.region") == 1


def test_rows_gathered_for_a_region_get_their_gradient_from_a_walk():
    """An index that is neither end of the edges: its rows are stored per edge, and no gradient is added by atomics."""

    def fn(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
        return add(x, col, x[row] * (2 * x)[(row + col) % x.size(0)])

    found = check(fn, *data())
    assert found is not None and found.count("lower_unfused", "index_select") == 0
    gathered = parse(found.ctx.log.regions[1].spec)
    assert [n.op for n in gathered.nodes] == ["input", "on_edges"]


def test_layout_by_source_only_for_a_gradient():
    x, row, col = data()
    made = []
    for wanted in (False, True):
        compiled = gnncompile.compile(lambda x, row, col: add(x, col, x[row]))
        compiled(x.clone().requires_grad_(wanted), row, col)
        made.append(callable_of(compiled).backend.captured[0].structure.program.results)
    assert [len(r) for r in made] == [3, 6]


def heads(x: Tensor) -> Tensor:
    return x.view(x.size(0), HEADS, WIDTH // HEADS)


FEATURE_AXES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "sum over the first axis": lambda x, row, col: (heads(x)[row] * heads(x)[col].tanh()).sum(1),
    "sum over an axis of equal entries": lambda x, row, col: x[row][:, :1].expand(-1, 5).sum(-1, keepdim=True) * x[row],
    "reshaped rows": lambda x, row, col: (heads(x[row]) * heads(x[col])).sum(1),
    "another width inside": lambda x, row, col: (
        heads(x)[row] * (heads(x[row])[:, :, :1] - torch.arange(3.0)).pow(2).sum(-1).exp().view(-1, HEADS, 1)
    ).sum(1),
    "softmax": lambda x, row, col: (x[row] - x[col]).softmax(1) * x[row],
    "logarithm of a softmax": lambda x, row, col: (x[row] - x[col]).log_softmax(-1) * x[row],
    "softmax of large numbers": lambda x, row, col: (1e4 * (x[row] - x[col])).softmax(-1),
    "softmax over heads": lambda x, row, col: (heads(x)[row].softmax(1) * heads(x)[row]).sum(1),
    "softmax of weights": lambda x, row, col: (heads(x)[row] * x[row][:, :HEADS].softmax(1).unsqueeze(-1)).sum(1),
}


@pytest.mark.parametrize("case", FEATURE_AXES)
def test_feature_axes(case: str):
    """Message axes that are summed, reshaped or normalised are part of the region."""

    def fn(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
        message = FEATURE_AXES[case](x @ torch.eye(WIDTH), row, col)  # its width is a number
        return torch.zeros(x.size(0), message.size(1)).index_add_(0, col, message)

    found = check(fn, *data())
    assert found is not None and found.ctx.log.skipped == []
    (region,) = found.ctx.log.regions
    assert all(n.op != "input" or n.space is not Space.EDGE for n in parse(region.spec).nodes)


def test_softmax_over_masked_edges_is_not_one_over_features():
    with pytest.raises(_compat.Recapture, match="reads edges whose removed self loops are only masked"):
        Traced(lambda x, row, col: x + x[without_loops(row, col)[0]].softmax(0).sum(0), *data())


UNFUSABLE: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], int, str]] = {
    "cumsum": (lambda x, row, col: add(x, col, x[row].cumsum(1)), 1, ""),
    "linear on edges": (lambda x, row, col: add(x, col, F.linear(x[row], WEIGHT)), 1, ""),
    "arc tangent": (lambda x, row, col: add(x, col, x[row].atan()), 1, ""),
    "two other ends": (lambda x, row, col: add(x, col, x[row] * x[(row + 1) % x.size(0)]), 2, "one other end"),
    "wide rows of two other ends": (
        lambda x, row, col: add(x, col, (w := x.repeat(1, 8))[row] * w[(row + 1) % x.size(0)])[:, :4],
        2,
        "",
    ),
    "rows of another end read twice": (
        lambda x, row, col: add(x, col, x[row] * (h := x[(row + 1) % x.size(0)])) + add(x, col, h.atan()),
        2,
        "one other end",
    ),
    "integer weights": (lambda x, row, col: add(x, col, x[row] * row.view(-1, 1)), 1, "int64"),
    "three feature axes": (
        lambda x, row, col: add(x, col, x.view(-1, 2, 2, 1)[row] * x.view(-1, 2, 1, 2)[row]),
        0,
        "3 feature axes",
    ),
    "mul": (lambda x, row, col: scatter(x[row], col, 0, x.size(0), "mul"), 0, "'mul' has no kernel"),
    "no channel": (lambda x, row, col: add(x, col, x[:, :0][row]).sum(1), 0, "length 0"),
}


@pytest.mark.parametrize("case", UNFUSABLE)
def test_what_is_not_fused_is_right_and_recorded(case: str):
    fn, regions, why = UNFUSABLE[case]
    found = check(fn, *data())
    assert found is not None and found.count("lower_unfused", "gnncompile.region") == regions
    skips = found.ctx.log.skipped
    assert any(why in s.reason for s in skips) if why else skips == []
    for skip in skips:
        assert isinstance(skip, Skip) and skip.line.startswith(("unit/test_passes.py", "tests/tracing.py"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float64_values_are_rounded_where_the_model_does(dtype: torch.dtype):
    """What a rounding loses is all that is left of these messages."""
    x, row, col = data()
    x = x.double().requires_grad_()

    def lost(x: torch.Tensor, row: torch.Tensor, col: torch.Tensor) -> torch.Tensor:
        return add(x, col, (x[row] - x[row].to(dtype).to(x.dtype)) * 1e9)

    with light():
        found = gnncompile.compile(lost)(x, row, col)
    torch.testing.assert_close(found, lost(x, row, col), rtol=1e-12, atol=0)


def test_regions_can_be_turned_off():
    x, row, col = data()
    for off in ("regions", "hoist"):
        compiled = gnncompile.compile(attention, options={off: False}, fullgraph=True)
        torch.testing.assert_close(compiled(x, row, col), attention(x, row, col))
        (captured,) = callable_of(compiled).backend.captured
        assert (captured.log.regions == []) is (off == "regions")
        assert (captured.structure is None) is (off == "hoist")


# -- lower: masked edges ------------------------------------------------------------------------------------------


def without_loops(row: Tensor, col: Tensor) -> Tensor:
    return remove_self_loops(torch.stack([row, col]))[0]


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "mul"])
def test_masked_edges_are_not_counted(reduce: str):
    def fn(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
        edge_index = without_loops(row, col)
        return scatter(x[edge_index[0]], edge_index[1], 0, x.size(0), reduce)

    found = check(fn, *data())
    assert found is not None and found.count("lower_unfused", "mark_dead") == 0
    assert found.count("lower_unfused", "gnncompile.region") == (reduce != "mul")


@pytest.mark.parametrize("masked", [False, True])
def test_regions_know_whether_edges_are_masked(masked: bool):
    def fn(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
        edge_index = without_loops(row, col) if masked else torch.stack([row, col])
        return attention(x, edge_index[0], edge_index[1])

    found = Traced(fn, *data())
    specs = [r.spec for r in found.ctx.log.regions]
    assert specs and all(parse(spec).unmasked is not masked for spec in specs)


def test_masked_softmax_that_is_not_fused():
    def fn(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
        edge_index = without_loops(row, col)
        message = (x.view(-1, 2, 2, 1) * x.view(-1, 2, 1, 2))[edge_index[0]]
        return add(x, edge_index[1], softmax(message, edge_index[1], num_nodes=x.size(0)) * message)

    assert check(fn, *data()) is not None


READERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean over edges": lambda x, e: x - x[e[0]].mean(0),
    "sort": lambda x, e: x[e[1].sort().values].sum(0),
}


@pytest.mark.parametrize("reader", READERS)
def test_readers_that_would_count_masked_edges_are_refused(reader: str):
    """And the caller then captures again with exact sizes."""
    fn = lambda x, row, col: READERS[reader](x, without_loops(row, col))  # noqa: E731
    with pytest.raises(_compat.Recapture, match="reads edges whose removed self loops are only masked"):
        Traced(fn, *data())
    compiled = gnncompile.compile(fn)
    check(fn, *data(), run=compiled)
    assert callable_of(compiled).backend.notes


# -- hoist --------------------------------------------------------------------------------------------------------


def test_structure_leaves_the_step():
    def fn(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
        edge_index, _ = add_remaining_self_loops(torch.stack([row, col]), num_nodes=x.size(0))
        norm = scatter(torch.ones(edge_index.size(1)), edge_index[1], 0, x.size(0), "sum").rsqrt()
        return add(x, edge_index[1], x[edge_index[0]] * norm[edge_index[1]].view(-1, 1))

    found = check(fn, *data())
    assert found is not None and found.structure is not None
    assert found.count("lower_unfused", "gnncompile.csr") >= 1
    for part in ("csr", "arange", "aten.ne", "aten.cat", "rsqrt"):
        assert found.count("hoist_structure", part) == 0
    assert found.count("hoist_structure", "gnncompile.region") == 1
    assert set(found.structure.inputs) < set(range(len([n for n in found.ctx.graph.nodes if n.op == "placeholder"])))


def test_a_layout_of_an_index_made_from_sizes_leaves_the_step():
    def fn(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
        reverse = torch.arange(row.size(0)).flip(0)  # no tensor of integers is read
        state = x[row].relu()
        return add(x, col, state - (2 * state)[reverse])

    x, row, col = data()
    found = check(fn, x, row, col)
    assert found is not None and found.count("lower_unfused", "gnncompile.csr") >= 2
    assert found.count("hoist_structure", "gnncompile.csr") == 0
    compiled = gnncompile.compile(fn)
    for edges in (len(row), len(row), len(row) - 1, len(row)):
        torch.testing.assert_close(compiled(x, row[:edges], col[:edges]), fn(x, row[:edges], col[:edges]))


def test_structure_is_built_once_per_graph():
    x, row, col = data()
    compiled = gnncompile.compile(attention)
    for _ in range(3):
        compiled(x, row, col)
    cache = callable_of(compiled).backend.captured[0].structure.cache
    assert cache.misses == 1
    compiled(x, row.clone(), col)
    assert cache.misses == 2


def test_zeros_without_a_prototype_are_a_base_as_well():
    found = check(lambda x, row, col: torch.zeros(x.size(0), x.size(1)).index_add_(0, col, x[row]), *data())
    assert found is not None and found.count("lower_unfused", "gnncompile.region") == 1


def test_edge_level_output():
    found = check(lambda x, row, col: (x[row] * x[col]).sum(-1), *data())
    assert found is not None and found.ctx.log.skipped == []


# -- which tensors a graph writes to ------------------------------------------------------------------------------


def test_an_index_of_a_write_is_not_written():
    def fn(x: Tensor, edge_index: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        count = x.new_zeros(x.size(0)).scatter_add_(0, edge_index[1], x.new_ones(edge_index.size(1))).clamp_(1)
        mask.view(-1)[:2].fill_(0)
        return count, x.reshape(-1)

    x, edge_index, mask = torch.randn(4, 2), torch.tensor([[0, 1, 2], [1, 1, 3]]), torch.ones(4)
    graph = make_fx(fn, pre_dispatch=True)(x, edge_index, mask).graph
    written = written_nodes(graph)
    x_node, edges_node, mask_node = (n for n in graph.nodes if n.op == "placeholder")
    assert mask_node in written and not {x_node, edges_node} & written
    assert not any(n.target is torch.ops.aten.select.int for n in written)
