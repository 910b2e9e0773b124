"""The table of gnncompile's patches to torch: the symbols, the reason, and when a patch can be removed.

All patches are applied once, at the first compile (:func:`apply_patches`). No patch changes other compiles: each asks
whether the compile is gnncompile's. A test compares this table with the differences in torch after a compile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gnncompile._compat.aoti import patch_vector_sets
from gnncompile._compat.aoti_checks import patch_input_checks, patch_return
from gnncompile._compat.breaks import patch_log_graph_break
from gnncompile._compat.compiles import patch_remove_tensorify_graphargs
from gnncompile._compat.dynamo import patch_codegen_update_mutated
from gnncompile._compat.inductor import (
    patch_codegen_inputs,
    patch_cpp_vec_masked,
    patch_grid_2d,
)
from gnncompile._compat.inductor_guards import (
    patch_dynamic_reshape_indexer,
    patch_get_fill_order,
)
from gnncompile._compat.kept_memory import patch_buffer_allocation
from gnncompile._compat.random_draws import patch_random_draws
from gnncompile._compat.recovery import patch_guard_create
from gnncompile._compat.shapes import (
    patch_automatic_dynamic,
    patch_has_hint,
    patch_slice,
)

_UP_TO_HERE = "2.11 to 2.14"
_ALL = "all"


@dataclass(frozen=True)
class Patch:
    """A replacement in torch.

    Attributes:
        symbols: The replaced symbols, as ``module:name`` or ``module:Class.name``.
        torch: The releases of torch that need the patch.
        why: The problem without the patch, or the feature that the patch makes possible.
        until: How to notice that the patch can be removed.
        apply: Replaces the symbols; None if :mod:`gnncompile.substitutes.install`, which knows the replacements, does
            so.
    """

    symbols: tuple[str, ...]
    torch: str
    why: str
    until: str
    apply: Callable[[], None] | None = None


DYNAMO = (
    Patch(
        ("torch._guards:Guard.create",),
        _ALL,
        "An object whose `__eq__` raises is guarded by identity; arrays of NumPy are guarded by their type.",
        "tests/e2e/test_contract.py passes without it.",
        patch_guard_create,
    ),
    Patch(
        ("torch._dynamo.side_effects:SideEffects.codegen_update_mutated",),
        _ALL,
        "A frame that sets an attribute and deletes it again is replayed as the deletion alone.",
        "tests/e2e/test_contract.py passes without it.",
        patch_codegen_update_mutated,
    ),
    Patch(
        ("torch._dynamo.symbolic_convert:InstructionTranslatorBase.log_graph_break",),
        _ALL,
        "A report has the reason and the user's line of each graph break.",
        "tests/e2e/test_breaks.py passes without it: Dynamo hands both to backends.",
        patch_log_graph_break,
    ),
    Patch(
        ("torch._dynamo.output_graph:OutputGraph.remove_tensorify_specialized_graphargs",),
        _UP_TO_HERE,
        "A write to a float64 scalar on a CPU is dropped where only the number is read.",
        "tests/e2e/test_user_code.py passes without it.",
        patch_remove_tensorify_graphargs,
    ),
    Patch(
        (
            "torch._dynamo.variables.user_defined:call_random_fn",
            "torch._dynamo.variables.misc:RandomVariable.call_method",
            "torch._dynamo.variables.misc:RandomClassVariable.call_function",
        ),
        _ALL,
        "A number of Python's `random` is traced as a float32 tensor and passed as float64; states are constants.",
        "tests/e2e/test_random_draws.py passes without it.",
        patch_random_draws,
    ),
    Patch(
        ("torch._dynamo.variables.builder:_automatic_dynamic",),
        _ALL,
        "Widths of features are numbers: code for symbolic widths is slower, and does not compile for GPUs (2.11).",
        "mark_static is a setting of a compile.",
        patch_automatic_dynamic,
    ),
)
"""Patches of Dynamo's capture."""

SIZES = (
    Patch(
        ("torch.fx.experimental.sym_node:SymNode.has_hint", "torch._subclasses.fake_impls:_compute_stride"),
        _ALL,
        "`backed_size_oblivious` does not reach strides: sizes of 1 are guarded.",
        "tests/e2e/test_no_guard.py passes without it.",
        patch_has_hint,
    ),
    Patch(
        ("torch._subclasses.fake_impls:op_implementations_dict[aten.slice.Tensor]",),
        "2.11",
        "With `backed_size_oblivious` the size of a slice is a new symbol, of which torch's passes lose track.",
        "tests/e2e/test_symbolic_sizes.py passes without it.",
        patch_slice,
    ),
)
"""Patches of torch's assumptions about symbolic sizes."""

