"""``gnncompile.package``: writes a trained model and its kernels as one file, for servers without Python."""

from __future__ import annotations

import inspect
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
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
from gnncompile.ops import packaged
from gnncompile.options import Options, resolve
from gnncompile.serving.program import Captured, Program, capture, dynamic_axes
from gnncompile.serving.refusals import refuse_conditions, refuse_operations, refuse_training

MODEL = "model"
"""The name of the model in a package."""


def package(
    model: nn.Module,
    example_inputs: Sequence[Any],
    path: str | os.PathLike[str],
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    options: dict[str, Any] | None = None,
) -> str:
    """Writes a trained model as one file, which a server loads without Python, gnncompile, PyG or a compiler.

    The file is a package of AOTInductor. It holds the weights, the kernels of gnncompile, and the code that sorts the
    edges. It serves any number of nodes, edges and graphs, none included. A process loads it with
    ``torch._inductor.aoti_load_package(path)``, a C++ program with ``torch::inductor::AOTIModelPackageLoader``. Each
    call checks its inputs, and raises an error in words for a wrong dtype, shape, device or index.

    The code is compiled for the CPU of this machine (``-march=native``), and for this release of torch.

    Args:
        model: The model, in evaluation mode, on a CPU. It may be a compiled one. Its forward takes and returns
            tensors, in tuples, lists or dicts.
        example_inputs: The arguments of one call, tensors such as ``x [num_nodes, channels]`` and ``edge_index [2,
            num_edges]``. The numbers of rows may differ in later calls; the numbers of features and dtypes may not.
        path: The file to write; its name ends with ``.pt2``.
        example_kwargs: The arguments of the call that are given by name.
        options: gnncompile's own (:class:`gnncompile.options.Options`) and Inductor's settings.

    Returns:
        The path of the file.

    Raises:
        CaptureError: The model draws random numbers, decides by a size, writes to an input, or needs an operation of
            another library.
        TypeError: `model` is no module, or an argument or a result of the model is no tensor.
        ValueError: The model is in training mode, is not on a CPU, or has more than one graph; one tensor is given
            twice; or `path` has another ending.
    """
    _check_types(model, example_inputs)
    path = os.fspath(path)
    if not path.endswith(".pt2"):
        raise ArgumentError(f"path: found {path!r}, expected a name that ends with .pt2.")
    program = callable_of(model)
    target: Any = model if program is None else program.target
    args, kwargs = tuple(example_inputs), dict(example_kwargs or {})
    names = input_names(target, args, kwargs)
    _check_inputs(target, names, pytree.tree_leaves((args, kwargs)))
    refuse_training(target)
    ours, theirs = resolve(None, options)
    captured = capture(target, args, kwargs, options or {})
    structure = [] if captured.structure is None else [captured.structure.module.graph]
    refuse_conditions(captured.conditions)
    refuse_operations([*structure, captured.rest.graph])
    exported = _export(captured, target, args, kwargs)
    metadata = _metadata(target, names, pytree.tree_leaves((args, kwargs)))
    files = aoti.compile_program(exported, names, _settings(ours, theirs), metadata, packaged.DECOMPOSITIONS)
    aoti.write_package(path, {MODEL: files})
    return path


def package_info(path: str | os.PathLike[str]) -> dict[str, str]:
    """Returns what a package says of itself, without loading it: versions, flags, and its inputs.

    Args:
        path: A file that :func:`package` wrote.

    Raises:
        ValueError: The file is no package.
        OSError: The file can't be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            found = [name for name in archive.namelist() if name.endswith("wrapper_metadata.json")]
            return dict(json.loads(archive.read(found[0])))
    except (zipfile.BadZipFile, IndexError, ValueError) as error:
        raise ArgumentError(f"path: {os.fspath(path)} is no package ({error}). Write one with package().") from error


def _check_types(model: Any, example_inputs: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            f"model: found {type(model).__name__}, expected an nn.Module, whose weights go into the file."
        )
    if isinstance(example_inputs, Tensor):
        raise ArgumentTypeError(
            "example_inputs: found a tensor, expected the arguments of one call, as in (x, edge_index)."
        )


def _check_inputs(model: nn.Module, names: list[str], leaves: list[Any]) -> None:
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
    weights = [(f"the model's {name}", value) for name, value in model.named_parameters()]
    for what, value in (*weights, *zip(names, leaves, strict=True)):
        if not device_of(value.device).is_cpp_in_inductor:
            raise ArgumentError(
                f"model: {what} is on {value.device}, expected a CPU, for which packages are made. Pass model.cpu() "
                "and inputs on the CPU."
            )


def _export(captured: Captured, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    """Traces the captured model with symbols for all numbers of rows."""
    wrapped = Program(captured, model, args, kwargs).eval()
    shapes: Any = ShapesCollection()
    for leaf, axes in zip(pytree.tree_leaves((args, kwargs)), dynamic_axes(captured, args, kwargs), strict=True):
        if axes:
            shapes[leaf] = dict.fromkeys(axes, Dim.DYNAMIC)
    with torch.no_grad(), symbolic_trace():
        return export(wrapped, args, kwargs, dynamic_shapes=shapes, strict=False)


def _settings(ours: Options, theirs: dict[str, Any]) -> dict[str, Any]:
    return {"post_grad_custom_pre_pass": AfterDifferentiation(ours), "shape_padding": False, **theirs}


def _metadata(model: nn.Module, names: list[str], leaves: list[Any]) -> dict[str, str]:
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
        "compiler": flags_text(),
    }


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
