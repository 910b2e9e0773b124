"""``gnncompile.package``: answers of a process without gnncompile, inputs that are refused, and models that are."""

import io
import json
import shutil
import subprocess
import sys
import time
import zipfile
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
from gnncompile.exc import CaptureError
from gnncompile.serving.package import input_names
from tests.e2e.package_cpp import serve_in_cpp, server

SERVER = Path(__file__).with_name("package_server.py")
SIZES = ((30, 90, 3), (1, 0, 1), (1, 1, 1), (5, 0, 2), (100, 1000, 7), (33, 2, 2), (2, 7, 1), (64, 64, 4))
"""Nodes, edges and graphs."""


def random_sizes(count):
    """Returns numbers of nodes, edges and graphs, always the same."""
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randint(1, 300, (count, 2), generator=generator).tolist()
    return [(nodes, edges, 1 + edges % min(nodes, 5)) for nodes, edges in pairs]


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
EDGES = ("x", "edge_index")
MODELS = {
    "GCN": (lambda: TwoLayers(GCNConv(16, 32), GCNConv(32, 8)), EDGES),
    "SAGE": (lambda: TwoLayers(SAGEConv(16, 32), SAGEConv(32, 8)), EDGES),
    "GAT": (lambda: TwoLayers(GATConv(16, 8, heads=4), GATConv(32, 8)), EDGES),
    "GATv2": (lambda: TwoLayers(GATv2Conv(16, 8, heads=4), GATv2Conv(32, 8)), EDGES),
    "GIN": (lambda: TwoLayers(GINConv(MLP([16, 32])), GINConv(MLP([32, 8]))), EDGES),
    "GINE": (
        lambda: TwoLayers(GINEConv(MLP([16, 32]), edge_dim=4), GINEConv(MLP([32, 8]), edge_dim=4)),
        (*EDGES, "edge_attr"),
    ),
    "PNA": (lambda: TwoLayers(PNAConv(16, 32, **_PNA), PNAConv(32, 8, **_PNA)), EDGES),
    "RGCN": (lambda: TwoLayers(RGCNConv(16, 32, 4), RGCNConv(32, 8, 4)), (*EDGES, "edge_type")),
    "pooled": (Pooled, (*EDGES, "batch")),
    "mesh": (Mesh, (*EDGES, "edge_attr")),
    "molecule": (Molecule, ("z", "pos", "edge_index", "batch", "ptr")),
}


def inputs_of(names, size, seed=0):
    given = request(*size, seed=seed)
    return tuple(given[name] for name in names)


def serve(path, calls, folder, keep_layout=False):
    """Runs calls in a process without gnncompile, each in one or with a layout that was made before.

    Returns for each call its tensors, or the error's text, and what the process wrote to stderr: torch 2.11 writes the
    words of an error there alone.
    """
    torch.save([tuple(call) for call in calls], folder / "calls.pt")
    command = [sys.executable, str(SERVER), str(path), str(folder / "calls.pt"), str(folder / "answers.pt")]
    command += ["keep layout"] if keep_layout else []
    done = subprocess.run(command, check=True, cwd=folder, capture_output=True, text=True)
    return torch.load(folder / "answers.pt"), done.stderr


def agree(model, calls, answers):
    for call, found in zip(calls, answers, strict=True):
        assert not isinstance(found, str), found
        with torch.no_grad():
            expected = torch.utils._pytree.tree_leaves(model(*call))
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)


class Both(nn.Module):
    """Results per node and per graph, of every kind of argument that requests have."""

    def __init__(self):
        super().__init__()
        self.first, self.second = GCNConv(16, 32), GINEConv(MLP([32, 8]), edge_dim=4)

    def forward(self, x, edge_index, edge_attr, batch):
        out = self.second(self.first(x, edge_index).relu(), edge_index, edge_attr)
        return {"out": out, "pooled": global_mean_pool(out, batch)}


