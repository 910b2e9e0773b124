"""Packages of models, each compared with eager on many sizes: from a process without gnncompile, and from C++.

python -m pytest tests/e2e/test_package_models.py            # all of them
"""

import shutil
import subprocess

import pytest
import torch
from torch import nn
from torch._inductor import config, cpu_vec_isa
from torch.utils import _pytree as pytree
from torch_geometric.nn import GCNConv, GINEConv

import gnncompile
from gnncompile._compat import aoti
from gnncompile._compat.aoti import VECTOR_BITS, _building
from gnncompile.serving.kept_layout import Layout, WithLayout, refuse_layout_made_anew
from gnncompile.serving.package import _Call
from gnncompile.serving.program import Program, capture
from tests.e2e.package_cpp import serve_in_cpp, server
from tests.e2e.test_package import (
    EDGES,
    MODELS,
    SIZES,
    TwoLayers,
    agree,
    inputs_of,
    random_sizes,
    serve,
)


def hub(call):
    """The call with all edges of one node, but for repeated ones and self loops."""
    hubs = []
    for one in call:
        if one.dtype == torch.long and one.dim() == 2:
            one = torch.stack([one[0], one[1] * 0])
            one[:, ::3] = one[:, :1]
        hubs.append(one)
    return tuple(hubs)


def calls_of(names):
    """Calls of awkward and of 20 random sizes."""
    sizes = (*SIZES, *random_sizes(20))
    calls = [inputs_of(names, size, seed) for seed, size in enumerate(sizes)]
    return [*calls, hub(inputs_of(names, (200, 600, 3), 7))]


def named_model(name):
    """Returns a model and the names of its inputs. Skips the test if this torch can't capture the model."""
    if name == "molecule" and torch.__version__ < "2.13":
        pytest.skip("Dynamo breaks the graph at requires_grad_()")
    torch.manual_seed(0)
    make, names = MODELS[name]
    return make().eval(), names


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models(name, tmp_path):
    model, names = named_model(name)
    path = gnncompile.package(model, inputs_of(names, (40, 160, 3)), tmp_path / "model.pt2", keep_layout=True)
    calls = calls_of(names)
    agree(model, calls, serve(path, calls, tmp_path)[0])
    agree(model, calls, serve(path, calls, tmp_path, keep_layout=True)[0])
    for options in (("--threads", "2"), ("--layout", "once")):
        agree(model, calls, serve_in_cpp(path, calls, tmp_path, *options)[0])


class _TracedError(Exception):
    """Ends a package before it is compiled."""


def as_served(model, example, monkeypatch):
    """Returns the traced model that a package holds, without compiling it."""
    found = []

    def traced(program, *rest):
        found.append(program)
        raise _TracedError

    with monkeypatch.context() as patches, pytest.raises(_TracedError):
        patches.setattr(aoti, "compile_program", traced)
        gnncompile.package(model, example, "model.pt2")
    return found[0].module()


