"""Inductor: compiles with it, its settings, patches of it, and the work that it does once in each process."""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._guards import TracingContext
from torch._inductor import codecache, cpu_vec_isa, custom_graph_pass, ir
from torch._inductor import config as inductor_config
from torch._inductor.codegen.cpp import CppVecKernel
from torch._inductor.codegen.cpp_utils import CppCSEVariable, cexpr_index
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.lowering import register_lowering
from torch._inductor.runtime import triton_heuristics
from torch._inductor.scheduler import SchedulerNode
from torch._inductor.virtualized import V, ops

from gnncompile._compat.autograd import OF_NO_ROWS
from gnncompile._compat.bounds import REFUSING
from gnncompile._compat.compiles import compiling
from gnncompile._compat.cpu_gradients import WHOLE_ON_CPUS
from gnncompile._compat.cuda import current_device, prepare_triton
from gnncompile._compat.inductor_choices import set_choices
from gnncompile._compat.numbers import EXACT, EXACT_SETTINGS
from gnncompile._compat.transforms import mend_backward
from gnncompile.device import available_cores, device_of

__all__ = [
    "OwnPass",
    "V",
    "compile_inductor",
    "inductor_decompositions",
    "inductor_mode_options",
    "inductor_option_names",
    "ir",
    "ops",
    "patch_codegen_inputs",
    "patch_cpp_vec_masked",
    "patch_grid_2d",
    "prepare_inductor",
    "register_lowering",
    "settings_for",
    "unfused_settings",
]


class OwnPass(CustomGraphPass):
    """A post-grad pass of gnncompile's.

    Its class tells gnncompile's compiles from other compiles, also when a backward is compiled later.

    Attributes:
        keeps_memory: Whether large buffers on a CPU live in memory that stays.
    """

    keeps_memory: bool = False


def ours() -> bool:
    """Whether Inductor is compiling for gnncompile now."""
    return isinstance(inductor_config.post_grad_custom_pre_pass, OwnPass)