_ALL = ("x", "edge_index", "edge_attr", "batch")


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A package of :class:`Both`, and its model."""
    torch.manual_seed(0)
    model = Both().eval()
    path = tmp_path_factory.mktemp("package") / "both.pt2"
    assert gnncompile.package(model, inputs_of(_ALL, (40, 160, 3)), path) == str(path)
    return model, path


def test_one_package_serves_all_sizes_without_gnncompile(both, tmp_path):
    model, path = both
    calls = [inputs_of(_ALL, size, seed) for seed, size in enumerate((*SIZES, *random_sizes(20)))]
    # Values are not checked: a NaN reaches the results that it reaches in eager, and no others.
    x, *rest = inputs_of(_ALL, (9, 20, 2))
    calls.append((torch.where(torch.arange(9)[:, None] == 3, float("nan"), x), *rest))
    agree(model, calls, serve(path, calls, tmp_path)[0])


@pytest.mark.slow
def test_the_server_in_cpp_answers_from_several_threads_and_refuses_wrong_inputs(both, tmp_path):
    model, path = both
    calls = [inputs_of(_ALL, size, seed) for seed, size in enumerate(SIZES)]
    answers, done = serve_in_cpp(path, [*calls, *WRONG.values()], tmp_path, "--threads", "3", "--repeat", "20")
    agree(model, calls, answers[: len(calls)])
    assert json.loads(done.stdout)["answered"] == 20 * len(calls)
    for expected, found in zip(WRONG, answers[len(calls) :], strict=True):
        assert isinstance(found, str)
        assert expected in (found if torch.__version__ >= "2.13" else done.stderr)


X, EDGE_INDEX = torch.zeros(4, 16), torch.zeros(2, 3, dtype=torch.long)
EDGE_ATTR, BATCH = torch.zeros(3, 4), torch.zeros(4, dtype=torch.long)
LEAST = -(2**63)


def wrong(x=X, edge_index=EDGE_INDEX, edge_attr=EDGE_ATTR, batch=BATCH):
    return x, edge_index, edge_attr, batch


WRONG = {
    "x: found dtype float64, expected float32": wrong(x=X.double()),
    "x: found dtype int64, expected float32": wrong(x=X.long()),
    "x: found dtype float16, expected float32": wrong(x=X.half()),
    "x: found dtype bool, expected float32": wrong(x=X > 0),
    "x: found dtype another dtype, expected float32": wrong(x=X.to(torch.complex64)),
    "x: found shape [4, 8], expected 16 in dimension 1": wrong(x=torch.zeros(4, 8)),
    "x: found shape [4, 0], expected 16 in dimension 1": wrong(x=torch.zeros(4, 0)),
    "x: found 1 dimensions, expected 2": wrong(x=X[0]),
    "x: found 3 dimensions, expected 2": wrong(x=X[None]),
    "x: found 0 dimensions, expected 2": wrong(x=torch.tensor(1.0)),
    "x: found strides [1, 4]": wrong(x=X.t().contiguous().t()),
    "x: found strides [0, 1]": wrong(x=X[:1].expand(4, 16)),
    "x: found strides [32, 2]": wrong(x=torch.zeros(4, 32)[:, ::2]),
    "edge_index: found dtype int32, expected int64": wrong(edge_index=EDGE_INDEX.int()),
    "edge_index: found dtype uint8, expected int64": wrong(edge_index=EDGE_INDEX.byte()),
    "edge_index: found dtype float32": wrong(edge_index=EDGE_INDEX.float()),
    "edge_index: found shape [3, 2], expected 2 in dimension 0": wrong(edge_index=EDGE_INDEX.t().contiguous()),
    "edge_index: found 1 dimensions": wrong(edge_index=EDGE_INDEX[0]),
    "edge_index: found strides [1, 2]": wrong(edge_index=EDGE_INDEX.t().contiguous().t()),
    "joins 4 and": wrong(edge_index=EDGE_INDEX + 4),
    "joins -1 and": wrong(edge_index=EDGE_INDEX - 1),
    "entry 2 of edge_index or batch joins 0 and 4": wrong(edge_index=torch.tensor([[0, 0, 4], [0, 0, 0]])),
    "entry 2 of edge_index or batch joins 9 and 0": wrong(edge_index=torch.tensor([[0, 0, 0], [0, 0, 9]])),
    f"joins {2**62}": wrong(edge_index=EDGE_INDEX + 2**62),
    f"joins {LEAST}": wrong(edge_index=EDGE_INDEX + LEAST),
    "expected indices below 0": wrong(x=X[:0], batch=BATCH[:0]),
    "edge_attr: found size 2 in dimension 0, expected 3 like edge_index": wrong(edge_attr=EDGE_ATTR[:2]),
    "edge_attr: found shape [3, 5], expected 4": wrong(edge_attr=torch.zeros(3, 5)),
    "edge_attr: found dtype float64": wrong(edge_attr=EDGE_ATTR.double()),
    "batch: found size 3 in dimension 0, expected 4 like x": wrong(batch=BATCH[:3]),
    "batch: found dtype int32, expected int64": wrong(batch=BATCH.int()),
    "batch: found 2 dimensions, expected 1": wrong(batch=BATCH[None]),
    "batch joins -3 and": wrong(batch=BATCH - 3),
    "you tried to allocate": wrong(batch=BATCH + 2**40),
    "expected inputs vector size to be 4, but got 3": wrong()[:3],
    "inputs vector size to be 4, but got 0": (),
    "inputs vector size to be 4, but got 5": (*wrong(), X),
    "x: found dtype int64, expected float32; convert": (EDGE_INDEX, X, EDGE_ATTR, BATCH),
}
"""Wrong inputs by a part of the error."""

WRONG_IN_PYTHON = {
    **WRONG,
    "x: found another device, expected cpu": wrong(x=X.to("meta")),
    "edge_index: found another device, expected cpu": wrong(edge_index=EDGE_INDEX.to("meta")),
    "x: found a sparse tensor, expected a dense one": wrong(x=X.to_sparse()),
}
"""Also those that C++ does not read from a file."""


def test_a_wrong_input_is_an_error_in_words_and_the_next_call_is_served(both, tmp_path):
    model, path = both
    good = inputs_of(_ALL, (9, 20, 2))
    calls = [call for wrong in WRONG_IN_PYTHON.values() for call in (wrong, good)]
    answers, said = serve(path, calls, tmp_path)
    agree(model, [good] * len(WRONG_IN_PYTHON), answers[1::2])
    for expected, found in zip(WRONG_IN_PYTHON, answers[::2], strict=True):
        assert isinstance(found, str)
        assert expected in (found if torch.__version__ >= "2.13" else said)


def test_packages_share_no_symbols(both, tmp_path):
    """A process may load packages of several versions."""
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("needs nm")
    with zipfile.ZipFile(both[1]) as archive:
        (library,) = (name for name in archive.namelist() if name.endswith(".wrapper.so"))
        (tmp_path / "model.so").write_bytes(archive.read(library))
    told = subprocess.run(
        [nm, "-D", "--defined-only", tmp_path / "model.so"], check=True, capture_output=True, text=True
    )
    assert "AOTInductorModelContainerRun" in told.stdout and "gnncompile" not in told.stdout


DAMAGES = {
    "empty": lambda whole, weight: b"",
    "half": lambda whole, weight: whole[: len(whole) // 2],
    "no end": lambda whole, weight: whole[:-30],
    "text": lambda whole, weight: b"no package " * 100,
    "another archive": lambda whole, weight: _archive(),
    "other code": lambda whole, weight: _changed(whole, whole.rfind(b"\x7fELF") + 2000),
    "other weights": lambda whole, weight: _changed(whole, whole.rfind(weight)),
}
"""What may happen to a file."""


def damaged(packaged, damage):
    model, path = packaged
    return DAMAGES[damage](path.read_bytes(), model.first.lin.weight.detach().numpy().tobytes())


def _archive():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("model/readme.txt", "no package")
    return file.getvalue()


def _changed(whole, at):
    assert at > 0
    return whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_an_error(both, tmp_path, damage):
    path = tmp_path / "wrong.pt2"
    path.write_bytes(damaged(both, damage))
    with pytest.raises(ValueError, match=r"is no package|is damaged: both/data/aotinductor/model/"):
        gnncompile.package_info(path)
    if damage.startswith("other"):  # torch reads such a file without a word
        assert "aotinductor" in zipfile.ZipFile(path).testzip()
        return
    with pytest.raises(RuntimeError):
        torch._inductor.aoti_load_package(str(path))


@pytest.mark.slow
def test_the_server_in_cpp_refuses_damaged_files(both, tmp_path):
    torch.save([], tmp_path / "requests.pt")
    for damage in DAMAGES:
        (tmp_path / "wrong.pt2").write_bytes(damaged(both, damage))
        command = [server(), tmp_path / "wrong.pt2", tmp_path / "requests.pt", tmp_path / "answers.pt"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 1 and "is no package, or damaged" in done.stderr


def test_the_file_says_what_made_it(both):
    found = gnncompile.package_info(both[1])
    assert found["torch"] == torch.__version__ and found["model"] == "Both" and found["models"] == "model"
    assert "-march=native" in found["compiler"]
    assert json.loads(found["inputs"]) == {
        "x": "float32 [40, 16]",
        "edge_index": "int64 [2, 160]",
        "edge_attr": "float32 [160, 4]",
        "batch": "int64 [40]",
    }


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


class Stops(nn.Module):
    def forward(self, x):
        torch._dynamo.graph_break()
        return x * 2


class Prints(nn.Module):
    def forward(self, x):
        print("the sum is", x.sum().item())
        return x * 2


class Loops(nn.Module):
    def forward(self, x):
        for _ in range(int(x[0, 0])):
            x = x * 2
        return x


class Waits(nn.Module):
    def forward(self, x):
        return x * time.time()


class Ignores(nn.Module):
    def forward(self, x):
        return torch.zeros(x.size(0) // 2)


class Drops(nn.Module):
    def forward(self, x):
        return torch.nn.functional.dropout(x, 0.5)  # training=True is its default


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
        (Noise().eval(), (X,), CaptureError, r"test_package.py:\d+: return x \+ torch.rand_like"),
        (Writes().eval(), (X.clone(),), CaptureError, r"test_package.py:\d+: x.add_\(1\)"),
        (Drops().eval(), (X,), CaptureError, r"test_package.py:\d+: return torch.nn.functional.dropout"),
        (Breaks().eval(), (X,), CaptureError, r"test_package.py:\d+: return x \* 2 if float\(x.sum\(\)\).*one graph"),
        (Stops().eval(), (X,), CaptureError, r"test_package.py:\d+: torch._dynamo.graph_break\(\).*one graph"),
        (Prints().eval(), (X,), CaptureError, r"test_package.py:\d+: print\(.*one graph"),
        (Loops().eval(), (X,), CaptureError, r"test_package.py:\d+: for _ in range\(int.*one graph"),
        (Waits().eval(), (X,), CaptureError, r"test_package.py:\d+: return x \* time.time\(\).*one graph"),
        (Ignores().eval(), (X,), CaptureError, "reads no tensor among its arguments"),
        (nn.Linear(8, 4).eval(), (X,), CaptureError, "an operation refuses the example inputs"),
        (Decides().eval(), (X,), CaptureError, r"decides by a size of the example \(s\d+ > 2\)"),
        (Cuts().eval(), (X,), CaptureError, r"decides by a size of the example \(s\d+ >= 3\)"),
        (AsksForEmptiness().eval(), (X,), CaptureError, "asks whether a tensor is empty"),
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
        "drops",
        "breaks",
        "stops",
        "prints",
        "loops",
        "waits",
        "ignores",
        "widths",
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


def test_the_cpu_is_one_that_code_can_be_made_for(tmp_path):
    with pytest.raises(ValueError, match=r"cpu: found 'fast', expected \"native\" or one of x86-64-v3"):
        gnncompile.package(nn.ReLU().eval(), (X,), tmp_path / "model.pt2", cpu="fast")


def test_the_file_needs_its_ending(tmp_path):
    with pytest.raises(ValueError, match=r"ends with .pt2"):
        gnncompile.package(nn.ReLU().eval(), (X,), tmp_path / "model.so")


SCRIPT = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU())
ready = torch.nn.ReLU().eval()
inputs = torch.zeros(3, 4)
"""


def test_the_command_line_says_what_made_a_file(both, capsys):
    assert main(["package", str(both[1]), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"file": str(both[1]), **gnncompile.package_info(both[1])}
    assert main(["package", "missing.pt2"]) == 2


@pytest.mark.slow
def test_the_command_line_writes_a_package(tmp_path, capsys):
    script, out = tmp_path / "served.py", tmp_path / "out.pt2"
    script.write_text(SCRIPT)
    assert main(["package", f"{script}:model", "--out", str(out)]) == 1 and not out.exists()
    assert "call model.eval()" in capsys.readouterr().err
    assert main(["package", f"{script}:ready", "--out", str(out), "--keep-layout"]) == 1 and not out.exists()
    assert "the model sorts no edges" in capsys.readouterr().err
    assert main(["package", f"{script}:ready", "--out", str(out), "--cpu", "native"]) == 0
    assert "ReLU" in capsys.readouterr().out
    assert serve(out, [(torch.tensor([[-1.0, 2, -3, 4]]),)], tmp_path)[0][0][0].tolist() == [[0, 2, 0, 4]]
