"""Bad input gets an error that names the argument and the remedy; changed input is noticed, never silently wrong."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

import gnncompile
from gnncompile.capture.compile import callable_of
from gnncompile.layout import csr
from tests.harness import light

NODES = 6
X = torch.randn(NODES, 4, generator=torch.Generator().manual_seed(0))
EDGES = torch.randint(NODES, (2, 14), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True, scope="module")
def _light() -> Iterator[None]:
    with light():
        yield


@pytest.fixture(scope="module")
def model() -> GCNConv:
    torch.manual_seed(0)
    return GCNConv(4, 3)


@pytest.fixture(scope="module")
def compiled(model: GCNConv, _light: None) -> Any:
    return gnncompile.compile(model)


def equal(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# -- inputs -------------------------------------------------------------------------------------------------------

BAD_INPUTS: dict[str, tuple[Any, type[Exception], str]] = {
    "float": (
        EDGES.float(),
        TypeError,
        r"edge_index: found dtype torch.float32, expected torch.int64.*edge_index.long\(\)",
    ),
    "bool": (EDGES.bool(), TypeError, r"edge_index: found dtype torch.bool, expected torch.int64"),
    "transposed": (
        EDGES.t(),
        ValueError,
        r"found shape \(14, 2\), expected \[2, num_edges\].*edge_index.t\(\).contiguous\(\)",
    ),
    "one axis": (EDGES[0], ValueError, r"edge_index: found shape \(14,\), expected \[2, num_edges\]"),
    "three rows": (
        EDGES[:1].expand(3, -1),
        ValueError,
        r"edge_index: found shape \(3, 14\), expected \[2, num_edges\]",
    ),
    "three axes": (EDGES.unsqueeze(0), ValueError, r"edge_index: found shape \(1, 2, 14\)"),
    "no axis": (torch.tensor(3), ValueError, r"edge_index: found shape \(\)"),
    "other device": (
        EDGES.to("meta"),
        ValueError,
        r"argument 1: found on meta, expected cpu like argument 0.*\.to\(device\)",
    ),
    "too large": (
        EDGES + 3,
        IndexError,
        r"edge_index: edge \d+ joins nodes \d+ and \d+ outside the graph.*from 0 to 5",
    ),
    "negative": (EDGES - 3, IndexError, r"edge_index: edge 0 joins nodes -\d and -?\d outside the graph"),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
@pytest.mark.parametrize("by_name", [False, True])
def test_bad_edge_index(case: str, by_name: bool, compiled: Any):
    bad, error, message = BAD_INPUTS[case]
    if by_name and case == "other device":
        message = message.replace("argument 1", "argument 'edge_index'")
    with pytest.raises(error, match=message):
        compiled(X, edge_index=bad) if by_name else compiled(X, bad)


def test_good_input_after_bad_input(model: GCNConv, compiled: Any):
    with pytest.raises(IndexError):
        compiled(X, EDGES + NODES)
    equal(compiled(X, EDGES), model(X, EDGES))


@pytest.mark.parametrize("layer", [SAGEConv, GATConv])
@pytest.mark.parametrize("row", [0, 1])
def test_index_out_of_range_at_either_end(layer: Any, row: int):
    compiled = gnncompile.compile(layer(4, 3))
    edges = EDGES.clone()
    edges[row, 5] = NODES
    with pytest.raises(IndexError, match="edge 5 joins nodes"):
        compiled(X, edges)


def test_index_exactly_at_the_bounds(model: GCNConv, compiled: Any):
    edges = torch.tensor([[0, NODES - 1], [NODES - 1, 0]])
    equal(compiled(X, edges), model(X, edges))


def test_layout_names_the_first_bad_edge():
    index, other = torch.tensor([0, 1, 2]), torch.tensor([0, 4, -1])
    with pytest.raises(IndexError, match=r"edge 1 joins nodes 1 and 4 outside the graph.*0 to 2 and 0 to 3"):
        csr.csr(index, other, 3, 4, None)
    assert csr.csr(index, other.clamp(0, 3), 3, 4, None)[0].tolist() == [0, 1, 2, 3]


def test_a_missing_argument_is_pythons_own_error(compiled: Any):
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'edge_index'"):
        compiled(X)


# -- settings -----------------------------------------------------------------------------------------------------

BAD_SETTINGS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "option": (
        {"options": {"regoins": True}},
        ValueError,
        r"options: found 'regoins', expected one of .*'regions'.*spelling",
    ),
    "option type": ({"options": {"regions": 1}}, ValueError, r"options\['regions'\]: found 1, expected a bool"),
    "number as bool": ({"options": {"structure_cache_entries": True}}, ValueError, r"found True, expected a int"),
    "calls from C++": ({"options": {"cpp_wrapper": True}}, ValueError, r"cpp_wrapper.*found True, expected False"),
    "mode": ({"mode": "fast"}, ValueError, r"mode: found 'fast', expected one of .*'reduce-overhead'"),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_bad_settings(case: str, model: GCNConv):
    settings, error, message = BAD_SETTINGS[case]
    with pytest.raises(error, match=message):
        gnncompile.compile(model, **settings)


def test_a_setting_for_all_compiles_that_kernels_cannot_be_called_under(model: GCNConv):
    with torch._inductor.config.patch(cpp_wrapper=True):
        found = gnncompile.compile(model)(X, EDGES)
    torch.testing.assert_close(found, model(X, EDGES))


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_bad_settings_of_a_decorator(case: str):
    settings, error, message = BAD_SETTINGS[case]
    with pytest.raises(error, match=message):
        gnncompile.compile(**settings)


@pytest.mark.parametrize("model", [3, "gcn", [GCNConv]], ids=str)
def test_model_that_cannot_be_called(model: Any):
    with pytest.raises(TypeError, match=rf"model: found {type(model).__name__}, expected an nn.Module or a function"):
        gnncompile.compile(model)


@pytest.mark.parametrize("settings", [{"options": ["regions"]}, {"dynamic": "yes"}], ids=str)
def test_settings_of_the_wrong_type(settings: dict[str, Any], model: GCNConv):
    with pytest.raises((TypeError, ValueError), match=next(iter(settings))):
        gnncompile.compile(model, **settings)


# -- changed inputs -----------------------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "one entry": lambda e: e.__setitem__((0, 3), 5),
    "a view": lambda e: e[1].add_(1).remainder_(NODES),
    "copy_": lambda e: e.copy_(EDGES.flip(1)),
    "set_": lambda e: e.set_(EDGES.flip(0).contiguous()),
    "resize": lambda e: e.resize_(2, 5),
    "optimizer-like foreach": lambda e: torch._foreach_add_([e], 0),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("layer", [GCNConv, GATConv])
def test_change_in_place_is_noticed(change: str, layer: Any):
    torch.manual_seed(0)
    model = layer(4, 3)
    compiled = gnncompile.compile(model)
    edges = EDGES.clone()
    for _ in range(2):
        equal(compiled(X, edges), model(X, edges))
    CHANGES[change](edges)
    edges.clamp_(max=NODES - 1)
    for _ in range(2):
        equal(compiled(X, edges), model(X, edges))


def test_transpose_in_place(model: GCNConv, compiled: Any):
    """Same memory, same version of the data, other strides."""
    edges = torch.tensor([[0, 1], [2, 3]])
    before = compiled(X, edges)
    edges.t_()
    equal(compiled(X, edges), model(X, edges))
    assert not torch.allclose(compiled(X, edges), before)


def test_change_between_forward_and_backward(model: GCNConv, compiled: Any):
    """The gradient belongs to the graph that the forward saw."""
    edges, x = EDGES.clone(), X.clone().requires_grad_()
    out = compiled(x, edges)
    edges.zero_()
    (found,) = torch.autograd.grad(out.square().sum(), x)
    (expected,) = torch.autograd.grad(model(x, EDGES).square().sum(), x)
    equal(found, expected)


def test_memory_that_is_used_again(model: GCNConv, compiled: Any):
    """Another tensor of the same shape, at the same address, in its first version, after the first one is gone."""
    memory, places = EDGES.clone().numpy(), set()
    for step in range(20):
        memory[0] = (memory[0] + 1) % NODES
        memory[1] = (memory[1] + step) % NODES
        edges = torch.from_numpy(memory)
        places.add((edges.data_ptr(), edges._version))
        equal(compiled(X, edges), model(X, edges))
        gone = weakref.ref(edges)
        del edges
        assert gone() is None
    assert len(places) == 1


def test_views_of_one_memory_are_told_apart(model: GCNConv, compiled: Any):
    many = torch.randint(NODES, (4, 2, 14), generator=torch.Generator().manual_seed(3))
    for _ in range(2):
        for edges in many:
            equal(compiled(X, edges), model(X, edges))


def test_inference_tensors(model: GCNConv, compiled: Any):
    """They have no version counter, so nothing is remembered of them."""
    with torch.inference_mode():
        edges = EDGES.clone()
        assert edges.is_inference()
        equal(compiled(X, edges), model(X, edges))
        edges[0, 3] = (edges[0, 3] + 1) % NODES
        equal(compiled(X, edges), model(X, edges))


def test_training_after_inference_mode(model: GCNConv):
    compiled = gnncompile.compile(model)
    edges, x = EDGES.clone(), X.clone().requires_grad_()
    with torch.inference_mode():
        equal(compiled(x, edges), model(x, edges))
    (found,) = torch.autograd.grad(compiled(x, edges).square().sum(), x)
    equal(found, torch.autograd.grad(model(x, edges).square().sum(), x)[0])


def test_the_cache_is_bounded_and_forgets(model: GCNConv):
    compiled = gnncompile.compile(model, options={"structure_cache_entries": 3})
    kept = [torch.randint(NODES, (2, 9), generator=torch.Generator().manual_seed(k)) for k in range(6)]
    for edges in kept:
        equal(compiled(X, edges), model(X, edges))
    cache = callable_of(compiled).backend.captured[0].structure.cache
    assert len(cache) <= 3
    for edges in kept:
        equal(compiled(X, edges), model(X, edges))


def test_edge_index_written_inside_the_model():
    def fn(x: Tensor, edge_index: Tensor) -> Tensor:
        edge_index[0].add_(1).remainder_(x.size(0))
        return x.new_zeros(x.size(0), x.size(1)).index_add_(0, edge_index[1], x[edge_index[0]])

    compiled, ours, theirs = gnncompile.compile(fn), EDGES.clone(), EDGES.clone()
    for _ in range(2):
        equal(compiled(X, ours), fn(X, theirs))
        assert torch.equal(ours, theirs)
