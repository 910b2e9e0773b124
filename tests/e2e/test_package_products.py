"""Products of matrices in packages for GPUs, as Triton's interpreter runs them."""

import copy

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch_geometric.nn import SAGEConv

from gnncompile.options import Options
from gnncompile.serving.package import _Call
from gnncompile.serving.program import capture
from tests.e2e.test_package import EDGES, TwoLayers, inputs_of
from tests.e2e.test_package_gpu import as_packaged, hub, in_double, interpreted
from tests.harness import tune, without_interpreter
from tests.package_launches import code_of, own_launches, torchs_launches
from tests.triton_regions import on_tensor_cores

pytestmark = [
    interpreted,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.usefixtures("on_tensor_cores"),
]
__all__ = ["on_tensor_cores"]
ROWS = (0, 1, 70)


def sage():
    """Two layers, of as many channels as the example has nodes: no size may become a number for that."""
    return TwoLayers(SAGEConv(16, 40), SAGEConv(40, 48))


class Products(nn.Module):
    """Products with weights that lie in memory in each way, and what may follow them."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 33), nn.Linear(33, 19, bias=False)
        self.weight = nn.Parameter(torch.randn(19, 64) / 4)
        self.stack = nn.Parameter(torch.randn(3, 20, 19) / 4)

    def forward(self, x):
        hidden = self.last(self.first(x).relu())
        wide = hidden @ self.weight[:, :40] + hidden @ self.weight[:, 24:]
        each = hidden @ self.stack[1].t()
        return wide, each + torch.ones_like(each), (hidden + hidden @ self.weight[:, 3:22]).relu()


class OverRows(nn.Module):
    """Attention without a softmax: a product over all rows, as SGFormer has it."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 24) for _ in range(3))

    def forward(self, x):
        return self.query(x) @ (self.key(x).t() @ self.value(x)), self.value(x).sum(0)


def traced(model, call, names, options=None):
    program = _Call(capture(model, call, {}, {}), model, call, {}, list(names)).plain().program
    return as_packaged(program, Options() if options is None else options)


def agree(model, program, calls, tolerance=1e-5):
    exact = copy.deepcopy(model).double()
    for call in calls:
        with torch.no_grad():
            found, expected = program(*call), exact(*in_double(call))
        for ours, theirs in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
            most = float(theirs.abs().max()) if theirs.numel() else 0.0
            torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance * max(most, 1.0))


@pytest.mark.parametrize("few", [True, False])
def test_a_layers_two_products_are_one_launch(few, monkeypatch):
    tune(monkeypatch, few_rows=2**14 if few else 0)
    torch.manual_seed(0)
    model = sage().eval()
    program = traced(model, inputs_of(EDGES, (40, 160, 3)), EDGES)
    calls = [inputs_of(EDGES, size) for size in ((1, 0, 1), (1, 5, 1), (9, 0, 1), (150, 900, 2))]
    agree(model, program, [*calls, hub(inputs_of(EDGES, (80, 400, 3)))])
    found = own_launches(program, calls[-1], monkeypatch)
    assert found["by_rows"] == 2 and "split" not in found, found
    kinds = [node.target for node in program.graph.nodes]
    assert not {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.relu.default} & {*kinds}


def test_an_example_with_as_many_nodes_as_features():
    torch.manual_seed(0)
    model = sage().eval()
    program = traced(model, inputs_of(EDGES, (16, 160, 3)), EDGES)
    agree(model, program, [inputs_of(EDGES, size) for size in ((1, 5, 1), (9, 0, 1), (16, 40, 1), (40, 160, 2))])


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_in_any_order(few, dtype, monkeypatch):
    tune(monkeypatch, few_rows=2**14 if few else 0)
    torch.manual_seed(0)
    model = Products().eval().to(dtype)
    program = traced(model, (torch.randn(40, 16, dtype=dtype),), ("x",))
    calls = [(torch.randn(rows, 16, dtype=dtype),) for rows in ROWS]
    agree(model, program, calls, 1e-5 if dtype is torch.float32 else 3e-2)
    found = own_launches(program, calls[-1], monkeypatch)
    assert found["by_rows"] and "split" not in found, found


