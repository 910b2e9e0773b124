"""Operations of weights alone, which a package for a GPU computes before it is written."""

import pytest
import torch
from torch import fx, nn

from gnncompile.serving import fold_constants

aten = torch.ops.aten


def module_of(build, **weights):
    """Returns a graph of one input, which `build` writes."""
    root, graph = nn.Module(), fx.Graph()
    for name, value in weights.items():
        root.register_buffer(name, value)
    x = graph.placeholder("x")
    graph.output(build(graph, x, *(graph.get_attr(name) for name in weights)))
    return fx.GraphModule(root, graph)


def targets(module):
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def test_a_transposed_weight_is_stored():
    def build(graph, x, weight):
        turned = graph.call_function(aten.permute.default, (weight, [1, 0]))
        copied = graph.call_function(aten.clone.default, (turned,), {"memory_format": torch.contiguous_format})
        return graph.call_function(aten.mm.default, (x, copied))

    x, weight = torch.randn(3, 5), torch.randn(7, 5)
    module = module_of(build, weight=weight)
    fold_constants.run(module)
    assert targets(module) == [aten.mm.default]
    assert torch.equal(module(x), x @ weight.t().contiguous())


def test_a_view_of_a_weight_stays_a_view():
    def build(graph, x, weight):
        return graph.call_function(aten.mm.default, (x, graph.call_function(aten.permute.default, (weight, [1, 0]))))

    module = module_of(build, weight=torch.randn(7, 5))
    fold_constants.run(module)
    assert targets(module) == [aten.permute.default, aten.mm.default]
    assert list(dict(module.named_buffers())) == ["weight"]


def test_what_inputs_and_sizes_make_is_left():
    def build(graph, x, weight):
        made = graph.call_function(aten.clone.default, (x,))
        new = graph.call_function(aten.empty.memory_format, ([2],))
        return made, new, graph.call_function(aten.add.Tensor, (weight, 1))

    module = module_of(build, weight=torch.randn(2))
    fold_constants.run(module)
    assert targets(module) == [aten.clone.default, aten.empty.memory_format, aten.add.Tensor]


@pytest.mark.parametrize("count", [1, 8, 9])
def test_few_numbers_get_an_axis_where_a_kernel_reads_them(count):
    def build(graph, x, bias, weight):
        return graph.call_function(aten.addmm.default, (bias, x, weight))

    x, bias, weight = torch.randn(3, 5), torch.randn(count), torch.randn(5, count)
    module = module_of(build, bias=bias, weight=weight)
    fold_constants.run(module)
    assert torch.equal(module(x), torch.addmm(bias, x, weight))
    assert targets(module) == [*([aten.view.default] if count <= 8 else []), aten.addmm.default]
