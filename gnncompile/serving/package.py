"""``gnncompile.package``: writes a trained model and its kernels as one file, for servers without Python."""

from __future__ import annotations

import inspect
import json
import os
import platform
import re
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ShapesCollection, export
from torch.utils import _pytree as pytree

from gnncompile._compat import aoti
from gnncompile._compat.compiles import symbolic_trace
from gnncompile.capture.backend import AfterDifferentiation, sources_hash
from gnncompile.capture.compile import callable_of
from gnncompile.codegen.cpp.objects import flags_text
from gnncompile.device import device_of
from gnncompile.exc import ArgumentError, ArgumentTypeError
from gnncompile.ops import packaged, packaged_triton
from gnncompile.options import Options, resolve
from gnncompile.serving import bound_indices, fold_constants, fuse_rows
from gnncompile.serving.kept_layout import (
    LAYOUT,
    WITH_LAYOUT,
    Layout,
    WithLayout,
    refuse_layout_made_anew,
    refuse_to_keep,
    sealed_inputs,
)
from gnncompile.serving.program import Captured, Program, capture, dynamic_axes, dynamic_dimensions, layout_of, widths
from gnncompile.serving.read_layout import guarded, walked
from gnncompile.serving.refusals import refuse_conditions, refuse_operations, refuse_training

MODEL = "model"
"""The name of the model in a package."""

_METADATA = re.compile(rf"/{MODEL}/[^/]*wrapper_metadata\.json$")


def package(
    model: nn.Module,
    example_inputs: Sequence[Any],
    path: str | os.PathLike[str],
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    keep_layout: bool = False,
    cpu: str = "native",
) -> str:
    """Writes a trained model as one file, which a server loads without Python, gnncompile, PyG or a compiler.

    The file is a package of AOTInductor. It holds the weights, the kernels of gnncompile, and the code that sorts the
    edges. It serves any number of nodes, edges and graphs, none included. A process loads it with
    ``torch._inductor.aoti_load_package(path)``, a C++ program with ``torch::inductor::AOTIModelPackageLoader``. Each
    call checks its inputs, and raises an error in words for a wrong dtype, shape, device or index.

    The code is compiled for this release of torch, and for the CPU of this machine or the one that `cpu` states. On
    Linux with glibc 2.33 or newer, a server whose CPU lacks an instruction refuses the file in words. If the model is
    on an NVIDIA GPU, the file serves on GPUs of the same compute capability.

    Args:
        model: The model, in evaluation mode, on a CPU or a GPU. It may be a compiled one. Its forward takes and returns
            tensors, in tuples, lists or dicts.
        example_inputs: The arguments of one call, tensors such as ``x [num_nodes, channels]`` and ``edge_index [2,
            num_edges]``, on the model's device. The numbers of rows may differ in later calls; the numbers of features
            and dtypes may not. On a GPU, kernels are chosen by the example's sizes: pass a usual one.
        path: The file to write; its name ends with ``.pt2``.
        example_kwargs: The arguments of the call that are given by name.
        options: gnncompile's own (:class:`gnncompile.options.Options`) and Inductor's settings.
        keep_layout: Whether the file also serves graphs that stay the same, whose edges are sorted once. It then holds
            two more models, "layout" and "with_layout". The first takes the model's arguments, and returns the layout
            of their graph, a list of tensors. The second takes this list before the model's arguments, and refuses the
            layout of another graph. Both are loaded by name: ``load_package(path, "layout")`` with
            ``from torch._inductor.package import load_package``.
            Such a file takes about three times as long to write.
        cpu: The CPU of the server: "native" for one like this machine's, "x86-64-v3" (AVX2) or "x86-64-v4" (AVX512)
            for any one with these instructions. The last two need torch 2.13.

    Returns:
        The path of the file.

    Raises:
        CaptureError: The model has a graph break, does not run with these arguments, draws random numbers, decides by a
            size, writes to an input, or needs an operation of another library.
        TypeError: `model` is no module, or an argument or a result of the model is no tensor.
        ValueError: The model is in training mode, or has more than one graph; the model and the inputs are not on one
            CPU or GPU; one tensor is given twice; there is no layout to keep; `cpu` is unknown; or `path` has another
            ending.
    """
    _check_types(model, example_inputs)
    path = os.fspath(path)
    if not path.endswith(".pt2"):
        raise ArgumentError(f"path: found {path!r}, expected a name that ends with .pt2.")
    _check_cpu(cpu)
    program = callable_of(model)
    target: Any = model if program is None else program.target
    args, kwargs = tuple(example_inputs), dict(example_kwargs or {})
    names = input_names(target, args, kwargs)
    place = _check_inputs(target, names, pytree.tree_leaves((args, kwargs)))
    refuse_training(target)
    ours, theirs = resolve(None, options)
    captured = capture(target, args, kwargs, options or {})
    structure = [] if captured.structure is None else [captured.structure.module.graph]
    # A column that is read by its number asks for as many columns as the example has.
    fixed = widths(captured, args, kwargs).intersection(one.symbol for one in captured.conditions if one.symbol)
    refuse_conditions(one for one in captured.conditions if one.symbol not in fixed)
    kind = KINDS[place.type]
    on_gpu = not device_of(place).is_cpp_in_inductor
    refuse_operations([*structure, captured.rest.graph], kind.held)
    call = _Call(captured, target, args, kwargs, names, fixed)
    traced = {MODEL: call.plain(), **(call.with_kept_layout(compares=on_gpu) if keep_layout else {})}
    for one in traced.values():
        bound_indices.run(one.program.graph, checks_all=kind.checks_all_indices)
    settings = _settings(ours, theirs, place)
    rewrites = kind.rewrites(ours)
    metadata = _metadata(target, names, pytree.tree_leaves((args, kwargs)), traced, cpu, place)
    files = {
        name: aoti.compile_program(
            one.program,
            one.names,
            settings,
            metadata,
            rewrites,
            cpu,
            one.sealed,
            place.type,
        )
        for name, one in traced.items()
    }
    aoti.write_package(path, files)
    return path


