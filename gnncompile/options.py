"""What a user may choose: ``gnncompile.compile(model, options={...})``.

What is tuned for a card (tiles, thresholds) is no option: it stands in :mod:`gnncompile.tuning`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from gnncompile import _compat
from gnncompile.exc import ArgumentError, ArgumentTypeError


def _option(default: Any, what: str) -> Any:
    """A field with its default and its line of documentation."""
    return field(default=default, metadata={"help": what})


@dataclass(frozen=True)
class Options:
    """All options of gnncompile, with their defaults. The table in docs/debugging.md is made of the help texts."""

    regions: bool = _option(True, "Fuse message passing into generated kernels.")
    per_node: bool = _option(
        True,
        "Apply layers of edge features to nodes where only dot products and weighted sums read them. On CPUs also "
        "layers that make a matrix for each edge, if only products with rows read it.",
    )
    edge_layers: bool = _option(
        True,
        "On CPUs, compute linear layers of edges, of any width, in the kernels of the reductions that read them. "
        "Hidden rows of edges are then computed again in the backward, and never stored.",
    )
    narrower: bool = _option(
        True, "Let linear layers and sums over edges change places where the rows of edges get narrower by it."
    )
    siblings: bool = _option(True, "Let several reductions over the same edges share one walk.")
    epilogues: bool = _option(
        True,
        "Take row-wise arithmetic after a reduction (bias, residual) into its kernel, and likewise after a product.",
    )
    products: bool = _option(
        True,
        "Compute float32 products of many rows on [tensor cores](sharp-edges.md#what-differs-from-eager), in parts of "
        "16 bits, on H100 and H200: more accurate than the library's float32. Where the user allows TensorFloat32, the "
        "library computes them, faster and far less accurately. In 16 bits, narrow products share launches there. "
        "On AMD CPUs with 512-bit vectors, use these.",
    )
    hoist: bool = _option(True, "Build graph structure once per distinct graph, outside of the step.")
    mask_self_loops: bool = _option(True, "Remove self loops by masks, without a device sync.")
    selections: bool = _option(
        True, "Capture sizes that depend on data (`x[mask]`, top-k pooling), instead of breaking the graph at them."
    )
    inductor: bool = _option(
        True, "Compile what is no region with Inductor. Without it, that runs op by op, which tells whose an error is."
    )
    double_backward: bool = _option(
        False,
        "Let gradients be differentiated again (`create_graph=True`), as training on forces does. What is no region "
        "then runs op by op, since torch can't differentiate twice what it compiled.",
    )
    backward_in_caller: bool = _option(
        True,
        "Run a backward on a GPU in the thread that asks for it, not in autograd's thread, which takes 0.1 to 0.3 ms "
        "of host time to wake. `torch.autograd.is_multithreading_enabled()` is False in a thread as long as results "
        "of the model are alive there.",
    )
    keep_memory: bool = _option(
        True,
        "On a CPU, use the memory of large intermediate results again in the next call, since new memory costs time. "
        "`gnncompile.release_memory()` frees it.",
    )
    record: bool = _option(
        False, 'Capture forward and backward in CUDA graphs and replay them. `mode="reduce-overhead"` sets it.'
    )
    recordings: int = _option(
        8, "How many CUDA graphs a captured graph keeps: one for each size and structure of the input graph."
    )
    native: bool = _option(
        True, "Do the host's work of each replay in C++, which is built in the background, once on a machine."
    )
    only_seeds: bool = _option(
        False,
        "Return rows of the seeds alone for mini-batches that a loader sampled and padded to buckets: for loops that "
        "read no others (`out[:batch.batch_size]`). Layers then compute what the seeds need.",
    )
    structure_cache_entries: int = _option(64, "How many structures a captured graph remembers.")
    structure_cache_bytes: int = _option(
        2 * 2**30, "How many bytes of structure a captured graph remembers; the last structure is always kept."
    )


DEFAULTS = Options()
"""The options of ``gnncompile.compile(model)``."""

NAMES = tuple(one.name for one in fields(Options))
"""The names of all options."""

HELP: dict[str, str] = {one.name: one.metadata["help"] for one in fields(Options)}
"""What each option does."""

MODES = (None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def resolve(mode: str | None, options: dict[str, Any] | None) -> tuple[Options, dict[str, Any]]:
    """Gnncompile's own options, and Inductor's settings.

    Raises:
        ArgumentError: An unknown mode or option, or an option of the wrong type.
        ArgumentTypeError: `options` is no dict.
    """
    if mode not in MODES:
        raise ArgumentError(f"mode: found {mode!r}, expected one of {MODES}. Leave it out for the default.")
    if options is not None and not isinstance(options, dict):
        raise ArgumentTypeError(f"options: found {type(options).__name__}, expected a dict of names and values.")
    inductor = _compat.inductor_mode_options(mode)
    own: dict[str, Any] = {"record": bool(inductor.pop("triton.cudagraphs", False))}
    for name, value in (options or {}).items():
        if name in NAMES:
            expected = type(getattr(DEFAULTS, name))
            if type(value) is not expected:
                raise ArgumentError(f"options[{name!r}]: found {value!r}, expected a {expected.__name__}.")
            own[name] = value
        elif name in _compat.inductor_option_names():
            inductor[name] = value
        else:
            raise ArgumentError(
                f"options: found {name!r}, expected one of {sorted(NAMES)} or a setting of torch._inductor.config. "
                "Check the spelling."
            )
    if inductor.get("cpp_wrapper"):
        raise ArgumentError(
            'options["cpp_wrapper"]: found True, expected False, since kernels are called from Python. Leave it out; '
            'mode="reduce-overhead" takes more of the host\'s time away.'
        )
    chosen = replace(DEFAULTS, **own)
    if chosen.record and chosen.double_backward:
        raise ArgumentError(
            'options["double_backward"]: found True with recordings, expected them off, since gradients are replayed. '
            "Leave out mode and options['record']."
        )
    return chosen, inductor
