"""Packages for GPUs: the traced programs, which Triton's interpreter runs on a CPU, and on a GPU the packages."""

import copy
import re
import subprocess

import pytest
import torch
from torch import nn
from torch._inductor.codecache import AotCodeCompiler
from torch.utils import _pytree as pytree
from torch_geometric.nn import GCNConv, GINEConv, SAGEConv
from torch_geometric.utils import degree

import gnncompile
from gnncompile._compat import aoti
from gnncompile.codegen.triton.entry import Entry
from gnncompile.exc import ArgumentError, CaptureError, IndexOutOfRangeError
from gnncompile.ops import launch, packaged_triton
from gnncompile.options import Options
from gnncompile.serving import bound_indices, fold_constants
from gnncompile.serving.kept_layout import LAYOUT, WITH_LAYOUT
from gnncompile.serving.package import KINDS, _Call
from gnncompile.serving.program import capture
from gnncompile.serving.read_layout import guarded, walked
from tests.e2e.package_cpp import serve_in_cpp
from tests.e2e.test_package import EDGES, MODELS, TwoLayers, inputs_of, random_sizes, serve
from tests.e2e.test_package_models import SIZES, hub, named_model
from tests.harness import without_interpreter

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
OPTIONS = Options()
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter takes tensors of a CPU")


def traced_call(model, names):
    call = inputs_of(names, (40, 160, 3))
    return _Call(capture(model, call, {}, {}), model, call, {}, list(names))


def traced(model, names):
    """Returns the program of a model that a package for a GPU holds. It runs on a CPU in Triton's interpreter."""
    return as_packaged(traced_call(model, names).plain().program)


def as_packaged(program, options=OPTIONS):
    bound_indices.run(program.graph)
    plain = KINDS["cuda"].rewrites(options).decomposed(program)
    environment = aoti._environment(plain)
    assert not aoti.conditions(environment), "the program holds for some sizes only"
    ours = {node.target for node in plain.graph.nodes if getattr(node.target, "namespace", "") == "gnncompile"}
    assert torch.ops.gnncompile.launch.default in ours and not ours & set(packaged_triton.DECOMPOSITIONS)
    module = plain.module()
    fold_constants.run(module)
    return module


def in_double(call):
    return tuple(one.double() if one.is_floating_point() else one for one in call)


@interpreted
@pytest.mark.parametrize("name", MODELS)
def test_traced_programs_give_the_results_of_eager_in_float64(name):
    model, names = named_model(name)
    program, exact = traced(model, names), copy.deepcopy(model).double()
    calls = [inputs_of(names, size, seed) for seed, size in enumerate((*SIZES[1:4], (33, 200, 2)))]
    for call in (*calls, hub(inputs_of(names, (80, 400, 3), 7))):
        with torch.no_grad():
            found, expected = (pytree.tree_leaves(one) for one in (program(*call), exact(*in_double(call))))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4, equal_nan=True)


def in_16_bits():
    """Layers of 16-bit edge features, which are products in kernels, and where a kernel has pieces of hubs too."""
    torch.manual_seed(0)
    model = TwoLayers(GINEConv(nn.Linear(16, 64), edge_dim=16), GINEConv(nn.Linear(64, 8), edge_dim=16))
    names = ("x", "edge_index", "edge_attr")

    def call(size, seed=0):
        x, edge_index, _ = inputs_of(names, size, seed)
        return x.bfloat16(), edge_index, torch.randn(edge_index.size(1), 16).bfloat16()

    return model.bfloat16().eval(), names, call


@interpreted
def test_traced_programs_in_16_bits():
    model, names, call = in_16_bits()
    example = call((40, 160, 3))
    program = as_packaged(_Call(capture(model, example, {}, {}), model, example, {}, list(names)).plain().program)
    exact = copy.deepcopy(model).double()
    for given in (*(call(size) for size in SIZES[1:4]), hub(call((80, 400, 3)))):
        with torch.no_grad():
            (found,), (expected,) = (pytree.tree_leaves(one) for one in (program(*given), exact(*in_double(given))))
        torch.testing.assert_close(found.double(), expected, rtol=5e-2, atol=5e-2 * float(expected.abs().max()))