class Parts(nn.Module):
    """Weights and a bias that are parts of larger ones, and rows that begin within a tensor."""

    def __init__(self):
        super().__init__()
        self.stack, self.bias = nn.Parameter(torch.randn(3, 32, 32) / 4), nn.Parameter(torch.randn(96))

    def forward(self, x):
        chunks = zip(self.stack.view(96, 32).chunk(3), self.bias.chunk(3), strict=True)
        each = [nn.functional.linear(x[1:], weight, bias) for weight, bias in chunks]
        return each, [x[1:] @ weight for weight in self.stack]


@pytest.mark.parametrize("few", [True, False])
def test_parts_of_weights_are_copied_once(few, monkeypatch):
    """In each call, rows that do not begin where memory begins are copied once, and no weight is."""
    tune(monkeypatch, few_rows=2**14 if few else 0)
    torch.manual_seed(0)
    model, call = Parts().eval(), (torch.randn(40, 32),)
    agree(model, traced(model, call, ("x",)), [(torch.randn(rows, 32),) for rows in (1, 2, 70)])
    written = _Call(capture(model, call, {}, {}), model, call, {}, ["x"]).plain()
    found = torchs_launches(code_of(written, monkeypatch))
    assert sum(found.values()) == 1, found


class Runtime(nn.Module):
    """Right factors that are no weights, whose strides depend on the number of rows."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x):
        beside = torch.cat([self.tokens, x]).t().contiguous()
        stacked = torch.stack([x * k for k in range(1, 17)]).transpose(1, 2).contiguous()
        return x @ beside[:, :16], x @ stacked[:, :, 0]


@pytest.mark.parametrize("few", [True, False])
def test_strides_that_depend_on_sizes_are_no_condition(few, monkeypatch):
    tune(monkeypatch, few_rows=2**14 if few else 0)
    torch.manual_seed(0)
    model = Runtime().eval()
    program = traced(model, (torch.randn(33, 16),), ("x",))
    agree(model, program, [(torch.randn(rows, 16),) for rows in (1, 2, 16, 70)])


class Autocast(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.layers, self.last, self.dtype = sage(), nn.Linear(48, 8), dtype

    def forward(self, x, edge_index):
        with torch.autocast("cpu", self.dtype):
            (hidden,) = pytree.tree_leaves(self.layers(x, edge_index))
            return self.last(hidden.relu()).float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    torch.manual_seed(0)
    model = Autocast(dtype).eval()
    program = traced(model, inputs_of(EDGES, (40, 160, 3)), EDGES)
    for size in ((1, 0, 1), (9, 30, 1), (70, 300, 2)):
        call = inputs_of(EDGES, size)
        with torch.no_grad():
            torch.testing.assert_close(pytree.tree_leaves(program(*call))[0], model(*call), rtol=3e-2, atol=3e-2)


def test_products_over_rows_are_the_librarys(monkeypatch):
    torch.manual_seed(0)
    model = OverRows().eval()
    program = traced(model, (torch.randn(40, 16),), ("x",))
    calls = [(torch.randn(rows, 16),) for rows in ROWS]
    agree(model, program, calls)
    found = own_launches(program, calls[-1], monkeypatch)
    assert found["by_rows"] and {*found} == {"by_rows"}, found


def test_without_products(monkeypatch):
    torch.manual_seed(0)
    model, call = sage().eval(), inputs_of(EDGES, (40, 160, 3))
    program = traced(model, call, EDGES, Options(products=False))
    agree(model, program, [call])
    assert not own_launches(program, call, monkeypatch)["by_rows"]


_COMPILE = """
import torch
from gnncompile.codegen.gemm import sized
found = []
def start(entry, tensors, numbers, programs, written):
    found.append(entry)
    return [tensors[at] for at in written]
for dtype in (torch.float32, torch.bfloat16):
    for expected in (40, None):
        factors = torch.empty(40, 16, dtype=dtype), torch.empty(33, 16, dtype=dtype).t()
        sized.product((factors, factors), torch.empty(33, dtype=dtype), None, True, expected, start)
kernels = {entry.name: entry for entry in found}
assert len(kernels) == 4, [(entry.names, entry.constants) for entry in found]
for entry in kernels.values():
    made = entry.compile((9, 0))
    assert made.code.startswith(b"\\x7fELF") and made.symbol.encode() in made.code and made.scratches == 2, made[1:]
"""


def test_kernels_are_compiled_without_a_gpu():
    without_interpreter("-c", _COMPILE)
