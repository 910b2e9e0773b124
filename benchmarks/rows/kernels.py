"""The ways to sum over neighbours. Each is a row of a table, and its graph's structure is made beforehand."""

import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.util import find_spec
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import scatter

from benchmarks.cases.names import chosen
from benchmarks.rows.variants import PARTITIONED, has_option

Aggregate = Callable[[Tensor], Tensor]


class Structure:
    """The edges of a graph in every form that a row needs ready.

    Args:
        edge_index: `[2, num_edges]`, int64, sources above destinations, in any order.
        num_nodes: number of nodes.
    """

    def __init__(self, edge_index: Tensor, num_nodes: int) -> None:
        self.edge_index, self.num_nodes = edge_index, num_nodes

    @property
    def num_edges(self) -> int:
        """The number of edges, and so of rows that one aggregation gathers."""
        return self.edge_index.size(1)

    @cached_property
    def csr(self) -> tuple[Tensor, Tensor]:
        """`rowptr`, `[num_nodes + 1]`, and `col`, `[num_edges]`: sources by destination, int32."""
        source, destination = self.edge_index
        rowptr = torch.zeros(self.num_nodes + 1, dtype=torch.int32, device=source.device)
        rowptr[1:] = torch.bincount(destination, minlength=self.num_nodes).cumsum(0)
        return rowptr, source[destination.argsort(stable=True)].int()


def exact(structure: Structure, x: Tensor, chunk_bytes: int = 2**28) -> Tensor:
    """Returns the sums in float64, `[num_nodes, channels]`, a chunk of edges at a time."""
    source, destination = structure.edge_index
    step = max(1, chunk_bytes // (8 * x.size(1)))
    out = torch.zeros(structure.num_nodes, x.size(1), dtype=torch.float64, device=x.device)
    for some_sources, some_destinations in zip(source.split(step), destination.split(step), strict=True):
        out.index_add_(0, some_destinations, x[some_sources].double())
    return out


def index_add(x: Tensor, edge_index: Tensor) -> Tensor:
    """Gathers the source rows and adds them up, `[num_nodes, channels]`, in plain PyTorch."""
    return x.new_zeros(x.shape).index_add_(0, edge_index[1], x[edge_index[0]])


def _eager(structure: Structure, dtype: torch.dtype) -> Aggregate:
    return lambda x: index_add(x, structure.edge_index)


_numbers = count()


def _compile(structure: Structure, dtype: torch.dtype, options: dict[str, Any] | None = None) -> Aggregate:
    # Dynamo keeps compiled code by code object. Each case has its own, or sizes would become symbolic in the second.
    code = index_add.__code__.replace(co_name=f"index_add_{next(_numbers)}")
    compiled = torch.compile(types.FunctionType(code, index_add.__globals__), options=options)
    return lambda x: compiled(x, structure.edge_index)


def _partitioned(structure: Structure, dtype: torch.dtype) -> Aggregate:
    return _compile(structure, dtype, {PARTITIONED: True})


def _sparse(structure: Structure, dtype: torch.dtype) -> Aggregate:
    rowptr, col = structure.csr
    values = torch.ones(structure.num_edges, dtype=dtype, device=col.device)
    matrix = torch.sparse_csr_tensor(rowptr, col, values, (structure.num_nodes, structure.num_nodes))
    return lambda x: matrix @ x


def _torch_scatter(structure: Structure, dtype: torch.dtype) -> Aggregate:
    from torch_scatter import segment_csr

    rowptr, col = (index.long() for index in structure.csr)
    return lambda x: segment_csr(x[col], rowptr, reduce="sum")


def _scatter(x: Tensor, edge_index: Tensor) -> Tensor:
    out: Tensor = scatter(x[edge_index[0]], edge_index[1], dim=0, dim_size=x.size(0), reduce="sum")
    return out


@lru_cache(maxsize=1)
def _compiled_scatter() -> Callable[[Tensor, Tensor], Tensor]:
    # Imported here: a benchmark without this row must run even if gnncompile cannot be imported.
    import gnncompile

    return gnncompile.compile(_scatter)


def _gnncompile(structure: Structure, dtype: torch.dtype) -> Aggregate:
    compiled = _compiled_scatter()  # one compiled function for all graphs, as a user would have
    return lambda x: compiled(x, structure.edge_index)


@dataclass(frozen=True)
class KernelRow:
    """One way to sum over neighbours.

    Attributes:
        name: the name in the table.
        build: returns, for a graph and a type, the function from `x`, `[num_nodes, channels]`, to the sums.
        devices: the device types on which it makes sense.
        stores_messages: whether the gathered rows, `[num_edges, channels]`, are written to memory.
        is_sparse: whether this is the vendor's sparse product, with which all rows are compared.
        is_ours: whether this is gnncompile.
        package: the package that must be installed.
        option: an option of Inductor that must exist; some releases of torch lack it.
    """

    name: str
    build: Callable[[Structure, torch.dtype], Aggregate]
    devices: tuple[str, ...] = ("cpu", "cuda")
    stores_messages: bool = False
    is_sparse: bool = False
    is_ours: bool = False
    package: str = "torch"
    option: str = ""

    @property
    def is_installed(self) -> bool:
        """Whether its package can be imported, and Inductor has its option."""
        return find_spec(self.package) is not None and has_option(self.option)


KERNEL_ROWS = (
    KernelRow("eager", _eager, stores_messages=True),
    KernelRow("compile", _compile),
    KernelRow("partitioned scatter", _partitioned, devices=("cuda",), option=PARTITIONED),
    KernelRow("cuSPARSE", _sparse, devices=("cuda",), is_sparse=True),
    KernelRow("MKL", _sparse, devices=("cpu",), is_sparse=True),
    KernelRow("torch_scatter", _torch_scatter, stores_messages=True, package="torch_scatter"),
    KernelRow("gnncompile", _gnncompile, is_ours=True),
)


def rows_for(device: torch.device, names: str | None = None) -> list[KernelRow]:
    """Returns the rows that make sense on a device, in the order of the table: all, or those in `names`.

    Args:
        device: the device.
        names: the names of rows, separated by commas; None for all.

    Raises:
        UnknownNameError: a name is not among the rows.
    """
    return chosen([row for row in KERNEL_ROWS if device.type in row.devices], names)