def compile_inductor(gm: fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Compiles a graph with Inductor. The result must be called where Dynamo is off already."""
    _wait_for("vectors")
    _report_symbols()
    patches = {**EXACT_SETTINGS, "_pre_fusion_custom_pass": _OwnNodes(), **settings_for(inputs), **options}
    decompositions = inductor_decompositions()
    with _donations(patches, inputs):
        compiled: Any = compile_fx(
            gm, list(inputs), _compile_inner, config_patches=patches, decompositions=decompositions
        )
    mend_backward(compiled)
    # The wrapper that turns Dynamo off costs as much as a launch, so it is removed.
    return getattr(compiled, "_torchdynamo_orig_callable", compiled)  # type: ignore[no-any-return]


def _donations(patches: dict[str, Any], inputs: Sequence[Any]) -> AbstractContextManager[object]:
    """Turns off that a backward writes gradients over what its forward saved, where that lives in memory that stays.

    The memory is used again all the same, since it is free when the backward has read it.
    """
    own = patches.get("post_grad_custom_pre_pass")
    devices = [given.device for given in inputs if isinstance(given, torch.Tensor)]
    in_cpp = all(device_of(device).is_cpp_in_inductor for device in devices)
    if isinstance(own, OwnPass) and own.keeps_memory and in_cpp:
        return functorch_config.patch(donated_buffer=False)  # type: ignore[no-any-return]
    return nullcontext()


def _report_symbols() -> None:
    """Makes Inductor report the strides of the current graph's results as symbols.

    Up to torch 2.14, Inductor would report the strides of the first call. The backward is compiled for them wherever
    torch can't tell that they are the expected ones. With ``backed_size_oblivious``, torch can't tell this for any
    symbol, so gradients for other sizes would be wrong.
    """
    environment: Any = TracingContext.get().fake_mode.shape_env  # type: ignore[union-attr]
    if compiling.patches is not None and hasattr(environment, "evaluate_symexpr"):
        environment.evaluate_symexpr = environment.deserialize_symexpr  # of this object alone, which is one graph's


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """Returns the decompositions that Inductor applies before it compiles, in gnncompile's compiles."""
    theirs = select_decomp_table()
    refusing = {op: ours for op, ours in REFUSING.items() if op in theirs}
    return _Decompositions({**theirs, **OF_NO_ROWS, **WHOLE_ON_CPUS, **EXACT, **refusing})


class _Decompositions(dict[Any, Callable[..., Any]]):
    """A table of decompositions that is pickled as the call that makes it.

    Torch 2.13 makes the table a part of a compiled graph's key in the cache on disk. The table holds C++ functions,
    which can't be pickled. Without this class, no graph would be cached.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return inductor_decompositions, ()


_MIXED = "mix_order_reduction"


def settings_for(inputs: Sequence[Any]) -> dict[str, Any]:
    """Returns the Inductor settings that a graph with these inputs needs.

    Inductor may sum rows and columns in one Triton kernel, which sums columns in float32 for every dtype (torch 2.11 to
    2.13). In float64 the kernel does not even compile, and the graph would be captured anew for fewer sizes.
    """
    doubles = any(isinstance(given, torch.Tensor) and given.dtype is torch.float64 for given in inputs)
    return {f"triton.{_MIXED}": False} if doubles and hasattr(inductor_config.triton, _MIXED) else {}


def _compile_inner(*args: Any, **kwargs: Any) -> Any:
    """Compiles a forward or a backward with choices of ours. Inductor takes its choices from an object."""
    with set_choices():
        return compile_fx_inner(*args, **kwargs)


def unfused_settings() -> dict[str, Any]:
    """Returns the Inductor settings that give every operation its own loops.

    Fused reductions along different axes with symbolic sizes end in ``CantSplit`` for GPUs (torch 2.11).
    """
    settings = {"max_fusion_size": 1, "loop_ordering_after_fusion": False, "combo_kernels": False}
    known = {name: value for name, value in settings.items() if hasattr(inductor_config, name)}
    return {**known, f"triton.{_MIXED}": False} if hasattr(inductor_config.triton, _MIXED) else known


def patch_cpp_vec_masked() -> None:
    """Makes Inductor's CPU code read no rows after the last one, in gnncompile's compiles.

    The last vector of a loop is cut off at the loop's end, but a read under a condition is not. For rows after a
    prepended row (``out[1:] = x``, ``F.pad(x, (1, 0))``), the code reads a full vector. With no rows, the code reads at
    an invalid address and the process dies (torch 2.11; torch 2.12 to 2.14 if the first call had more rows).
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


class _OwnNode(SchedulerNode):
    """A node that remembers which of its reads come after an in-place write.

    A read of a written buffer carries the name of the last write. If the CPU backend fuses nodes of different shapes,
    it computes the loops of a node anew and loses these names. The reader may then run before the write (torch 2.11 to
    2.13).
    """

    def recompute_size_and_body(self, *args: Any, **kwargs: Any) -> None:
        super().recompute_size_and_body(*args, **kwargs)
        self.set_read_writes(self.read_writes.rename(self.mutation_renames))


class _OwnNodes(getattr(custom_graph_pass, "CustomSchedulerPass", CustomGraphPass)):  # type: ignore[misc]
    """A pass before fusion that makes the scheduler's nodes ours."""

    def __call__(self, nodes: Any) -> Any:
        for node in nodes:
            if type(node) is SchedulerNode:
                node.__class__ = _OwnNode
        return nodes

    def uuid(self) -> str:
        return __name__  # the key of the cache has a hash of our sources already


def patch_grid_2d() -> None:
    """Lets Inductor launch kernels whose blocks go along two axes where there are no rows.

    The launcher divides the blocks of an axis among two axes of the grid. The number of parts is then 0, and the
    launcher divides by it (torch 2.11). The caller of the launcher notices an empty grid.
    """
    generate: Any = triton_heuristics.Grid2DWithYZOverflow.generate

    @functools.wraps(generate)
    def with_no_rows(self: Any, *args: Any, **kwargs: Any) -> None:
        generate(self, *args, **kwargs)
        if "==" in self.y_grid:
            return
        if self.mode == "python":
            self.y_grid = f"(0 if y_grid_div_ == 0 else {self.y_grid})"
        elif self.mode == "cpp":  # in a package, the process would die of the division
            self.y_grid = f"(y_grid_div_ == 0 ? 0 : {self.y_grid})"

    triton_heuristics.Grid2DWithYZOverflow.generate = with_no_rows  # type: ignore[method-assign]


def patch_codegen_inputs() -> None:
    """Makes Inductor's code read data-dependent sizes from its inputs, in gnncompile's compiles.

    Torch 2.14 reads them only if sizes are asserted. Up to torch 2.13, a backward gets each such size as a number.
    """
    read: Any = PythonWrapperCodegen.codegen_inputs

    @functools.wraps(read)
    def codegen_inputs(self: Any) -> None:
        with inductor_config.patch(size_asserts=inductor_config.size_asserts or ours()):  # asserts come elsewhere
            read(self)

    PythonWrapperCodegen.codegen_inputs = codegen_inputs  # type: ignore[method-assign]


def prepare_inductor(for_cpu: bool, for_gpu: bool) -> None:
    """Starts, during the capture of a graph, the work that Inductor and Triton do once in every process.

    The work is to hash torch's and Triton's files, for the keys of their caches. For the CPU, it is also to test which
    vector instructions the C++ compiler knows. With an empty cache folder, the test builds four files and loads each in
    its own process.

    Args:
        for_cpu: Whether anything is compiled for the CPU.
        for_gpu: Whether Triton kernels are compiled for the current GPU.
    """
    if for_gpu:
        _begin("triton", functools.partial(_prepare_triton, current_device()))
    _begin("keys", _keys)
    if for_cpu:
        _begin("vectors", _test_vectors)


_preparing: dict[str, threading.Thread] = {}


def _begin(name: str, task: Callable[[], Any]) -> None:
    if name not in _preparing:
        _preparing[name] = _in_thread(task)


def _in_thread(task: Callable[[], Any]) -> threading.Thread:
    context = contextvars.copy_context()  # torch's settings are per thread
    thread = threading.Thread(target=context.run, args=(_quietly, task), daemon=True)
    thread.start()
    return thread


def _quietly(task: Callable[[], Any]) -> None:
    with suppress(Exception):  # whoever needs the result will run into the same error
        task()


def _test_vectors() -> None:
    """Tests the sets of vector instructions at the same time, as many as there are cores.

    Inductor's own list, which would test one after the other, then finds the results.
    """
    known = set(cpu_vec_isa.x86_isa_checker())
    sets = [one for one in cpu_vec_isa.supported_vec_isa_list if known.issuperset(str(one).split())]
    cores = available_cores()
    shares = [sets[k::cores] for k in range(min(cores, len(sets)))]
    for thread in [_in_thread(functools.partial(list, map(bool, share))) for share in shares]:
        thread.join()
    cpu_vec_isa.valid_vec_isa_list()


def _prepare_triton(device: int) -> None:
    with torch.cuda.device(device):  # each thread has its own current GPU
        prepare_triton()


def _keys() -> None:
    codecache.torch_key()
    _wait_for("triton")  # it hashes Triton's files too
    getattr(codecache, "triton_key", lambda: None)()  # some releases of torch have it elsewhere


def _wait_for(name: str) -> None:
    """Waits for work that has begun, which would else be done a second time in this thread."""
    thread = _preparing.get(name)
    if thread is not None:
        thread.join()


def inductor_mode_options(mode: str | None) -> dict[str, Any]:
    """Returns the Inductor settings of ``torch.compile(mode=...)``."""
    return dict(torch._inductor.list_mode_options(mode, True)) if mode not in (None, "default") else {}


def inductor_option_names() -> set[str]:
    """Returns the names of Inductor's own settings."""
    return set(torch._inductor.config.get_config_copy())
