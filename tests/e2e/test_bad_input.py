"""Bad input of every kind: a clear error, a reported fallback, or what eager gives. Never a crash or a wrong number.

Each case is one call. `EAGER` stands for the result of the uncompiled model, of the same dtype; an error is the type
and a part of its message, which may be torch's or PyG's own where it says what is wrong.
"""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, RGCNConv, global_add_pool

import gnncompile
from gnncompile.codegen import cache_dir
from gnncompile.layout import csr
from gnncompile.ops import cpu_layouts
from gnncompile.runtime import launch
from tests.harness import kernels, light, needs_interpreter

NODES, EDGES = 6, 14
SEED = torch.Generator().manual_seed(0)
X = torch.randn(NODES, 4, generator=SEED)
E = torch.randint(NODES, (2, EDGES), generator=SEED)
W = torch.rand(EDGES, generator=SEED)
B = torch.tensor([0, 0, 1, 1, 1, 1])
KIND = torch.randint(3, (EDGES,), generator=SEED)
EAGER = None
Outcome = tuple[Any, str] | None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(4, 3)

    def forward(
        self, x: Any, edge_index: Any, edge_weight: Any = None, batch: Any = None, num_graphs: Any = None
    ) -> Tensor:
        x = self.conv(x, edge_index, edge_weight)
        return x if batch is None else global_add_pool(x, batch, num_graphs)