@interpreted
@pytest.mark.parametrize("name", MODELS)
def test_traced_programs_take_a_layout_that_the_caller_keeps(name):
    model, names = named_model(name)
    found = traced_call(model, names).with_kept_layout(compares=True)
    layout_of, with_layout = (as_packaged(found[one].program) for one in (LAYOUT, WITH_LAYOUT))
    calls = [inputs_of(names, size, seed) for seed, size in enumerate(SIZES[1:4])]
    calls.append(hub(inputs_of(names, (80, 400, 3), 7)))
    with torch.no_grad():
        for call in calls:
            layout, expected = layout_of(*call), pytree.tree_leaves(model(*call))
            for ours, theirs in zip(pytree.tree_leaves(with_layout(layout, *call)), expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)
        one, other = (inputs_of(names, (40, 160, 3), seed) for seed in (1, 2))
        layout = layout_of(*one)
        longer = [layout[0], torch.cat([layout[1], layout[1][-1:]]), *layout[2:]]
        for wrong in (layout_of(*other), [layout[0] + 1, *layout[1:]], [layout[0], layout[1] + 1, *layout[2:]], longer):
            with pytest.raises((ValueError, RuntimeError, AssertionError)):
                with_layout(wrong, *one)


@interpreted
@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("at", [1, 3, 4])  # of rowptr, of numbers of rows, of columns
def test_a_layout_of_other_sizes_is_refused_before_any_launch(change, at, monkeypatch):
    """No kernel may read past the end of a rowptr, nor of columns, while the seal is compared."""
    model, names = named_model("SAGE")
    found = traced_call(model, names).with_kept_layout(compares=True)
    layout_of, with_layout = (as_packaged(found[one].program) for one in (LAYOUT, WITH_LAYOUT))
    given, launched, ordinary = inputs_of(names, (40, 160, 3)), [], Entry.run
    with torch.no_grad():
        layout = list(layout_of(*given))
        layout[at] = layout[at][:-1] if change < 0 else torch.cat([layout[at], layout[at][-1:]])
        monkeypatch.setattr(Entry, "run", lambda *args: (launched.append(args[0].name), ordinary(*args)))
        with pytest.raises((ValueError, AssertionError)):
            with_layout(layout, *given)
    assert not launched


@interpreted
@pytest.mark.parametrize("name", ["SAGE", "RGCN", "mesh"])
def test_no_row_of_another_graphs_layout_is_read(name, monkeypatch):
    """The call goes on until its flags are read. Every walk of its regions must be that of a graph without edges."""
    monkeypatch.setenv("GNNCOMPILE_KERNELS", "triton")
    model, names = named_model(name)
    call = traced_call(model, names)
    layouts, safe = walked(call.captured), guarded(call.captured)
    assert layouts and {one.rowptr for one in layouts} <= set(safe) and not {one.col for one in layouts} & set(safe)
    found = call.with_kept_layout(compares=True)
    layout_of, with_layout = (as_packaged(found[one].program) for one in (LAYOUT, WITH_LAYOUT))
    given, ordinary, walks = inputs_of(names, (40, 600, 3)), Entry.run, []

    def without_the_error(entry, tensors, numbers, programs):
        pointers = dict(zip(entry.names, tensors, strict=True))
        if "rowptr" in pointers and "out0" in pointers:
            walks.append(bool(pointers["rowptr"].any()))
            assert not (pointers.get("pieces", torch.full((1,), -1)) >= 0).any()
        ordinary(entry, tensors, numbers, programs)
        if entry.flag == "layout":
            assert tensors[-1].item()
            tensors[-1].zero_()

    with torch.no_grad():
        layout = layout_of(*hub(given))
        assert len(layout[-1]), "no hub has a piece"
        monkeypatch.setattr(Entry, "run", without_the_error)
        with_layout(layout, *given)
    assert walks and not any(walks)