def package_info(path: str | os.PathLike[str]) -> dict[str, str]:
    """Returns what a package says of itself, without loading it: versions, flags, and its inputs.

    All bytes of the file are compared with their checksums, which torch's loader does not do. A server without
    gnncompile compares them with ``zipfile.ZipFile(path).testzip()``, which must return None.

    Args:
        path: A file that :func:`package` wrote.

    Raises:
        ValueError: The file is no package, or is damaged.
        OSError: The file can't be read.
    """
    where = os.fspath(path)
    try:
        with zipfile.ZipFile(path) as archive:
            found = [name for name in archive.namelist() if _METADATA.search(name)]
            told = json.loads(archive.read(found[0]))
            damaged = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, IndexError, ValueError, EOFError, RuntimeError) as error:
        raise ArgumentError(f"path: {where} is no package ({error}). Write one with package().") from error
    if damaged is not None:
        raise ArgumentError(f"path: {where} is damaged: {damaged} has another checksum. Copy or write the file again.")
    return dict(told)


def _check_types(model: Any, example_inputs: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            f"model: found {type(model).__name__}, expected an nn.Module, whose weights go into the file."
        )
    if isinstance(example_inputs, Tensor):
        raise ArgumentTypeError(
            "example_inputs: found a tensor, expected the arguments of one call, as in (x, edge_index)."
        )


def _check_cpu(cpu: str) -> None:
    if cpu == "native":
        return
    if cpu not in aoti.VECTOR_BITS:
        raise ArgumentError(f'cpu: found {cpu!r}, expected "native" or one of {", ".join(aoti.VECTOR_BITS)}.')
    if platform.machine() not in ("x86_64", "AMD64"):
        raise ArgumentError(f"cpu: found {cpu} on a machine of kind {platform.machine()}. Package the model on x86-64.")
    if not aoti.can_choose_cpus():
        raise ArgumentError(f"cpu: found {cpu}, which needs torch 2.13; this is torch {torch.__version__}.")


