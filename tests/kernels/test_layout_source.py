"""The counting sorts on a CPU, in packages and in a process, give the layouts that torch's operations give."""

import ctypes
import itertools
import operator
from functools import lru_cache

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_geometric import EdgeIndex

from gnncompile.codegen.cpp.compiler import load
from gnncompile.codegen.cpp.layout_source import CSR, LOOPS
from gnncompile.layout import csr
from gnncompile.ops import cpu_layouts, structure
from tests.harness import kernels


@lru_cache
def _entry(source):
    run = load(source, contract=False).run
    run.argtypes = (ctypes.POINTER(ctypes.c_int64),)
    return run


def call(source, *arguments):
    given = [one.data_ptr() if isinstance(one, torch.Tensor) else int(one or 0) for one in arguments]
    return _entry(source)((ctypes.c_int64 * len(given))(*given))


def sort(index, other, rows, columns, alive=None, wraps=(False, False)):
    """Returns the status, the layout, and the edge that is out of range with its ends."""
    edges = index.numel()
    out = [torch.full((size,), -7, dtype=torch.int32) for size in (rows + 1, edges, edges)]
    found = torch.zeros(3, dtype=torch.int64)
    wide = [one.dtype is torch.int64 for one in (index, other)]
    return call(CSR, edges, rows, columns, *wraps, *wide, index, other, alive, *out, found), out, found.tolist()


def loops(rowptr, col, edge, alive):
    edges, rows = edge.numel(), rowptr.numel() - 1
    out = [torch.full((size,), -7, dtype=torch.int32) for size in (rows + 1, edges + rows, edges + rows)]
    assert call(LOOPS, edges, rows, rowptr, col, edge, alive, *out) == 0
    return out


@pytest.fixture
def in_cpp(monkeypatch):
    """Makes ops run the generated C++ code, whatever the environment asks for."""
    found, run_of = [], cpu_layouts._run_of
    monkeypatch.setattr(cpu_layouts, "_run_of", lambda *given: found.append(run_of(*given)) or found[-1])
    with kernels("cpp"):
        yield
    assert found and None not in found, "torch's operations computed the layout"


GRAPHS = {
    "no edge": (4, 3, 0),
    "no node": (0, 0, 0),
    "one node": (1, 1, 5),
    "repeated": (3, 2, 40),
    "bipartite": (50, 7, 200),
    "isolated": (300, 300, 60),
}


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtypes", [(torch.int64, torch.int64), (torch.int32, torch.int64)])
def test_layouts_are_those_of_torch(name, masked, dtypes):
    rows, columns, edges = GRAPHS[name]
    torch.manual_seed(0)
    index = torch.randint(max(rows, 1), (edges,)).to(dtypes[0])
    other = torch.randint(max(columns, 1), (edges,)).to(dtypes[1])
    alive = torch.rand(edges) < 0.6 if masked else None
    expected = csr.csr(index, other, rows, columns, alive)
    status, found, _ = sort(index, other, rows, columns, alive)
    assert status == 0
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_negative_indices_count_from_the_end():
    index, other = torch.tensor([-1, 0, -3, 2]), torch.tensor([1, -2, 0, -1])
    status, found, _ = sort(index, other, 3, 2, wraps=(True, True))
    expected = csr.csr(index, other, 3, 2, None, True, True)
    assert status == 0 and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("bad", [(3, 0), (-1, 0), (0, 2), (0, -1), (2**62, 0), (0, -(2**62))])
def test_an_edge_outside_of_the_graph_is_found(bad):
    index, other = torch.tensor([0, bad[0], 2, 9]), torch.tensor([0, bad[1], 1, 9])
    assert sort(index, other, 3, 2)[::2] == (2, [1, *bad])