@interpreted
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32, torch.float64, torch.bfloat16])
def test_every_entry_and_size_counts_in_a_seal(dtype):
    torch.manual_seed(0)
    seal, sizes = packaged_triton.DECOMPOSITIONS[torch.ops.gnncompile.seal.default], [7, 9, 11]
    values = [(torch.randn(count) * 1000).to(dtype) for count in (1, 5000)]
    first = seal(values, sizes).item()
    assert seal(values, sizes).item() == first
    seals = {first, seal(values[::-1], sizes).item(), seal([*values, values[0]], sizes).item()}
    for at in range(3):
        seals.add(seal(values, [size + (k == at) for k, size in enumerate(sizes)]).item())
    for at, entry in ((0, 0), (1, 0), (1, 4095), (1, 4096), (1, 4999)):
        changed = [one.clone() for one in values]
        changed[at][entry] = not changed[at][entry] if dtype is torch.bool else changed[at][entry] * 2 + 1
        seals.add(seal(changed, sizes).item())
    assert len(seals) == 11


class Writes(nn.Module):
    """Writes into a copy of values of the layout, which Inductor would do without a copy if it might."""

    def __init__(self):
        super().__init__()
        self.conv = SAGEConv(16, 4)

    def forward(self, x, edge_index):
        h = self.conv(x, edge_index)
        own = 1 / (degree(edge_index[1], x.size(0), dtype=x.dtype) + 1)
        return h, own.index_put((edge_index[0],), h[edge_index[1], 0])


def test_nothing_writes_to_a_layout_that_the_caller_keeps(monkeypatch):
    """Reads the C++ code of the model, in which arguments that a kernel only reads are const."""
    kept = traced_call(Writes().eval(), EDGES).with_kept_layout(compares=True)[WITH_LAYOUT]
    bound_indices.run(kept.program.graph)
    monkeypatch.setattr(launch, "compile_entry", lambda entry, device: None)
    monkeypatch.setattr(launch, "link_entry", lambda wrapper, entry: entry.name)
    found = []

    class Stop(BaseException):
        pass

    def compiled(graph, code, *others, **more):
        found.append(code)
        raise Stop

    monkeypatch.setattr(AotCodeCompiler, "compile", compiled)
    with pytest.raises(Stop):
        aoti.compile_program(kept.program, kept.names, {}, {}, KINDS["cuda"].rewrites(OPTIONS))
    assert "compare_sizes" in found[0] and re.search(r"\(const \w+\*\)\(arg\d+_1\.data_ptr", found[0])
    assert not re.findall(r"\((?!const )\w+\*\)\(arg\d+_1\.data_ptr", found[0])


class Looks(nn.Module):
    """Reads rows by indices of its own, beside a layer: from both ends, along an axis, and of an embedding."""

    def __init__(self):
        super().__init__()
        self.conv, self.embedding = SAGEConv(16, 4), nn.Embedding(10, 4)

    def forward(self, x, edge_index, z, batch):
        h = self.conv(x, edge_index)
        own = h[batch] + h.index_select(0, batch) + h.gather(0, batch[:, None].expand(-1, 4))
        return own + self.embedding(z), torch.zeros_like(h).scatter_add(0, batch[:, None].expand(-1, 4), own)


@interpreted
def test_wrong_indices_are_refused():
    """Such an index in a kernel would end the process on a GPU."""
    torch.manual_seed(0)
    names = ("x", "edge_index", "z", "batch")
    model = Looks().eval()
    program = traced(model, names)
    x, edge_index, z, batch = inputs_of(names, (9, 20, 3))
    with torch.no_grad():
        for ours, theirs in zip(program(x, edge_index, z, batch), model(x, edge_index, z, batch), strict=True):
            torch.testing.assert_close(ours, theirs)
        outside = edge_index.clone()
        outside[1, 7] = 9
        empty = torch.zeros(0, 16)
        wrong = [
            (x, outside, z, batch),
            (x, edge_index - 1, z, batch),
            (x, edge_index, z + 10, batch),
            (x, edge_index, -1 - z, batch),
            (x, edge_index, z, batch + 9),
            (empty, edge_index, z[:0], batch[:0]),
        ]
        for call in wrong:
            with pytest.raises(IndexOutOfRangeError, match="outside of the graph"):
                program(*call)