def _check_inputs(model: nn.Module, names: list[str], leaves: list[Any]) -> torch.device:
    """Returns the device of a model and its inputs.

    Raises:
        ArgumentTypeError: An input is no dense tensor.
        ArgumentError: One tensor is given twice, or the tensors are on several devices or on one without packages.
    """
    for name, value in zip(names, leaves, strict=True):
        if not isinstance(value, Tensor):
            raise ArgumentTypeError(
                f"example_inputs: {name} is {type(value).__name__}, expected a tensor. A package takes tensors alone: "
                "make numbers attributes of the model, and pass the tensors of data objects."
            )
        if value.layout is not torch.strided or value.is_nested:
            raise ArgumentTypeError(
                f"example_inputs: {name} has layout {value.layout}, expected a dense tensor. Pass edge_index and "
                "edge_weight in place of a sparse matrix."
            )
    for at, (name, value) in enumerate(zip(names, leaves, strict=True)):
        same = [other for other, one in zip(names[:at], leaves, strict=False) if one is value]
        if same:
            raise ArgumentError(
                f"example_inputs: {name} is the same tensor as {same[0]}, expected another: a package would take one "
                "for the other. Pass a clone()."
            )
    parts = [*model.named_parameters(), *model.named_buffers()]
    placed = [*((f"the model's {name}", value) for name, value in parts), *zip(names, leaves, strict=True)]
    first, place = (placed[0][0], placed[0][1].device) if placed else ("", torch.device("cpu"))
    for what, value in placed:
        if value.device.type not in KINDS:
            raise ArgumentError(
                f"model: {what} is on {value.device}, expected a CPU or a GPU, for which packages are made. Pass "
                "model.cpu() and inputs on the CPU."
            )
        if value.device != place:
            raise ArgumentError(
                f"model: {what} is on {value.device}, expected {place} like {first}. Move the model and all inputs to "
                "one device."
            )
    return place


@dataclass(frozen=True)
class _Kind:
    """What packages for a type of device hold.

    Attributes:
        rewrites: Returns the rewrites of traced programs for these options.
        held: All our ops that a package can hold.
        checks_all_indices: Whether a wrong index ends the process in torch's kernels too, not only in Inductor's.
    """

    rewrites: Callable[[Options], aoti.Rewrites]
    held: Collection[Any]
    checks_all_indices: bool


def _rewrites_for_cpus(options: Options) -> aoti.Rewrites:
    return aoti.Rewrites(packaged.DECOMPOSITIONS)


def _rewrites_for_gpus(options: Options) -> aoti.Rewrites:
    fuse = partial(fuse_rows.run, options=options)
    return aoti.Rewrites(packaged_triton.DECOMPOSITIONS, fuse, fold_constants.run)


KINDS = {
    "cpu": _Kind(_rewrites_for_cpus, packaged.HELD, checks_all_indices=False),
    "cuda": _Kind(_rewrites_for_gpus, packaged_triton.HELD, checks_all_indices=True),
}
"""The types of devices for which packages are made."""


@dataclass
class _Traced:
    """A model of a package, as ``torch.export`` traced it.

    Attributes:
        program: The traced model.
        names: The name of each input.
        sealed: The inputs whose seal each call compares, or None.
    """

    program: ExportedProgram
    names: list[str]
    sealed: aoti.Sealed | None = None


