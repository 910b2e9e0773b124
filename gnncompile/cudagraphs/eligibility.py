"""Decides whether a captured graph can be recorded. Work of the host would be done only once, at the recording."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from gnncompile.cudagraphs import cuda_graph, mesh_pool
from gnncompile.cudagraphs.pool import CudaGraphPool
from gnncompile.cudagraphs.recorder import CudaGraphSettings
from gnncompile.options import Options

aten = torch.ops.aten

_HOST_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.cudagraph_unsafe)


def recordings(
    run: Callable[..., Any],
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    structural: Sequence[int],
    padded: Sequence[dict[int, int]],
    options: Options,
    group: str | None = None,
    kept: Iterable[int] = (),
) -> CudaGraphPool | str:
    """Returns the pool that records a compiled graph, or the reason why the graph can't be recorded.

    Args:
        run: The compiled graph.
        gm: The graph before it was compiled.
        inputs: Its inputs, for their devices.
        structural: Indices of the inputs from which graph structure is built.
        padded: For each result, its padded dimensions and the row type of each; empty if no result is padded.
        options: The options of gnncompile.
        group: The name of the process group of a graph that runs over one part; None for whole graphs.
        kept: Indices of the inputs that are attributes of the model.
    """
    reason = None if group is None else mesh_pool.why_not(group)
    if reason is not None:
        return reason
    devices = {v.device for n in gm.graph.nodes for v in _tensors(n)}
    devices |= {t.device for t in inputs if isinstance(t, Tensor)}
    if len(devices) != 1:
        return f"it works on {len(devices)} devices: {', '.join(sorted(map(str, devices)))}"
    device = devices.pop()
    if not cuda_graph.supports_cuda_graphs(device):
        return f"its device is {device}"
    given = {s for n in gm.graph.nodes if n.op == "placeholder" for s in _unknown_sizes(n)}
    for node in gm.graph.nodes:
        if _waits(node) or not _unknown_sizes(node) <= given:
            return f"{node.target} waits for the device"
    settings = CudaGraphSettings(options.native, options.backward_in_caller)
    if group is not None:
        return mesh_pool.MeshCudaGraphPool(run, options.recordings, device, structural, settings, group, kept)
    return CudaGraphPool(run, options.recordings, device, structural, settings, padded)


def host_waits(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the host waits for the result of an operation, or for its size."""
    if operation is aten.index.Tensor:  # a mask must be counted first, entries need not
        return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    if operation is aten.one_hot.default:
        return len(args) < 2 or args[1] == -1
    if operation is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    return any(tag in getattr(operation, "tags", ()) for tag in _HOST_TAGS)


def _waits(node: fx.Node) -> bool:
    args, kwargs = fx.map_arg((node.args, node.kwargs), _value)
    return host_waits(node.target, args, kwargs)


def _value(node: fx.Node) -> Any:
    return node.meta.get("val", node.meta.get("example_value"))


def _tensors(node: fx.Node) -> list[Tensor]:
    return [v for v in tree_leaves(_value(node)) if isinstance(v, Tensor)]


def _unknown_sizes(node: fx.Node) -> set[Any]:
    """Returns the symbols of data-dependent sizes. Graph structure may have such sizes."""
    return {symbol for t in _tensors(node) for symbol in free_unbacked_symbols(t)}