def weighted(x: Tensor, row: Tensor, col: Tensor, weight: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add(0, col, (x[row] * weight.view(-1, 1)).sin())


def longest(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
    index = col.view(-1, 1).expand(-1, x.size(1))
    return torch.full_like(x, -9.0).scatter_reduce(0, index, x.index_select(0, row).tanh(), "amax")


def edges(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([values, values[::-1]], dtype=dtype)


INDEX = (IndexError, r"edge_index.* outside the graph; expected indices from 0 to 5")
DTYPE = (TypeError, r"edge_index: found dtype torch\.\w+, expected torch.int64.*Convert it with edge_index.long\(\)")
SHAPE = (ValueError, r"edge_index: found shape \(.*\), expected \[2, num_edges\]")
DEVICE = (ValueError, r"argument .*: found on \w+, expected \w+ like argument .*Move all inputs to one device")
LAYOUT = (TypeError, r"args\[1\]: found a tensor of layout torch.sparse_bs\w, .*Convert it with .to_sparse_csr\(\)")
PYG = (ValueError, "only supports integer tensors of shape .* for argument `edge_index`")
MIXED = (RuntimeError, "same dtype, but got: .* != float")
SEGMENT = (IndexError, r"batch: entry \d is -?\d+, outside .*expected .*batch against the number of graphs")
WHOLE = (Exception, r"torch.float32 to out tensor with dtype torch.int64|the desired output type Long")
ANY = Exception

CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any], Outcome]] = {
    # features
    "x of integers": ((X.long(), E), {}, WHOLE),
    "x float64, model float32": ((X.double(), E), {}, MIXED),
    "x float16, model float32": ((X.half(), E), {}, MIXED),
    "x complex": ((X.to(torch.complex64), E), {}, (ANY, "complex")),
    "x without features": ((X[:, 0], E), {}, (IndexError, "Dimension out of range")),
    "x with an axis more": ((X[None], E), {}, EAGER),
    "x too narrow": ((X[:, :3], E), {}, (ANY, r"cannot be multiplied .*6x3 and 4x3|same reduction dim")),
    "x is None": ((None, E), {}, (AttributeError, "'NoneType' object has no attribute 'size'")),
    "x a list": ((X.tolist(), E), {}, (ValueError, "'GCNConv' received a tuple of node features")),
    "x a pair": (((X, X), E), {}, (ValueError, "'GCNConv' received a tuple of node features")),
    "x of NumPy": ((X.numpy(), E), {}, (TypeError, "'int' object is not callable")),
    "x on meta": ((X.to("meta"), E), {}, DEVICE),
    "all on meta": ((X.to("meta"), E.to("meta")), {}, (NotImplementedError, "meta")),
    "x sparse": ((X.to_sparse(), E), {}, EAGER),
    "x quantised": ((torch.quantize_per_tensor(X, 0.1, 0, torch.qint8), E), {}, (ANY, "[Qq]uantize|torch.qint8")),
    "x nested": ((torch.nested.nested_tensor([X, X]), E), {}, (TypeError, "found a nested tensor, .*Batch")),
    "x of NaN": ((X * float("nan"), E), {}, EAGER),
    "x of infinities": ((X / 0, E), {}, EAGER),
    "no node, but edges": ((X[:0], E), {}, (IndexError, "indices from no rows")),
    # edge lists
    "edges None": ((X, None), {}, PYG),
    "edges a list": ((X, E.tolist()), {}, PYG),
    "edges of NumPy": ((X, E.numpy()), {}, PYG),
    "edges a string": ((X, "edge_index"), {}, PYG),
    "edges two tensors": ((X, (E[0], E[1])), {}, PYG),
    "a whole Data": ((X, Data(x=X, edge_index=E)), {}, (ANY, "edge_index|Data")),
    "edges int8": ((X, E.to(torch.int8)), {}, DTYPE),
    "edges int16": ((X, E.to(torch.int16)), {}, DTYPE),
    "edges uint8": ((X, E.to(torch.uint8)), {}, DTYPE),
    "edges uint64": ((X, E.to(torch.uint64)), {}, DTYPE),
    "edges of NaN": ((X, torch.full((2, 3), float("nan"))), {}, DTYPE),
    "edges complex": ((X, E.to(torch.complex64)), {}, DTYPE),
    "edges by name": ((X,), {"edge_index": E.half()}, DTYPE),
    "edges without an axis": ((X, torch.tensor(0)), {}, SHAPE),
    "one row of edges": ((X, E[:1]), {}, SHAPE),
    "four axes": ((X, E[None, None]), {}, SHAPE),
    "no row": ((X, E[:0]), {}, SHAPE),
    "edges nested": ((X, torch.nested.nested_tensor([E[0], E[1]])), {}, (TypeError, "found a nested tensor")),
    "edges on meta": ((X, E.to("meta")), {}, DEVICE),
    "one too large": ((X, edges(0, 6)), {}, INDEX),
    "minus one": ((X, edges(0, -1)), {}, INDEX),
    "the largest int64": ((X, edges(0, 2**63 - 1)), {}, INDEX),
    "the smallest int64": ((X, edges(0, -(2**63))), {}, INDEX),
    "would wrap to 0 in int32": ((X, edges(0, 2**32)), {}, INDEX),
    "the largest int32": ((X, edges(0, 2**31 - 1, dtype=torch.int32)), {}, INDEX),
    "the smallest int32": ((X, edges(0, -(2**31), dtype=torch.int32)), {}, INDEX),
    "a matrix in blocks": ((X, torch.eye(NODES).to_sparse_bsr((2, 2))), {}, LAYOUT),
    "a matrix in blocks by column": ((X, torch.eye(NODES).to_sparse_bsc((2, 2))), {}, LAYOUT),
    "a matrix that is dense": ((X, torch.eye(NODES)), {}, DTYPE),
    "a matrix too large": ((X, torch.eye(NODES + 1).to_sparse_csr()), {}, (ANY, "size|[Ii]ndex|shape|match|range")),
    # weights
    # Which of the two it is depends on whether self loops are masked by then, or cut out.
    "too few weights": ((X, E, W[:5]), {}, (ANY, "shape of the mask|differ in length")),
    "too many weights": ((X, E, torch.rand(50)), {}, (ANY, "shape of the mask|differ in length")),
    "weights of integers": ((X, E, W.long()), {}, WHOLE),
    "weights float64": ((X, E, W.double()), {}, EAGER),
    "weights of NaN": ((X, E, W * float("nan")), {}, EAGER),
    "weights on meta": ((X, E, W.to("meta")), {}, DEVICE),
    "weights with two columns": (
        (X, E, torch.rand(EDGES, 2)),
        {},
        (ANY, "size of tensor|must match|another size than"),
    ),
    # batch vectors
    "batch too short": ((X, E, None, B[:3], 2), {}, (ANY, "expanded size of the tensor")),
    "batch too long": ((X, E, None, B.repeat(2), 2), {}, (ANY, "expanded size of the tensor")),
    "batch of numbers that are not whole": (
        (X, E, None, B.float(), 2),
        {},
        (ANY, "Expected dtype int32/int64 for index"),
    ),
    "batch of NaN": ((X, E, None, B * float("nan"), 2), {}, (ANY, "Expected dtype int32/int64 for index")),
    "batch of bools": ((X, E, None, B.bool(), 2), {}, (ANY, "Expected dtype int32/int64 for index")),
    "batch int16": ((X, E, None, B.short(), 2), {}, (ANY, "Expected dtype int32/int64 for index")),
    "batch too large": ((X, E, None, B + 4, 2), {}, SEGMENT),
    "batch negative": ((X, E, None, B - 1, 2), {}, SEGMENT),
    "batch negative, no size": ((X, E, None, B - 7), {}, (ANY, "negative dimension -5|indices from no rows")),
    "batch with two axes": ((X, E, None, B[:, None], 2), {}, (ValueError, "must be one-dimensional .got 2")),
    "batch on meta": ((X, E, None, B.to("meta"), 2), {}, DEVICE),
    # sizes
    "a size of NaN": ((X, E, None, B, float("nan")), {}, (TypeError, "int.*'float'")),
    "a size that is no whole number": ((X, E, None, B, 2.5), {}, (TypeError, "int.*'float'")),
    "a size that is text": ((X, E, None, B, "2"), {}, (TypeError, "int.*'str'")),
    "a negative size": ((X, E, None, B, -2), {}, (RuntimeError, "negative dimension -2")),
    "too large a size": ((X, E, None, B, 2**62), {}, (ANY, "overflow|[Mm]emory|at most")),
    "a size of 0": ((X, E, None, B, 0), {}, (Exception, "index 0 is out of bounds|indices from no rows")),
    # arguments
    "no argument": ((), {}, (TypeError, "missing 2 required positional arguments: 'x' and 'edge_index'")),
    "no edges": ((X,), {}, (TypeError, "missing 1 required positional argument: 'edge_index'")),
    "one argument more": ((X, E, None, None, None, 3), {}, (TypeError, "takes from 3 to 6 positional arguments")),
    "an unknown name": ((X, E), {"edge_idx": E}, (TypeError, "unexpected keyword argument 'edge_idx'")),
    "an argument twice": ((X, E), {"x": X}, (TypeError, "multiple values for argument 'x'")),
}