@pytest.mark.parametrize("name", [name for name, (rows, columns, _) in GRAPHS.items() if rows == columns or rows < 5])
@pytest.mark.parametrize("masked", [False, True])
def test_self_loops_come_after_the_edges_of_their_row(in_cpp, name, masked):
    rows, _, edges = GRAPHS[name]
    torch.manual_seed(1)
    index, other = (torch.randint(max(rows, 1), (edges,)) for _ in range(2))
    alive = index != other if masked else None
    for known, further in itertools.product((None, alive), (None, alive)):  # edges masked before, and by the loops
        layout = csr.csr(index, other, rows, rows, known)
        expected = csr.with_loops(*layout, index, further)
        for made in (loops(*layout, further), torch.ops.gnncompile.csr_with_loops(*layout, index, further)):
            for ours, theirs in zip(made, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("masked", [False, True])
def test_the_op_gives_the_layout_of_torch(in_cpp, name, masked):
    rows, columns, edges = GRAPHS[name]
    torch.manual_seed(2)
    pairs = torch.stack([torch.randint(max(rows, 1), (edges,)), torch.randint(max(columns, 1), (edges,))], 1)
    index, other = pairs.unbind(1)  # not contiguous
    alive = torch.rand(edges) < 0.6 if masked else None
    for dtype in (torch.int64, torch.int32, torch.int16):
        made = torch.ops.gnncompile.csr(index.to(dtype), other, rows, columns, alive)
        for ours, theirs in zip(made, csr.csr(index, other, rows, columns, alive), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_degrees_are_those_of_torch(in_cpp, name, dtype):
    rows, _, edges = GRAPHS[name]
    torch.manual_seed(3)
    rowptr = torch.cat([torch.zeros(1), torch.rand(rows) * edges]).sort().values.int()
    made = torch.ops.gnncompile.inverse_degree(rowptr, dtype)
    assert made.dtype is getattr(torch, dtype) and torch.equal(made, csr.inverse_degree(rowptr, dtype))


@pytest.mark.parametrize("rowptr", [torch.tensor([0, 2, 2, 5]), torch.tensor([0, 2, 2, 5]).int()[None].T.squeeze(1)])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_degrees_of_any_type(rowptr, dtype):
    with kernels("cpp"):
        made = torch.ops.gnncompile.inverse_degree(rowptr, dtype)
    torch.testing.assert_close(made, torch.tensor([1 / 2, 1, 1 / 3]).to(getattr(torch, dtype)))


@pytest.mark.parametrize("generator", ["cpp", "reference"])
def test_programs_without_the_dispatcher_give_the_same(generator, monkeypatch):
    """Each op of a structure program is called, with all of its arguments."""
    own, graph = torch.ops.gnncompile, fx.Graph()
    index, other, alive = (graph.placeholder(name) for name in ("index", "other", "alive"))
    layout = graph.call_function(own.csr.default, (index, other, 3, 3, None, True))
    parts = [graph.call_function(operator.getitem, (layout, k)) for k in range(3)]
    looped = graph.call_function(own.csr_with_loops.default, (*parts, index, alive))
    starts = graph.call_function(operator.getitem, (looped, 0))
    degrees = graph.call_function(own.inverse_degree.default, (starts, "float64"))
    empty = graph.call_function(torch.ops.aten.new_empty.default, (degrees, [0, 2]), {"dtype": torch.int32})
    graph.output((layout, looped, degrees, empty))
    program = fx.GraphModule({}, graph)
    given = torch.tensor([2, -3, 2, 1]), torch.tensor([1, 1, 2, 0]), torch.tensor([True, True, False, True])
    with kernels(generator), monkeypatch.context() as patch:
        run = structure.without_dispatcher(program)
        with Ops() as ops:  # a mode sees all ops
            expected = run(*given)
        assert sum("gnncompile" in name for name in ops.names) == 3
        patch.setattr(torch, "ops", None)
        found = run(*given)
    for ours, theirs in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert any(node.target is own.csr.default for node in program.graph.nodes), "the program itself was changed"


def test_programs_without_the_dispatcher_have_the_sizes_of_each_call():
    """Tensors without elements too, of which only those without any size are made once."""
    traced = make_fx(lambda e: (e.new_empty((0, e.size(0))), e.new_empty((0,)), e + 1), tracing_mode="symbolic")
    program = traced(torch.arange(4))
    run = structure.without_dispatcher(program)
    for size in (4, 7, 0, 4):
        found, expected = run(torch.arange(size)), program(torch.arange(size))
        assert [one.shape for one in found] == [one.shape for one in expected]


def test_degrees_of_a_strided_layout():
    """Its copy lives until the kernel has read it. It is large, so that freed memory is returned at once."""
    base = torch.arange(2 * 9_000_000, dtype=torch.int32)
    with kernels("cpp"):
        found = torch.ops.gnncompile.inverse_degree(base[::2], "float32")
    assert found.numel() == 8_999_999 and bool((found == 0.5).all())


def test_programs_without_the_dispatcher_take_subclasses():
    """Rows of an ``EdgeIndex`` have no memory of their own, so that only the op itself can read them."""
    graph = fx.Graph()
    index, other = (graph.placeholder(name) for name in ("index", "other"))
    graph.output(graph.call_function(torch.ops.gnncompile.csr.default, (index, other, 3, 3, None)))
    run = structure.without_dispatcher(fx.GraphModule({}, graph))
    plain = torch.tensor([[2, 0, 2], [1, 1, 0]])
    rows = EdgeIndex(plain).unbind(0)
    assert rows[0].data_ptr() == 0
    with kernels("cpp"):
        for given in (rows, (plain[0], rows[1]), (rows[0], plain[1])):
            for ours, theirs in zip(run(*given), csr.csr(*plain, 3, 3, None), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


class Ops(TorchDispatchMode):
    """Collects the names of the ops that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bad", [(3, 0), (-1, 0), (0, 2), (0, -1)])
def test_the_op_names_the_edge_outside_of_the_graph_as_torchs_operations_do(in_cpp, bad):
    index, other = torch.tensor([0, bad[0], 2, 9]), torch.tensor([0, bad[1], 1, 9])
    messages = []
    for sort_edges in (torch.ops.gnncompile.csr, csr.csr):
        with pytest.raises(IndexError) as error:
            sort_edges(index, other, 3, 2, None)
        messages.append(str(error.value))
    assert messages[0] == messages[1] and "edge 1 joins" in messages[0]


@pytest.mark.parametrize("lengths", [(3, 2, None), (3, 3, 1)])
def test_the_op_refuses_ends_of_other_lengths(lengths):
    index, other = (torch.zeros(length, dtype=torch.int64) for length in lengths[:2])
    alive = lengths[2] and torch.ones(lengths[2], dtype=torch.bool)
    with kernels("cpp"), pytest.raises(ValueError, match="edge_index: found 3 and"):
        torch.ops.gnncompile.csr(index, other, 3, 3, alive)


def test_without_a_compiler_torch_computes_the_layout(monkeypatch):
    monkeypatch.setenv("GNNCOMPILE_KERNELS", "cpp")
    monkeypatch.setattr(cpu_layouts, "_compiled", lambda source, entry: None)
    index, other = torch.tensor([2, 0, 2]), torch.tensor([1, 1, 0])
    made = torch.ops.gnncompile.csr(index, other, 3, 2, None)
    assert all(map(torch.equal, made, csr.csr(index, other, 3, 2, None)))