def agree_when_served(model, served, calls):
    for call in calls:
        with torch.no_grad():
            for ours, theirs in zip(pytree.tree_leaves(served(*call)), pytree.tree_leaves(model(*call)), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_an_example_may_have_as_many_nodes_and_edges_as_features(monkeypatch):
    """Then all sizes of the example are equal, and no two of them may become one size."""
    torch.manual_seed(0)
    model = TwoLayers(GINEConv(nn.Linear(16, 32), edge_dim=16), GINEConv(nn.Linear(32, 8), edge_dim=16)).eval()

    def call(nodes, edges):
        return *inputs_of(EDGES, (nodes, edges, 1)), torch.randn(edges, 16)

    served = as_served(model, call(16, 16), monkeypatch)
    agree_when_served(model, served, [call(1, 5), call(9, 0), call(16, 16), call(40, 160)])


class Heads(nn.Module):
    """Takes features ``[num_nodes, 4, 16]``, each head with a weight of its own."""

    def __init__(self):
        super().__init__()
        self.weight, self.conv = nn.Parameter(torch.randn(4, 16)), GCNConv(16, 8)

    def forward(self, x, edge_index):
        return self.conv((x * self.weight).sum(1), edge_index)


def test_features_of_two_axes(monkeypatch):
    torch.manual_seed(0)
    model = Heads().eval()

    def call(nodes, edges):
        return torch.randn(nodes, 4, 16), inputs_of(EDGES, (nodes, edges, 1))[1]

    for example in (call(40, 160), call(4, 16)):
        served = as_served(model, example, monkeypatch)
        agree_when_served(model, served, [call(1, 5), call(9, 0), call(4, 4), call(40, 160)])


def test_kept_layouts_give_the_results_of_the_model():
    """The traced models as torch runs them, without a compiler."""
    torch.manual_seed(0)
    model = TwoLayers(GCNConv(16, 32), GCNConv(32, 8)).eval()
    call = inputs_of(EDGES, (40, 160, 1))
    captured = capture(model, call, {}, {})
    layout = Layout(Program(captured, model, call, {}, only_structure=True))
    with_layout = WithLayout(Program(captured, model, call, {}), guarded=None)
    with torch.no_grad():
        made = layout(*call)
        torch.testing.assert_close(with_layout(made, *call)["out"], model(*call)["out"])
        seals = [
            layout(*inputs_of(EDGES, size, seed))[0].item() for size, seed in (((40, 160, 1), 1), ((41, 160, 1), 0))
        ]
    assert len({made[0].item(), *seals}) == 3


@pytest.mark.slow
def test_the_layout_of_another_graph_is_refused(tmp_path):
    model = TwoLayers(GCNConv(16, 32), GCNConv(32, 8)).eval()
    call, other = inputs_of(EDGES, (40, 160, 1)), inputs_of(EDGES, (40, 160, 1), 1)
    path = gnncompile.package(model, call, tmp_path / "model.pt2", keep_layout=True)
    layout_of = torch._inductor.package.load_package(path, "layout")
    served = torch._inductor.package.load_package(path, "with_layout")
    layout = layout_of(*call)
    torch.testing.assert_close(layout[0], torch.ops.gnncompile.seal([call[1], *layout[1:]], [40, 160]))
    changed = [layout[0], layout[1] + 1, *layout[2:]]
    longer = [layout[0], torch.cat([layout[1], layout[1][-1:]]), *layout[2:]]
    swapped = [layout[0], *layout[:0:-1]]
    for given in (layout_of(*other), layout_of(*inputs_of(EDGES, (41, 160, 1))), changed, longer, swapped, layout[:-1]):
        with pytest.raises(RuntimeError):
            served(given, *call)
        torch.testing.assert_close(served(layout, *call)["out"], model(*call)["out"], rtol=1e-4, atol=1e-5)
    x, edge_index = call
    answers, _ = serve_in_cpp(path, [call, (x, edge_index + 40)], tmp_path, "--layout", "once")
    agree(model, [call], answers[:1])
    assert isinstance(answers[1], str)
    expected = model(x + 1, edge_index)["out"]
    torch.testing.assert_close(served(layout, x + 1, edge_index)["out"], expected, rtol=1e-4, atol=1e-5)


def test_a_layout_that_can_not_be_kept_is_an_error():
    model = TwoLayers(GCNConv(16, 32), GCNConv(32, 8)).eval()
    call = inputs_of(EDGES, (40, 160, 1))
    captured = capture(model, call, {}, {})
    sorts = _Call(captured, model, call, {}, ["x", "edge_index"]).plain().program
    with pytest.raises(RuntimeError, match="keep_layout: a size of the layout depends on the entries of a tensor"):
        refuse_layout_made_anew(sorts)


def test_a_model_without_edges_has_no_layout_to_keep(tmp_path):
    with pytest.raises(ValueError, match="keep_layout: the model sorts no edges"):
        gnncompile.package(nn.ReLU().eval(), (torch.zeros(3, 4),), tmp_path / "model.pt2", keep_layout=True)


@pytest.mark.parametrize("name", ["x86-64-v3", "x86-64-v4"])
def test_code_for_another_cpu_needs_no_instructions_of_a_higher_level(name):
    gnncompile.compile(nn.ReLU())  # patches torch
    with _building([], name, None), config.patch({"cpp.simdlen": VECTOR_BITS[name]}):
        chosen = cpu_vec_isa.pick_vec_isa()
    if not isinstance(chosen, (cpu_vec_isa.VecAVX2, cpu_vec_isa.VecAVX512)):
        pytest.skip("needs a CPU of this level")
    level = ("-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl") if name == "x86-64-v4" else ()
    assert set(chosen.build_arch_flags().split()) <= {"-mavx2", "-mfma", "-mf16c", *level}


@pytest.mark.slow
@pytest.mark.parametrize("cpu", ["native", "x86-64-v3"])
def test_a_cpu_that_lacks_instructions_refuses_in_words(cpu, tmp_path):
    qemu = shutil.which("qemu-x86_64")
    if qemu is None or "avx512" not in torch.backends.cpu.get_cpu_capability().lower():
        pytest.skip("needs qemu-user and a CPU with AVX512")
    model = TwoLayers(GCNConv(16, 32), GCNConv(32, 8)).eval()
    call = inputs_of(EDGES, (40, 160, 1))
    path = gnncompile.package(model, call, tmp_path / "model.pt2", cpu=cpu)
    agree(model, [call], serve_in_cpp(path, [call], tmp_path)[0])
    command = [qemu, "-cpu", "Haswell", server(), path, tmp_path / "requests.pt"]
    done = subprocess.run([*command, tmp_path / "there.pt"], capture_output=True, text=True)
    if cpu == "native":
        assert done.returncode == 1 and "CPU ISA level is lower than required" in done.stderr
        return
    assert done.returncode == 0
    agree(model, [call], torch.load(tmp_path / "there.pt", weights_only=False))
