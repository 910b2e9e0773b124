"""Inductor: its compiles, its settings, and what it prepares once in every process."""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import fx
from torch._inductor import codecache, cpu_vec_isa, ir
from torch._inductor import config as inductor_config
from torch._inductor.codegen.cpp import CppVecKernel
from torch._inductor.codegen.cpp_utils import CppCSEVariable, cexpr_index
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.lowering import register_lowering
from torch._inductor.runtime import triton_heuristics
from torch._inductor.scheduler import MixOrderReduction, SchedulerNode
from torch._inductor.virtualized import V

from gnncompile._compat.autograd import OF_NO_ROWS
from gnncompile._compat.bounds import REFUSING
from gnncompile._compat.transforms import told_apart

__all__ = [
    "OwnPass",
    "V",
    "compile_inductor",
    "inductor_decompositions",
    "inductor_mode_options",
    "inductor_option_names",
    "ir",
    "patch_codegen_inputs",
    "patch_cpp_vec_masked",
    "patch_grid_2d",
    "patch_mix_order_reduction",
    "patch_recompute_size_and_body",
    "patch_valid_vec_isa_list",
    "prepare_inductor",
    "register_lowering",
    "settings_for",
    "unfused_settings",
]


class OwnPass(CustomGraphPass):
    """A pass after differentiation that tells compiles of ours, of a later backward as well, from others."""


def ours() -> bool:
    """Whether what Inductor compiles now is ours."""
    return isinstance(inductor_config.post_grad_custom_pre_pass, OwnPass)