@interpreted
def test_self_loops_join_a_layout_with_edges_outside_of_the_graph():
    """The edges outside are masked out, so loops of all rows still have a place."""
    own, csr = torch.ops.gnncompile, packaged_triton.DECOMPOSITIONS
    row, col = torch.tensor([2, 7, 0, -5, 2, 1]), torch.tensor([1, 0, 9, 1, 2, 0])
    alive = torch.tensor([True, True, True, True, False, True])
    for keep in (None, alive):
        bad = (row < 0) | (row >= 3) | (col < 0) | (col >= 3)
        masked = bad if keep is None else bad | ~keep
        layout = packaged_triton.csr.sorted_edges(row, col, 3, 3, masked)
        rowptr, found, edge = csr[own.csr_with_loops.default](*layout, row, keep)
        good = torch.cat([torch.stack([row, col])[:, ~masked], torch.arange(3).repeat(2, 1)], 1)
        expected = own.csr(good[0], good[1], 3, 3, None)
        assert torch.equal(rowptr, expected[0]) and torch.equal(found[: rowptr[-1]], expected[1])
        assert torch.equal(edge.sort()[0], torch.arange(9, dtype=torch.int32))


_COMPILE = """
from gnncompile.codegen.triton.kernel import triton_kernel
from gnncompile.ir.region import parse
entry = triton_kernel(parse({spec!r})).ordinary.entry
made = entry.compile((9, 0))
assert made.code.startswith(b"\\x7fELF") and made.symbol.encode() in made.code and made.scratches == 2, made[1:]
assert made.threads == 32 * entry.options["num_warps"]
"""


def test_kernels_are_compiled_without_a_gpu():
    from tests.triton_regions import neighbour_sum

    region = neighbour_sum(gnncompile.ir.region.Space.DESTINATION, "float32", 1, 8)
    without_interpreter("-c", _COMPILE.format(spec=region.spec))


_GRID = """
#include <cstdint>
int main() {{
  const uint32_t ynumel = 0, xnumel = 3;
  {prefix}
  const uint32_t grid[3] = {{uint32_t({x}), uint32_t({y}), uint32_t({z})}};
  return grid[0] * grid[1] * grid[2] == 0 ? 0 : 1;
}}
"""


def test_a_package_launches_no_blocks_along_two_axes_where_there_are_no_rows(tmp_path):
    """Torch 2.11 divides by the number of parts of an axis, which is 0, and the process dies."""
    from torch._inductor.runtime.triton_heuristics import GridExpr

    gnncompile.compile(nn.ReLU())  # patches torch
    grid = GridExpr.from_meta({"grid_type": "Grid2DWithYZOverflow"}, {"XBLOCK": 4, "YBLOCK": 1}, mode="cpp")
    text = _GRID.format(prefix="\n  ".join(grid.prefix), x=grid.x_grid, y=grid.y_grid, z=grid.z_grid)
    (tmp_path / "grid.cpp").write_text(text)
    subprocess.run(["g++", "-std=c++17", tmp_path / "grid.cpp", "-o", tmp_path / "grid"], check=True)
    assert subprocess.run([tmp_path / "grid"]).returncode == 0


def test_a_launch_with_other_arguments_is_an_error():
    from gnncompile.codegen.triton.entry import Entry
    from gnncompile.exc import InternalError

    class Function:
        arg_names = ("one", "other")

    with pytest.raises(InternalError, match="is launched with others"):
        Entry("", Function(), ("one",), (torch.float32,), 0).compile((9, 0))


