"""What a user may choose: ``gnncompile.compile(model, options={...})``."""

from __future__ import annotations

from typing import Any

from gnncompile import _compat
from gnncompile.exc import ArgumentError, ArgumentTypeError

DEFAULTS: dict[str, Any] = {
    "regions": True,
    "per_node": True,
    "narrower": True,
    "siblings": True,
    "epilogues": True,
    "products": True,
    "hoist": True,
    "mask_self_loops": True,
    "selections": True,
    "inductor": True,
    "double_backward": False,
    "backward_in_caller": True,
    "record": False,
    "recordings": 8,
    "native": True,
    "only_seeds": False,
    "structure_cache_entries": 64,
    "structure_cache_bytes": 2 * 2**30,
}
"""
- ``regions``: fuse message passing into generated kernels.
- ``per_node``: apply layers of edge features to nodes where only dot products and weighted sums read them.
- ``narrower``: let linear layers and sums over edges change places where the edges' rows get narrower by it.
- ``siblings``: let several reductions over the same edges share one walk.
- ``epilogues``: take row-wise arithmetic behind a reduction into its kernel.
- ``products``: compute float32 products of many rows on tensor cores, in bfloat16 parts, which is more accurate than in
  float32: on H100 and H200, unless the user allows TensorFloat32, which is faster and far less accurate.
- ``hoist``: build graph structure once per distinct graph, outside the step.
- ``mask_self_loops``: remove self loops by masking, without a device sync.
- ``selections``: capture sizes that depend on data, as of ``x[mask]``, instead of breaking the graph at them.
- ``inductor``: compile what is no region with Inductor; without, it runs op by op, which tells whose an error is.
- ``double_backward``: let gradients be differentiated again (``create_graph=True``), as training on forces does. What
  is no region then runs op by op, as torch can't differentiate twice what it compiled.
- ``backward_in_caller``: run a backward on a GPU in the thread that asks for it, as on a CPU, and not in one of
  autograd's, which takes 0.1 to 0.3 ms of host time to wake: as long as results of the model are alive in a thread,
  ``torch.autograd.is_multithreading_enabled()`` is False there.
- ``record``: capture forward and backward in CUDA graphs and replay them; ``mode="reduce-overhead"`` sets it.
- ``recordings``: how many of these a captured graph keeps: one for each size and structure of the input graph.
- ``native``: do what the host does at each replay in C++, which is built in the background, once on a machine.
- ``only_seeds``: of mini-batches that a loader sampled, padded to buckets, results have rows of the seeds alone: for
  loops that read no others (``out[:batch.batch_size]``), whose layers then work out what the seeds need.
- ``structure_cache_entries``, ``structure_cache_bytes``: how many structures a captured graph remembers.
"""

MODES = (None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def resolve(mode: str | None, options: dict[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Gnncompile's own options, complete, and Inductor's.

    Raises:
        ValueError: An unknown mode or option, or an option of the wrong type.
    """
    if mode not in MODES:
        raise ArgumentError(f"mode: found {mode!r}, expected one of {MODES}. Leave it out for the default.")
    if options is not None and not isinstance(options, dict):
        raise ArgumentTypeError(f"options: found {type(options).__name__}, expected a dict of names and values.")
    own, inductor = dict(DEFAULTS), _compat.inductor_mode_options(mode)
    own["record"] = bool(inductor.pop("triton.cudagraphs", False))
    for name, value in (options or {}).items():
        if name in DEFAULTS:
            if type(value) is not type(DEFAULTS[name]):
                expected = type(DEFAULTS[name]).__name__
                raise ArgumentError(f"options[{name!r}]: found {value!r}, expected a {expected}.")
            own[name] = value
        elif name in _compat.inductor_option_names():
            inductor[name] = value
        else:
            raise ArgumentError(
                f"options: found {name!r}, expected one of {sorted(DEFAULTS)} or a setting of torch._inductor.config. "
                "Check the spelling."
            )
    if inductor.get("cpp_wrapper"):
        raise ArgumentError(
            'options["cpp_wrapper"]: found True, expected False, since kernels are called from Python. Leave it out; '
            'mode="reduce-overhead" takes more of the host\'s time away.'
        )
    if own["record"] and own["double_backward"]:
        raise ArgumentError(
            'options["double_backward"]: found True with recordings, expected them off, since gradients are replayed. '
            "Leave out mode and options['record']."
        )
    return own, inductor