INDUCTOR = (
    Patch(
        ("torch._inductor.ir:get_fill_order",),
        _ALL,
        "Inductor orders strides by guards, though the order is but a wish: one node is captured on its own.",
        "tests/unit/test_inductor_guards.py passes without it.",
        patch_get_fill_order,
    ),
    Patch(
        ("torch._inductor.ir:View.dynamic_reshape_indexer",),
        _ALL,
        "Inductor makes guards of sizes that happen to be equal in the first call, and can't reshape no rows.",
        "tests/unit/test_inductor_guards.py passes without it.",
        patch_dynamic_reshape_indexer,
    ),
    Patch(
        ("torch._inductor.runtime.triton_heuristics:Grid2DWithYZOverflow.generate",),
        "2.11",
        "A launcher of blocks along two axes divides by 0 where there are no rows.",
        "tests/e2e/test_symbolic_sizes.py passes without it on a GPU.",
        patch_grid_2d,
    ),
    Patch(
        ("torch._inductor.codegen.cpp:CppVecKernel.masked",),
        _UP_TO_HERE,
        "A vector reads after the last row where it reads under a condition: with no rows the process dies.",
        "The C++ that Inductor writes cuts a load under a condition off at the last row; a test can pass by chance.",
        patch_cpp_vec_masked,
    ),
    Patch(
        ("torch._inductor.codegen.wrapper:PythonWrapperCodegen.codegen_inputs",),
        _UP_TO_HERE,
        "Sizes that only the data knows are read from inputs only where sizes are asserted.",
        "Torch 2.14 reads them.",
        patch_codegen_inputs,
    ),
    Patch(
        ("torch._inductor.codegen.wrapper:PythonWrapperCodegen.make_buffer_allocation",),
        _ALL,
        "Large buffers on a CPU live in memory that stays, since new memory costs as much time as kernels.",
        "Torch has an allocator for CPUs that keeps memory.",
        patch_buffer_allocation,
    ),
    Patch(
        ("torch._inductor.codegen.cpp_wrapper_cpu:CppWrapperCpu.generate_input_output_runtime_checks",),
        _ALL,
        "A package checks all inputs in every call, and says in words what is wrong.",
        "AOTInductor has a setting for such checks.",
        patch_input_checks,
    ),
    Patch(
        ("torch._inductor.codegen.cpp_wrapper_cpu:CppWrapperCpu.generate_return",),
        _ALL,
        "A package for GPUs tells that an index is out of range when its results are complete.",
        "AOTInductor reads conditions on data without a wait in the middle of a call.",
        patch_return,
    ),
    Patch(
        ("torch._inductor.cpu_vec_isa:valid_vec_isa_list",),
        _ALL,
        "A package for x86-64-v4 uses no instruction of a higher level that the packaging machine has.",
        "Inductor chooses vector instructions by `cpp.march`.",
        patch_vector_sets,
    ),
)
"""Patches of the code that Inductor writes."""

SUBSTITUTION = (
    Patch(
        (
            "torch._dynamo.variables.functions:UserFunctionVariable.call_function",
            "torch._dynamo.variables.functions:UserMethodVariable.call_function",
            "torch._dynamo.variables.user_defined:UserDefinedClassVariable.call_function",
            "torch._dynamo.variables.tensor:TensorVariable.var_getattr",
            "torch._dynamo.variables.tensor:TensorVariable.call_method",
        ),
        _ALL,
        "Methods of PyG, and tensors that stand for sparse matrices, are traced as gnncompile has them.",
        "substitute_in_graph takes methods, constructors and attributes.",
    ),
    Patch(
        (
            "torch.fx.experimental.symbolic_shapes:ShapeEnv.evaluate_expr",
            "torch._dynamo.variables.tensor:SymNodeVariable.create",
            "torch._dynamo.variables.tensor:SymNodeVariable.evaluate_expr",
            "torch._dynamo.symbolic_convert:guard_bool",
        ),
        _ALL,
        "A question of a model whether something is empty is answered without a guard: it is captured apart.",
        "Dynamo asks a backend before it guards on 0.",
    ),
    Patch(
        (
            "torch._dynamo.variables.torch:TorchInGraphFunctionVariable._get_handlers()[torch.autograd.grad]",
            "torch._dynamo.output_graph:OutputGraph._check_requires_grad_intermediate_outputs",
        ),
        "2.11 and later",
        "`torch.autograd.grad` of the model stands in the graph, and passes write it out.",
        "trace_autograd_ops lets results leave whose graph is not freed.",
    ),
)
"""Patches of calls and attributes that Dynamo traces.

:mod:`gnncompile.substitutes.install`, which knows the substitutes, applies them.
"""

PATCHES = (*DYNAMO, *SIZES, *INDUCTOR, *SUBSTITUTION)


def apply_patches() -> None:
    """Applies all patches that need no substitutes."""
    for patch in PATCHES:
        if patch.apply is not None:
            patch.apply()