class Constant(nn.Module):
    def forward(self):
        return torch.ones(3)


def test_the_model_and_the_inputs_are_on_one_device(tmp_path):
    model = TwoLayers(GCNConv(16, 32), GCNConv(32, 8)).eval()
    x, edge_index = inputs_of(EDGES, (40, 160, 3))
    with pytest.raises(ArgumentError, match="expected a CPU or a GPU"):
        gnncompile.package(model, (x.to("meta"), edge_index), tmp_path / "model.pt2")
    with pytest.raises(CaptureError, match="reads no tensor"):
        gnncompile.package(Constant().eval(), (), tmp_path / "model.pt2")


# -- on a GPU -----------------------------------------------------------------------------------------------------


def on_gpu(call):
    return tuple(one.cuda() for one in call)


def agree(model, calls, answers):
    """Compares with eager in float64."""
    exact = copy.deepcopy(model).double()
    for call, found in zip(calls, answers, strict=True):
        assert not isinstance(found, str), found
        with torch.no_grad():
            expected = pytree.tree_leaves(exact(*in_double(call)))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.cuda().double(), theirs, rtol=1e-3, atol=1e-4, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_packages_on_a_gpu(name, tmp_path):
    model, names = named_model(name)
    model = model.cuda()
    path = gnncompile.package(model, on_gpu(inputs_of(names, (40, 160, 3))), tmp_path / "model.pt2")
    sizes = (*SIZES, *random_sizes(20))
    calls = [on_gpu(inputs_of(names, size, seed)) for seed, size in enumerate(sizes)]
    # Edges are sorted in four ways: few, with rows of one digit and of two, and by torch.
    larger = ((200, 600, 3), (200, 6000, 3), (5000, 100_000, 9), (66_000, 6000, 9))
    calls += [on_gpu(hub(inputs_of(names, size, 7))) for size in larger]
    agree(model, calls, serve(path, calls, tmp_path)[0])
    found = gnncompile.package_info(path)
    assert found["device"] == "cuda" and found["card"] == torch.cuda.get_device_name()


@pytest.mark.gpu
def test_packages_in_16_bits_on_a_gpu(tmp_path):
    model, _, call = in_16_bits()
    model = model.cuda()
    path = gnncompile.package(model, on_gpu(call((40, 160, 3))), tmp_path / "model.pt2")
    calls = [on_gpu(one) for one in (*map(call, SIZES), hub(call((5000, 100_000, 9))))]
    exact = copy.deepcopy(model).double()
    for given, found in zip(calls, serve(path, calls, tmp_path)[0], strict=True):
        assert not isinstance(found, str), found
        with torch.no_grad():
            (expected,) = pytree.tree_leaves(exact(*in_double(given)))
        most = float(expected.abs().max()) if expected.numel() else 0.0
        torch.testing.assert_close(found[0].cuda().double(), expected, rtol=5e-2, atol=5e-2 * most)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["GAT", "mesh"])