def compile_inductor(gm: fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Hands a graph to Inductor. What comes back is called where Dynamo is off already."""
    with told_apart():
        patches = {**settings_for(inputs), **options}
        compiled: Any = compile_fx(gm, list(inputs), config_patches=patches, decompositions=inductor_decompositions())
    # Without the wrapper that turns Dynamo off: it costs as much as a launch.
    return getattr(compiled, "_torchdynamo_orig_callable", compiled)  # type: ignore[no-any-return]


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """What operations are made of before Inductor compiles them, in compiles of ours."""
    theirs = select_decomp_table()
    return _Decompositions({**theirs, **OF_NO_ROWS, **{op: ours for op, ours in REFUSING.items() if op in theirs}})


class _Decompositions(dict[Any, Callable[..., Any]]):
    """A table that is pickled as the call that makes it.

    Torch 2.13 makes the table a part of the key of a compiled graph in its cache on disk. Functions of C++ are in the
    table, which can't be pickled: nothing would be kept.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return inductor_decompositions, ()


_MIXED = "mix_order_reduction"


def settings_for(inputs: Sequence[Any]) -> dict[str, Any]:
    """Inductor's settings that a graph with these inputs needs.

    A Triton kernel that sums rows and columns at once sums columns in float32, whatever it is given (torch 2.11 to
    2.13); in float64 it does not even compile, and the graph would be captured anew for fewer sizes.
    """
    doubles = any(isinstance(given, torch.Tensor) and given.dtype is torch.float64 for given in inputs)
    return {f"triton.{_MIXED}": False} if doubles and hasattr(inductor_config.triton, _MIXED) else {}


_LARGE = 5 * 2**20
"""Elements of the smallest matrix whose rows and columns torch sums at once: a smaller one stays in the cache."""


def patch_mix_order_reduction() -> None:
    """Makes Inductor sum rows and columns at once of large matrices only, in compiles of ours.

    Torch asks by a guard, of which it assumes that it holds where sizes may be anything: the columns of all matrices
    would be summed in two steps, the second by an operation of its own.
    """
    can_fuse: Any = MixOrderReduction.can_fuse.__func__  # type: ignore[attr-defined]

    @functools.wraps(can_fuse)
    def fused(cls: Any, one: Any, other: Any) -> bool:
        return bool(can_fuse(cls, one, other)) and (not ours() or cls.get_numel(one) >= _LARGE)

    MixOrderReduction.can_fuse = classmethod(fused)  # type: ignore[method-assign,assignment]


def unfused_settings() -> dict[str, Any]:
    """Inductor's settings by which every operation has loops of its own.

    Fused reductions along different axes, whose sizes are symbols, end in ``CantSplit`` for GPUs (torch 2.11).
    """
    settings = {"max_fusion_size": 1, "loop_ordering_after_fusion": False, "combo_kernels": False}
    known = {name: value for name, value in settings.items() if hasattr(inductor_config, name)}
    return {**known, f"triton.{_MIXED}": False} if hasattr(inductor_config.triton, _MIXED) else known


def patch_cpp_vec_masked() -> None:
    """Makes Inductor's code for the CPU read no rows behind the last one, in compiles of ours.

    The last vector of a loop is cut off where the loop ends, but not where it reads under a condition: of rows behind
    one that is put before them (``out[1:] = x``, ``F.pad(x, (1, 0))``) it reads as many as a vector has. Where there
    are none it reads at no address: the process dies (torch 2.11; 2.12 to 2.14 if the first call had more rows).
    """
    masked: Any = CppVecKernel.masked

    @contextmanager
    def cut_off(self: Any, mask: Any) -> Iterator[Any]:
        if self.tail_size and isinstance(mask, CppCSEVariable) and mask.is_vec and ours():
            kind, whole = f"decltype({mask})", mask
            cut = f"{kind}::set({kind}(), {mask}, {cexpr_index(self.tail_size)})"
            mask = self.cse.generate(self.compute, cut, dtype=torch.bool)
            mask.is_vec, mask.dependent_itervars = True, whole.dependent_itervars
        with masked(self, mask) as found:
            yield found

    CppVecKernel.masked = cut_off  # type: ignore[method-assign]


def patch_recompute_size_and_body() -> None:
    """Makes Inductor's scheduler remember which reads come after a write in place, in compiles of ours.

    A read of a written buffer has the name of the last write. The code for the CPU computes the loops of a node anew
    where it fuses nodes of different shapes, and forgets those names: the reader may then run before the write (torch
    2.11 to 2.13).
    """
    compute: Any = SchedulerNode.recompute_size_and_body

    @functools.wraps(compute)
    def recompute(self: Any, *args: Any, **kwargs: Any) -> None:
        compute(self, *args, **kwargs)
        if ours():
            self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    SchedulerNode.recompute_size_and_body = recompute  # type: ignore[method-assign]


def patch_grid_2d() -> None:
    """Lets Inductor's launchers of kernels whose blocks go along two axes be called where there are no rows.

    They share out the blocks of an axis among two axes of the grid, and divide by the number of parts: by 0 (torch
    2.11). That a grid is empty is noticed by whoever launches it.
    """
    generate: Any = triton_heuristics.Grid2DWithYZOverflow.generate

    @functools.wraps(generate)
    def with_no_rows(self: Any, *args: Any, **kwargs: Any) -> None:
        generate(self, *args, **kwargs)
        if self.mode == "python" and "==" not in self.y_grid:
            self.y_grid = f"(0 if y_grid_div_ == 0 else {self.y_grid})"

    triton_heuristics.Grid2DWithYZOverflow.generate = with_no_rows  # type: ignore[method-assign]


def patch_codegen_inputs() -> None:
    """Makes Inductor's code read sizes that only the data knows from its inputs, in compiles of ours.

    Torch 2.14 does so only where sizes are asserted; up to 2.13 a backward is handed each as a number.
    """
    read: Any = PythonWrapperCodegen.codegen_inputs

    @functools.wraps(read)
    def codegen_inputs(self: Any) -> None:
        with inductor_config.patch(size_asserts=inductor_config.size_asserts or ours()):  # asserts come elsewhere
            read(self)

    PythonWrapperCodegen.codegen_inputs = codegen_inputs  # type: ignore[method-assign]


def prepare_inductor(for_cpu: bool) -> None:
    """Starts, beside the capture of a graph, what Inductor will wait for once in every process.

    These are hashes of torch's and Triton's files, for the keys of its caches, and a trial of which vector instructions
    the C++ compiler knows: it builds four files in an empty cache folder, and loads each in a process of its own.

    Args:
        for_cpu: Whether there is anything to compile for the CPU.
    """
    _begin("keys", _keys)
    if for_cpu:
        _begin("vectors", lambda: cpu_vec_isa.valid_vec_isa_list())


_preparing: dict[str, threading.Thread] = {}


def _begin(name: str, task: Callable[[], Any]) -> None:
    if name not in _preparing:
        context = contextvars.copy_context()  # settings of torch belong to a thread
        _preparing[name] = threading.Thread(target=context.run, args=(_quietly, task), daemon=True)
        _preparing[name].start()


def _quietly(task: Callable[[], Any]) -> None:
    with suppress(Exception):  # whoever needs the result will run into the same error
        task()


def _keys() -> None:
    codecache.torch_key()
    getattr(codecache, "triton_key", lambda: None)()  # some releases of torch have it elsewhere


def patch_valid_vec_isa_list() -> None:
    """Makes all compiles in this process wait for a trial that runs already: it must not run twice at once."""
    find: Any = cpu_vec_isa.valid_vec_isa_list

    @functools.wraps(find)
    def found() -> Any:
        thread = _preparing.get("vectors")
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        return find()

    found.cache_clear = find.cache_clear  # type: ignore[attr-defined]
    cpu_vec_isa.valid_vec_isa_list = found  # type: ignore[assignment]


def inductor_mode_options(mode: str | None) -> dict[str, Any]:
    """The Inductor settings behind ``torch.compile(mode=...)``."""
    return dict(torch._inductor.list_mode_options(mode, True)) if mode not in (None, "default") else {}


def inductor_option_names() -> set[str]:
    """Names of Inductor's own settings."""
    return set(torch._inductor.config.get_config_copy())