@pytest.fixture(scope="module", autouse=True)
def _light() -> Iterator[None]:
    # Many of these kinds of input are captured on their own: none may reach the limit behind which all runs uncompiled.
    with light(), torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=1000):
        yield


@pytest.fixture(scope="module")
def model() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def compiled(model: Net) -> Any:
    return gnncompile.compile(model)


def needs_triton(which: str) -> None:
    if which == "triton":
        pytest.importorskip("triton")
        needs_interpreter(which)


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CALLS)
def test_calls(case: str, model: Net, compiled: Any) -> None:
    args, kwargs, outcome = CALLS[case]
    if outcome is None:
        same(compiled(*args, **kwargs), model(*args, **kwargs))
    else:
        with pytest.raises(outcome[0], match=f"(?s){outcome[1]}"):
            compiled(*args, **kwargs)
    same(compiled(X, E, W), model(X, E, W))


def test_there_are_enough() -> None:
    assert len(CALLS) + len(FUNCTIONS) + len(SETTINGS) + len(BROKEN) >= 60


# -- models without a layer of PyG --------------------------------------------------------------------------------

FUNCTIONS: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...], Outcome]] = {
    "source too large": (weighted, (X, E[0] + 1, E[1], W), INDEX),
    "source negative": (weighted, (X, E[0] - 2 * NODES, E[1], W), INDEX),
    "destination too large": (weighted, (X, E[0], E[1] + 1, W), INDEX),
    "destination negative": (weighted, (X, E[0], E[1] - 1, W), INDEX),
    "rows of different lengths": (weighted, (X, E[0], E[1][:5], W), (ANY, "size|length|dimension")),
    "a weight too few": (weighted, (X, E[0], E[1], W[1:]), (ANY, "size|length|dimension")),
    "source of floats": (weighted, (X, E[0].float(), E[1], W), (ANY, "index|long|Float|float")),
    "destination of floats": (weighted, (X, E[0], E[1].float(), W), (ANY, "int32/int64|index|IntTensor")),
    "source of bools": (weighted, (X, E[0].bool(), E[1], W), (ANY, "mask|size|index|shape")),
    "maximum, source too large": (longest, (X, E[0] + 1, E[1]), (ANY, "out of range|outside the graph")),
    "maximum, destination negative": (longest, (X, E[0], E[1] - 1), (ANY, "out of bounds|outside the graph")),
}