def test_packages_on_a_gpu_take_a_layout_that_the_caller_keeps(name, tmp_path):
    model, names = named_model(name)
    model = model.cuda()
    call = on_gpu(inputs_of(names, (40, 160, 3)))
    path = gnncompile.package(model, call, tmp_path / "model.pt2", keep_layout=True)
    calls = [on_gpu(inputs_of(names, size, seed)) for seed, size in enumerate(SIZES)]
    calls.append(on_gpu(hub(inputs_of(names, (5000, 100_000, 9), 7))))
    agree(model, calls, serve(path, calls, tmp_path, keep_layout=True)[0])
    layout_of = torch._inductor.package.load_package(path, "layout")
    served = torch._inductor.package.load_package(path, "with_layout")
    layout, other = layout_of(*call), layout_of(*on_gpu(inputs_of(names, (40, 160, 3), 5)))
    expected = pytree.tree_leaves(served(layout, *call))
    for wrong in (other, [layout[0] + 1, *layout[1:]], [layout[0], layout[1] + 1, *layout[2:]], layout[:-1]):
        with pytest.raises(RuntimeError):
            served(wrong, *call)
        for ours, theirs in zip(pytree.tree_leaves(served(layout, *call)), expected, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.gpu
def test_the_server_in_cpp_answers_on_a_gpu(tmp_path):
    torch.manual_seed(0)
    model = TwoLayers(GCNConv(16, 32), GCNConv(32, 8)).eval().cuda()
    path = gnncompile.package(model, on_gpu(inputs_of(EDGES, (40, 160, 3))), tmp_path / "model.pt2")
    calls = [inputs_of(EDGES, size, seed) for seed, size in enumerate(SIZES)]
    options = ("--device", "cuda", "--threads", "3", "--repeat", "20")
    answers, _ = serve_in_cpp(path, calls, tmp_path, *options)
    agree(model, [on_gpu(call) for call in calls], answers)


@pytest.mark.gpu
def test_wrong_inputs_on_a_gpu_are_errors_and_the_next_call_is_served(tmp_path):
    torch.manual_seed(0)
    names = ("x", "edge_index", "z", "batch")
    model = Looks().eval().cuda()
    good = on_gpu(inputs_of(names, (9, 20, 3)))
    path = gnncompile.package(model, good, tmp_path / "model.pt2")
    x, edge_index, z, batch = good
    wrong = {
        "index out of range": (x, edge_index + 9, z, batch),
        "an entry of edge_index": (x, edge_index, z + 10, batch),
        "or of another index": (x, edge_index, z, batch + 9),
        "outside of the graph": (x[:0], edge_index, z[:0], batch[:0]),
        "x: found another device, expected cuda": (x.cpu(), edge_index, z, batch),
        "x: found dtype float64, expected float32": (x.double(), edge_index, z, batch),
        "x: found shape [9, 8], expected 16": (x[:, :8].contiguous(), edge_index, z, batch),
    }
    calls = [call for one in wrong.values() for call in (one, good)]
    answers, said = serve(path, calls, tmp_path)
    agree(model, [good] * len(wrong), answers[1::2])
    for expected, found in zip(wrong, answers[::2], strict=True):
        assert isinstance(found, str)
        assert expected in (found if torch.__version__ >= "2.13" else said)


class Reads(nn.Module):
    """Reads or writes rows of `x` by an index."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x, index):
        return self.how(x, index)


CHECKED = {
    "index_reduce": lambda x, i: torch.zeros_like(x).index_reduce(0, i, x, "amax"),
    "scatter that reduces": lambda x, i: torch.zeros_like(x).scatter(0, i[:, None].expand(-1, 4), x, reduce="add"),
}


def _bounded_program(how):
    model, given = Reads(how).eval(), (torch.rand(6, 4), torch.tensor([0, 1, 2, 3, 1, 0]))
    call = _Call(capture(model, given, {}, {}), model, given, {}, ["x", "index"])
    program = call.plain().program
    bound_indices.run(program.graph)
    return [node for node in program.graph.nodes if node.target is torch.ops.gnncompile.bounded.default]


@pytest.mark.parametrize("name", CHECKED)
def test_indices_of_a_models_own_operations_are_checked(name):
    (node,) = _bounded_program(CHECKED[name])
    assert node.args[1].meta["val"] == 6


def test_an_index_that_reads_several_tensors_of_one_size_is_checked_once():
    assert len(_bounded_program(lambda x, i: x.index_select(0, i) + (2 * x).index_select(0, i))) == 1
    assert len(_bounded_program(lambda x, i: x.index_select(0, i) + x[:, :1].repeat(2, 4).index_select(0, i))) == 2


def test_an_operation_whose_indices_nothing_checks_is_refused():
    with pytest.raises(CaptureError, match=r"take.default reads by indices that a package does not check"):
        _bounded_program(lambda x, i: x.take(i))