class _Call:
    """A captured call of a model, which is traced with symbols for all numbers of rows.

    Args:
        captured: The captured model.
        model: The model.
        args: The arguments of the call.
        kwargs: Its arguments by name.
        names: The name of each tensor among them.
        fixed: The symbols of sizes that are the example's in each call.
    """

    def __init__(
        self,
        captured: Captured,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        names: list[str],
        fixed: Collection[str] = (),
    ) -> None:
        self.captured, self.model, self.args, self.kwargs, self.names = captured, model, args, kwargs, names
        axes = dynamic_axes(captured, args, kwargs, fixed)
        self.axes = list(zip(pytree.tree_leaves((args, kwargs)), axes, strict=True))

    def plain(self) -> _Traced:
        """Traces the model as it is called."""
        return _Traced(self._export(self._program(), self.args, self.axes), self.names)

    def with_kept_layout(self, compares: bool) -> dict[str, _Traced]:
        """Traces the model that returns a layout, and the model that takes it.

        Args:
            compares: Whether the second model compares the seal itself, as on a GPU. Its layout then has lists of hubs.
        """
        program = self._program()
        refuse_to_keep(program)
        given, fakes = layout_of(self.captured)
        walks = walked(self.captured) if compares else []
        axes = [(), *(dynamic_dimensions(one) for one in fakes), *[(0,)] * (2 * len(walks))]
        layout = [given[0].new_zeros((1,), dtype=torch.int64), *given]
        for _ in walks:  # some hubs and pieces: the numbers of those of the example would count as fixed
            layout += [given[0].new_zeros((2, 3), dtype=torch.int32), given[0].new_zeros((5,), dtype=torch.int32)]
        names = [f"layout[{at}]" for at in range(len(layout))]
        maker = self._export(Layout(self._program(only_structure=True), walks), self.args, self.axes)
        args, all_axes = (layout, *self.args), [*zip(layout, axes, strict=True), *self.axes]
        taker = self._export(WithLayout(program, guarded(self.captured) if compares else None, walks), args, all_axes)
        refuse_layout_made_anew(taker)
        sealed = None if compares else sealed_inputs(program, len(given))
        return {LAYOUT: _Traced(maker, self.names), WITH_LAYOUT: _Traced(taker, [*names, *self.names], sealed)}

    def _program(self, only_structure: bool = False) -> Program:
        return Program(self.captured, self.model, self.args, self.kwargs, only_structure)

    def _export(self, module: nn.Module, args: tuple[Any, ...], axes: Iterable[Any]) -> ExportedProgram:
        shapes: Any = ShapesCollection()
        for leaf, dynamic in axes:
            if dynamic:
                shapes[leaf] = dict.fromkeys(dynamic, Dim.DYNAMIC)
        with torch.no_grad(), symbolic_trace():
            return export(module.eval(), args, self.kwargs, dynamic_shapes=shapes, strict=False)


def _settings(ours: Options, theirs: dict[str, Any], place: torch.device) -> dict[str, Any]:
    """Returns Inductor's settings. Products are launches on a GPU before Inductor sees them, else the library's."""
    is_cpp = device_of(place).is_cpp_in_inductor
    ours = replace(ours, products=False, epilogues=ours.epilogues and is_cpp)
    return {"post_grad_custom_pre_pass": AfterDifferentiation(ours), "shape_padding": False, **theirs}


def _metadata(
    model: nn.Module, names: list[str], leaves: list[Any], models: Iterable[str], cpu: str, place: torch.device
) -> dict[str, str]:
    inputs = {
        name: f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
        for name, leaf in zip(names, leaves, strict=True)
    }
    return {
        "made_by": "gnncompile",
        "gnncompile_sources": sources_hash(),
        "torch": torch.__version__,
        "model": type(model).__qualname__,
        "inputs": json.dumps(inputs),
        "models": ", ".join(models),
        "compiler": flags_text(cpu),
        "device": place.type,
        **({} if device_of(place).is_cpp_in_inductor else card(place)),
    }


def card(place: torch.device) -> dict[str, str]:
    """Returns the name and the compute capability of a GPU, and the compiler of kernels."""
    import triton

    major, minor = torch.cuda.get_device_capability(place)
    name = torch.cuda.get_device_name(place)
    return {"card": name, "compute_capability": f"{major}.{minor}", "triton": triton.__version__}


def input_names(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Returns the name of each tensor of a call, as the model's ``forward`` names it."""
    parameters = inspect.signature(model.forward).parameters.values()
    names = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    rest = next((one.name for one in parameters if one.kind is one.VAR_POSITIONAL), "args")
    names += [f"{rest}[{at}]" for at in range(len(args))]
    pairs: Any = pytree.tree_flatten_with_path((args, kwargs))[0]
    found = []
    for (side, first, *rest), _value in pairs:
        name = str(first.key) if side.idx else names[first.idx]
        found.append(f"{name}{pytree.keystr(tuple(rest))}")
    return found
