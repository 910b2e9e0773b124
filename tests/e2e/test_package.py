"""``gnncompile.package``: answers of a process without gnncompile, inputs that are refused, and models that are."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch_geometric.nn import (
    MLP,
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GINEConv,
    PNAConv,
    RGCNConv,
    SAGEConv,
    global_mean_pool,
)
from torch_geometric.utils import scatter

import gnncompile
from gnncompile import testing
from gnncompile.cli.main import main
from gnncompile.serving.package import input_names

SERVER = Path(__file__).with_name("package_server.py")
SIZES = ((30, 90, 3), (1, 0, 1), (1, 1, 1), (5, 0, 2), (100, 1000, 7), (33, 2, 2), (2, 7, 1), (64, 64, 4))
"""Nodes, edges and graphs."""


def request(num_nodes, num_edges, num_graphs, seed=0):
    """All tensors that a model here may take, of one batch of graphs."""
    data = testing.uniform(max(num_nodes, 1), num_edges, channels=16, seed=seed)
    torch.manual_seed(seed)
    batch = torch.cat([torch.randint(num_graphs, (num_nodes - 1,)), torch.tensor([num_graphs - 1])]).sort()[0]
    return {
        "x": data.x,
        "edge_index": data.edge_index,
        "edge_attr": torch.randn(num_edges, 4),
        "edge_type": torch.randint(4, (num_edges,)),
        "batch": batch,
        "ptr": torch.searchsorted(batch, torch.arange(num_graphs + 1)),
        "z": torch.randint(10, (num_nodes,)),
        "pos": torch.randn(num_nodes, 3),
    }


class TwoLayers(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x, edge_index, *rest):
        return {"out": self.second(self.first(x, edge_index, *rest).relu(), edge_index, *rest)}


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.linear = SAGEConv(16, 8), nn.Linear(8, 3)

    def forward(self, x, edge_index, batch):
        return self.linear(global_mean_pool(self.conv(x, edge_index), batch))


class Mesh(nn.Module):
    """Two steps of MeshGraphNet, with states on edges."""

    def __init__(self, width=32):
        super().__init__()
        self.nodes, self.edges, self.out = MLP([16, width, width]), MLP([4, width, width]), nn.Linear(width, 3)
        self.edge_steps = nn.ModuleList(MLP([3 * width, width, width], norm="layer_norm") for _ in range(2))
        self.node_steps = nn.ModuleList(MLP([2 * width, width, width], norm="layer_norm") for _ in range(2))

    def forward(self, x, edge_index, edge_attr):
        source, destination = edge_index
        h, e = self.nodes(x), self.edges(edge_attr)
        for edge_step, node_step in zip(self.edge_steps, self.node_steps, strict=True):
            e = e + edge_step(torch.cat([e, h[source], h[destination]], -1))
            h = h + node_step(torch.cat([h, scatter(e, destination, 0, h.size(0))], -1))
        return self.out(h)


class Molecule(nn.Module):
    """An energy per graph, and the forces on its atoms."""

    def __init__(self, width=32):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(10, width), nn.Linear(width, width)
        self.filter = nn.Sequential(nn.Linear(8, width), nn.SiLU(), nn.Linear(width, width))
        self.out = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, z, pos, edge_index, batch, ptr):
        source, destination = edge_index
        with torch.enable_grad():
            pos = pos.detach().requires_grad_()
            distance = ((pos[source] - pos[destination]).square().sum(-1) + 1e-6).sqrt()
            basis = torch.exp(-((distance[:, None] - torch.linspace(0, 3, 8)) ** 2))
            h = self.embedding(z)
            h = h + scatter(self.linear(h)[source] * self.filter(basis), destination, 0, h.size(0))
            energy = scatter(self.out(h)[:, 0], batch, 0, ptr.size(0) - 1)
            forces = -torch.autograd.grad(energy.sum(), pos)[0]
        return energy.detach(), forces


_PNA = {
    "aggregators": ["mean", "min", "max", "std"],
    "scalers": ["identity", "amplification", "attenuation"],
    "deg": torch.tensor([0, 2, 5, 8, 4, 1]),
}
_EDGES = ("x", "edge_index")
MODELS = {
    "SAGE": (lambda: TwoLayers(SAGEConv(16, 32), SAGEConv(32, 8)), _EDGES),
    "GAT": (lambda: TwoLayers(GATConv(16, 8, heads=4), GATConv(32, 8)), _EDGES),
    "GATv2": (lambda: TwoLayers(GATv2Conv(16, 8, heads=4), GATv2Conv(32, 8)), _EDGES),
    "GIN": (lambda: TwoLayers(GINConv(MLP([16, 32])), GINConv(MLP([32, 8]))), _EDGES),
    "GINE": (
        lambda: TwoLayers(GINEConv(MLP([16, 32]), edge_dim=4), GINEConv(MLP([32, 8]), edge_dim=4)),
        (*_EDGES, "edge_attr"),
    ),
    "PNA": (lambda: TwoLayers(PNAConv(16, 32, **_PNA), PNAConv(32, 8, **_PNA)), _EDGES),
    "RGCN": (lambda: TwoLayers(RGCNConv(16, 32, 4), RGCNConv(32, 8, 4)), (*_EDGES, "edge_type")),
    "pooled": (Pooled, (*_EDGES, "batch")),
    "mesh": (Mesh, (*_EDGES, "edge_attr")),
    "molecule": (Molecule, ("z", "pos", "edge_index", "batch", "ptr")),
}


def inputs_of(names, size, seed=0):
    given = request(*size, seed=seed)
    return tuple(given[name] for name in names)


def serve(path, calls, folder):
    """Runs calls in a process without gnncompile.

    Returns for each call its tensors, or the error's text, and what the process wrote to stderr: torch 2.11 writes the
    words of an error there alone.
    """
    torch.save([tuple(call) for call in calls], folder / "calls.pt")
    command = [sys.executable, str(SERVER), str(path), str(folder / "calls.pt"), str(folder / "answers.pt")]
    done = subprocess.run(command, check=True, cwd=folder, capture_output=True, text=True)
    return torch.load(folder / "answers.pt"), done.stderr


def agree(model, calls, answers):
    for call, found in zip(calls, answers, strict=True):
        assert not isinstance(found, str), found
        with torch.no_grad():
            expected = torch.utils._pytree.tree_leaves(model(*call))
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def gcn(tmp_path_factory):
    """A package of two GCN layers, and its model."""
    torch.manual_seed(0)
    model = TwoLayers(GCNConv(16, 32), GCNConv(32, 8)).eval()
    path = tmp_path_factory.mktemp("package") / "gcn.pt2"
    assert gnncompile.package(model, inputs_of(_EDGES, (40, 160, 1)), path) == str(path)
    return model, path


def test_one_package_serves_all_sizes_without_gnncompile(gcn, tmp_path):
    model, path = gcn
    generator = torch.Generator().manual_seed(0)
    sizes = [(int(n), int(e), 1) for n, e in torch.randint(1, 300, (20, 2), generator=generator)]
    calls = [inputs_of(_EDGES, size, seed) for seed, size in enumerate((*SIZES, *sizes))]
    agree(model, calls, serve(path, calls, tmp_path)[0])


@pytest.mark.slow
def test_the_server_in_cpp_answers_from_several_threads(gcn, tmp_path):
    cmake = shutil.which("cmake")
    if cmake is None or shutil.which("g++") is None:
        pytest.skip("needs cmake and g++")
    source, build = Path(__file__).parents[2] / "examples" / "serving", tmp_path / "build"
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    subprocess.run([cmake, "-S", source, "-B", build, prefix], check=True, capture_output=True)
    subprocess.run([cmake, "--build", build], check=True, capture_output=True)
    model, path = gcn
    calls = [inputs_of(_EDGES, size, seed) for seed, size in enumerate(SIZES)]
    torch.save([list(call) for call in (*calls, *WRONG.values())], tmp_path / "requests.pt")
    command = [build / "server", path, tmp_path / "requests.pt", tmp_path / "answers.pt"]
    done = subprocess.run([*command, "--threads", "3", "--repeat", "20"], check=True, capture_output=True, text=True)
    answers = torch.load(tmp_path / "answers.pt", weights_only=False)
    agree(model, calls, answers[: len(calls)])
    assert json.loads(done.stdout)["answered"] == 20 * len(calls)
    for expected, found in zip(WRONG, answers[len(calls) :], strict=True):
        assert isinstance(found, str)
        assert expected in (found if torch.__version__ >= "2.13" else done.stderr)


X, EDGE_INDEX = torch.zeros(4, 16), torch.zeros(2, 3, dtype=torch.long)
WRONG = {
    "x: found dtype float64, expected float32": (X.double(), EDGE_INDEX),
    "x: found dtype int64, expected float32": (X.long(), EDGE_INDEX),
    "x: found shape [4, 8], expected 16 in dimension 1": (torch.zeros(4, 8), EDGE_INDEX),
    "x: found 1 dimensions, expected 2": (X[0], EDGE_INDEX),
    "x: found strides [1, 4]": (X.t().contiguous().t(), EDGE_INDEX),
    "edge_index: found dtype int32, expected int64": (X, EDGE_INDEX.int()),
    "edge_index: found dtype float32": (X, EDGE_INDEX.float()),
    "edge_index: found shape [3, 2], expected 2 in dimension 0": (X, EDGE_INDEX.t().contiguous()),
    "edge_index: found 1 dimensions": (X, EDGE_INDEX[0]),
    "joins 4 and": (X, EDGE_INDEX + 4),
    "joins -1 and": (X, EDGE_INDEX - 1),
    "expected indices below 0": (X[:0], EDGE_INDEX),
    f"joins {2**62}": (X, EDGE_INDEX + 2**62),
}


def test_a_wrong_input_is_an_error_in_words_and_the_next_call_is_served(gcn, tmp_path):
    model, path = gcn
    good = inputs_of(_EDGES, (9, 20, 1))
    calls = [call for wrong in WRONG.values() for call in (wrong, good)]
    answers, said = serve(path, calls, tmp_path)
    agree(model, [good] * len(WRONG), answers[1::2])
    for expected, found in zip(WRONG, answers[::2], strict=True):
        assert isinstance(found, str)
        assert expected in (found if torch.__version__ >= "2.13" else said)


@pytest.mark.parametrize("damage", ["empty", "half", "text"])
def test_a_damaged_file_is_an_error(gcn, tmp_path, damage):
    whole = gcn[1].read_bytes()
    wrong = {"empty": b"", "half": whole[: len(whole) // 2], "text": b"no package " * 100}[damage]
    path = tmp_path / "wrong.pt2"
    path.write_bytes(wrong)
    with pytest.raises(ValueError, match="is no package"):
        gnncompile.package_info(path)
    with pytest.raises(RuntimeError):
        torch._inductor.aoti_load_package(str(path))


def test_the_file_says_what_made_it(gcn):
    found = gnncompile.package_info(gcn[1])
    assert found["torch"] == torch.__version__ and found["model"] == "TwoLayers"
    assert json.loads(found["inputs"]) == {"x": "float32 [40, 16]", "edge_index": "int64 [2, 160]"}


@pytest.mark.parametrize("name", MODELS)
def test_models(name, tmp_path):
    if name == "molecule" and torch.__version__ < "2.13":
        pytest.skip("Dynamo breaks the graph at requires_grad_()")
    torch.manual_seed(0)
    make, names = MODELS[name]
    model = make().eval()
    path = gnncompile.package(model, inputs_of(names, (40, 160, 3)), tmp_path / "model.pt2")
    calls = [inputs_of(names, size, seed) for seed, size in enumerate(SIZES)]
    agree(model, calls, serve(path, calls, tmp_path)[0])


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


class Writes(nn.Module):
    def forward(self, x):
        x.add_(1)
        return x * 2


class Breaks(nn.Module):
    def forward(self, x):
        return x * 2 if float(x.sum()) > 0 else x


class Decides(nn.Module):
    def forward(self, x):
        return x * 2 if x.size(0) > 2 else x


class Cuts(nn.Module):
    def forward(self, x):
        return x[:3] * 2


class AsksForEmptiness(nn.Module):
    def forward(self, x):
        return x * 2 if x.numel() else x


class Named(nn.Module):
    """Parameters with names that could be mistaken for others."""

    def __init__(self):
        super().__init__()
        self.inputs, self.rest = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(3.0))
        self.a_b, self.a = nn.Parameter(torch.tensor(5.0)), nn.Module()
        self.a.b, self.number = nn.Parameter(torch.tensor(7.0)), 11.0

    def forward(self, x, batch, edge_index):  # reads only x
        return x * self.inputs + self.rest * self.a_b - self.a.b * self.number


class Adds(nn.Module):
    def forward(self, x, other):
        return x + other


class Number(nn.Module):
    def forward(self, x):
        return x * 2, 3


@pytest.mark.parametrize(
    ("model", "arguments", "error", "words"),
    [
        (nn.Dropout(), (X,), ValueError, "in training mode"),
        (Noise().eval(), (X,), RuntimeError, r"test_package.py:\d+: return x \+ torch.rand_like"),
        (Writes().eval(), (X.clone(),), RuntimeError, r"test_package.py:\d+: x.add_\(1\)"),
        (Breaks().eval(), (X,), RuntimeError, r"float\(x.sum\(\)\)"),
        (Decides().eval(), (X,), RuntimeError, r"decides by a size of the example \(s\d+ > 2\)"),
        (Cuts().eval(), (X,), RuntimeError, r"decides by a size of the example \(s\d+ >= 3\)"),
        (AsksForEmptiness().eval(), (X,), RuntimeError, "asks whether a tensor is empty"),
        (Adds().eval(), (X, X), ValueError, "other is the same tensor as x"),
        (Number().eval(), (X,), TypeError, "returns int, expected tensors"),
        (nn.ReLU().eval(), (3,), TypeError, "input is int, expected a tensor"),
        (nn.ReLU().eval(), (X.to_sparse(),), TypeError, "expected a dense tensor"),
        (torch.relu, (X,), TypeError, "expected an nn.Module"),
    ],
    ids=[
        "training",
        "random",
        "writes",
        "breaks",
        "decides",
        "cuts",
        "empty",
        "twice",
        "number",
        "argument",
        "sparse",
        "function",
    ],
)
def test_what_cannot_be_packaged_is_said(model, arguments, error, words, tmp_path):
    with pytest.raises(error, match=words):
        gnncompile.package(model, arguments, tmp_path / "model.pt2")


@pytest.mark.slow
def test_parameters_keep_their_values_whatever_their_names_and_unread_arguments_their_sizes(tmp_path):
    model = Named().eval()
    path = gnncompile.package(model, (X, torch.zeros(4), EDGE_INDEX), tmp_path / "model.pt2")
    calls = [(torch.randn(rows, 16), torch.zeros(rows + 5), EDGE_INDEX[:, rows:]) for rows in (3, 0)]
    agree(model, calls, serve(path, calls, tmp_path)[0])


def test_arguments_are_named_as_in_the_model():
    class Named(nn.Module):
        def forward(self, x, *layers, flag=None):
            return x

    assert input_names(Named(), (X, {"a": X}, X), {"flag": X}) == ["x", "layers[0]['a']", "layers[1]", "flag"]
    with pytest.raises(TypeError, match="example_inputs: found a tensor, expected the arguments"):
        gnncompile.package(Named(), X, "model.pt2")


def test_the_file_needs_its_ending(tmp_path):
    with pytest.raises(ValueError, match=r"ends with .pt2"):
        gnncompile.package(nn.ReLU().eval(), (X,), tmp_path / "model.so")


SCRIPT = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU())
ready = torch.nn.ReLU().eval()
inputs = torch.zeros(3, 4)
"""


def test_the_command_line_says_what_made_a_file(gcn, capsys):
    assert main(["package", str(gcn[1]), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"file": str(gcn[1]), **gnncompile.package_info(gcn[1])}
    assert main(["package", "missing.pt2"]) == 2


@pytest.mark.slow
def test_the_command_line_writes_a_package(tmp_path, capsys):
    script, out = tmp_path / "served.py", tmp_path / "out.pt2"
    script.write_text(SCRIPT)
    assert main(["package", f"{script}:model", "--out", str(out)]) == 1 and not out.exists()
    assert "call model.eval()" in capsys.readouterr().err
    assert main(["package", f"{script}:ready", "--out", str(out)]) == 0
    assert "ReLU" in capsys.readouterr().out
    assert serve(out, [(torch.tensor([[-1.0, 2, -3, 4]]),)], tmp_path)[0][0][0].tolist() == [[0, 2, 0, 4]]