@pytest.mark.parametrize("case", FUNCTIONS)
def test_functions(case: str) -> None:
    function, args, outcome = FUNCTIONS[case]
    assert outcome is not None
    with pytest.raises(outcome[0], match=f"(?s){outcome[1]}"):
        gnncompile.compile(function)(*args)


@pytest.mark.parametrize("kind", [KIND + 1, KIND - 1, KIND + 2**31])
def test_types_of_edges_outside_their_number(kind: Tensor) -> None:
    compiled = gnncompile.compile(RGCNConv(4, 3, 3))
    with pytest.raises(IndexError, match="edge_type against num_relations"):
        compiled(X, E, kind)


# -- compile() ----------------------------------------------------------------------------------------------------

SETTINGS: dict[str, tuple[Any, dict[str, Any], Outcome]] = {
    "a number": (3, {}, (TypeError, "model: found int, expected an nn.Module or a function")),
    "a name": ("gcn", {}, (TypeError, "model: found str, expected")),
    "a list of modules": ([nn.Linear(1, 1)], {}, (TypeError, "model: found list, expected")),
    "a state_dict": (nn.Linear(1, 1).state_dict(), {}, (TypeError, "model: found OrderedDict, expected")),
    "a tensor": (X, {}, (TypeError, "model: found Tensor, expected")),
    "an unknown option": (
        weighted,
        {"options": {"region": True}},
        (ValueError, "options: found 'region', expected one"),
    ),
    "an option of another type": (weighted, {"options": {"hoist": 1}}, (ValueError, "found 1, expected a bool")),
    "a bound of another type": (weighted, {"options": {"recordings": 2.0}}, (ValueError, "found 2.0, expected a int")),
    "options in a list": (weighted, {"options": ["regions"]}, (TypeError, "options: found list, expected a dict")),
    "an unknown mode": (weighted, {"mode": "fast"}, (ValueError, "mode: found 'fast', expected one of")),
    "a mode of another type": (weighted, {"mode": 1}, (ValueError, "mode: found 1, expected one of")),
    "dynamic as text": (
        weighted,
        {"dynamic": "yes"},
        (TypeError, "dynamic: found 'yes', expected True, False or None"),
    ),
    "two options that exclude each other": (
        weighted,
        {"mode": "reduce-overhead", "options": {"double_backward": True}},
        (ValueError, "found True with recordings, expected them off"),
    ),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings(case: str) -> None:
    target, settings, outcome = SETTINGS[case]
    assert outcome is not None
    with pytest.raises(outcome[0], match=outcome[1]):
        gnncompile.compile(target, **settings)


# -- machines that lack something ---------------------------------------------------------------------------------


def _script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


def _no_compiler(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(shutil, "which", lambda name: None)


def _compiler(text: str) -> Callable[[pytest.MonkeyPatch, Path], None]:
    return lambda patch, folder: patch.setenv("CXX", _script(folder / "cxx", text))


def _no_triton(patch: pytest.MonkeyPatch, folder: Path) -> None:
    importlib.import_module("gnncompile.codegen.triton.kernel")  # what is taken away comes back after the test
    for name in [name for name in sys.modules if name.startswith("gnncompile.codegen.triton.")]:
        patch.delitem(sys.modules, name)
    patch.setitem(sys.modules, "triton", None)


def _broken_triton(patch: pytest.MonkeyPatch, folder: Path) -> None:
    _no_triton(patch, folder)
    patch.delitem(sys.modules, "triton")
    (folder / "triton.py").write_text('raise OSError("libtriton.so: undefined symbol")')
    patch.syspath_prepend(folder)


BROKEN: dict[str, tuple[str, Callable[[pytest.MonkeyPatch, Path], None], str]] = {
    "no compiler": ("cpp", _no_compiler, r"no C\+\+ compiler found: tried .*install g\+\+ or set CXX"),
    "a compiler that fails": (
        "cpp",
        _compiler("echo no license >&2; exit 1"),
        "failed; check the compiler.*no license",
    ),
    "a compiler that dies": ("cpp", _compiler("kill -9 $$"), "failed; check the compiler or set CXX"),
    "a compiler that makes nothing": ("cpp", _compiler("exit 0"), "can't be kept in any folder .*No such file"),
    "a compiler that makes rubbish": (
        "cpp",
        _compiler("for o; do :; done; case $o in --version) ;; *) echo 1 > $o;; esac"),
        "in any folder .*set CXX",
    ),
    "no space": ("cpp", _compiler("echo No space left on device >&2; exit 1"), "No space left .*free some space"),
    "no Triton": ("triton", _no_triton, "Triton can't be used: .*triton.*gnncompile doctor"),
    "a broken Triton": ("triton", _broken_triton, "undefined symbol.*gnncompile doctor"),
}


@pytest.mark.filterwarnings("ignore:gnncompile. the cache folder")
@pytest.mark.parametrize("case", BROKEN)
def test_machines_that_lack_something(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The reference interpreter runs, and says so: in the log, and in what explain prints."""
    which, break_it, reason = BROKEN[case]
    monkeypatch.setenv("GNNCOMPILE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache_dir, "_given_up", set())
    monkeypatch.setattr(cache_dir, "_temporary", {})
    needs_triton(which)
    break_it(monkeypatch, tmp_path)
    with kernels(which):
        compiled = gnncompile.compile(weighted)
        x = X.clone().requires_grad_()
        found, expected = compiled(x, *E, W), weighted(x, *E, W)
        same(found, expected)
        same(*(torch.autograd.grad(out.square().sum(), x)[0] for out in (found, expected)))
        assert all(re.search(reason, text, re.DOTALL) for text in launch.fallbacks.values())
        assert launch.fallbacks and "runs by the slow reference interpreter on cpu" in caplog.text
        assert "reference" in str(gnncompile.explain(compiled, X, *E, W))


# -- out-of-range indices behind the check ------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["reference", "cpp", "triton"])
def test_nothing_outside_a_tensor_is_read_or_written(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the error comes a call late; until then edges with such ends count for nothing. Here without the check,
    with NaN on either side of every tensor.
    """
    needs_triton(which)
    monkeypatch.setattr(csr.bad_indices, "report", lambda *_: None)
    monkeypatch.setattr(cpu_layouts, "_run_of", lambda *_: None)  # it has its own check; a GPU has not
    bad = [-NODES - 1, -(2**31), -(2**63), NODES, NODES + 1, 2**31 - 1, 2**31, 2**32, 2**63 - 1]
    good = [(0, 1), (5, 5), (2, 1), (0, 0)]
    row = torch.tensor([*bad, *(r for r, _ in good), *([1] * len(bad)), *bad, 1])
    col = torch.tensor([*([1] * len(bad)), *(c for _, c in good), *bad, *bad, -1])
    guarded = torch.full((NODES + 16, 4), float("nan"))
    guarded[8:-8] = X
    x = guarded[8:-8].requires_grad_()
    weights = torch.rand(row.numel() + 16)
    weights[:8] = weights[-8:] = float("nan")
    weight = weights[8:-8].requires_grad_()
    kept = slice(len(bad), len(bad) + len(good))
    with kernels(which):
        out = gnncompile.compile(weighted)(x, row, col, weight)
        gradients = torch.autograd.grad(out.square().sum(), (x, weight))
    expected = weighted(x, row[kept], col[kept], weight[kept])
    same(out, expected)
    wanted = torch.autograd.grad(expected.square().sum(), (x, weight))
    same(gradients[0], wanted[0])
    same(gradients[1][kept], wanted[1][kept])  # there is none for edges that are no edges
    assert np.isnan(guarded.detach()[:8].numpy()).all() and np.isnan(guarded.detach()[-8:].numpy()).all()
