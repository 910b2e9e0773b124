"""``gnncompile.TrainStep``: forward, loss, backward, clipping and optimizer as one step, replayed on a GPU."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gnncompile import _compat
from gnncompile.capture.backend import SHARDED, Captured
from gnncompile.capture.compile import callable_of, compile, trained
from gnncompile.capture.compiled_callable import Call, CompiledCallable
from gnncompile.capture.inputs import Checker, leaves
from gnncompile.capture.provenance import replaced
from gnncompile.cudagraphs import cuda_graph, mesh_pool
from gnncompile.cudagraphs.parameter_aliases import using_parameter_aliases
from gnncompile.cudagraphs.pool import CudaGraphPool
from gnncompile.cudagraphs.recorder import CudaGraphSettings, Unfinished, finished
from gnncompile.cudagraphs.undo import Undone
from gnncompile.exc import ArgumentError, ArgumentTypeError
from gnncompile.layout import identity_cache
from gnncompile.layout.agreement import union
from gnncompile.options import DEFAULTS
from gnncompile.steps.data_parallel import GradientAveraging, Used
from gnncompile.steps.optimizer_settings import Changes, OptimizerSettings, needs_closure, needs_metric
from gnncompile.steps.plan import Plan
from gnncompile.steps.speculation import SpeculativeLaunch

RESTLESS = 4
"""An optimizer whose state or settings changed in more than this many steps in a row is assumed to change in each."""


class _Objective(nn.Module):
    """A model followed by its loss: the function that is compiled."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> Any:
        return self.loss(self.model(*args, **kwargs), target)


class TrainStep:
    """One training step: clears the gradients, runs forward, loss and backward, and updates the parameters.

    On a GPU, steps on the same graph replay two CUDA graphs from the third step of a size on. The first CUDA graph
    holds forward, loss and backward; the second holds the update. Each step also compares everything else that its
    numbers depend on: the model's attributes and parameters, and the optimizer's settings and state.

    Example::

        step = gnncompile.TrainStep(model, torch.nn.functional.cross_entropy, optimizer)
        for epoch in range(100):
            loss = step(x, edge_index, target=y)

    Args:
        model: The module to train, compiled or not, or a ``DistributedDataParallel`` of it. Inputs must be on its
            device. If it was compiled with a mesh, a step runs over the parts of one graph, and so does the loss. The
            CUDA graphs then hold the collectives. This needs NCCL and ``NCCL_GRAPH_REGISTER=0`` in the environment,
            and all processes must call the step alike. They count steps alike, and compare through the store of their
            process group when a new graph is recorded.
        loss: Called with the model's result and `target`. Returns the scalar to minimise, or a tuple that begins with
            this scalar.
        optimizer: The optimizer of the model's parameters. On a GPU it is made ``capturable`` where it can be, and
            ``fused`` too unless you chose otherwise. Its learning rate becomes a tensor. An optimizer that needs a
            closure (``LBFGS``) evaluates forward, loss and backward several times; its steps are not recorded.
        scheduler: Stepped after every training step. A scheduler that needs a metric (``ReduceLROnPlateau``) gets the
            loss, and the host waits for it.
        scaler: Scales the loss for float16 gradients. Only fused optimizers can be recorded together with a scaler.
        max_norm: Clips the norm of all gradients to this value.
        autocast: The type in which forward and loss run, as for :class:`torch.autocast`.
        options: See :func:`gnncompile.compile`; ``{"record": False}`` turns CUDA graphs off.

    Raises:
        TypeError: `model` is no module, `optimizer` is no optimizer, or `scheduler` needs more than a metric.
        ValueError: `model` is a ``DistributedDataParallel`` that does more than average gradients, such as one with
            ``register_comm_hook``. Or `optimizer` needs a closure, and there is a `scaler` or a
            ``DistributedDataParallel``.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Any],
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        max_norm: float | None = None,
        autocast: torch.dtype | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ArgumentTypeError(
                f"model: found {type(model).__name__}, expected an nn.Module. Pass the model itself."
            )
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ArgumentTypeError(
                f"optimizer: found {type(optimizer).__name__}, expected a torch.optim.Optimizer, e.g. "
                "torch.optim.Adam(model.parameters())."
            )
        self._closes = needs_closure(optimizer)
        if self._closes and (scaler is not None or isinstance(model, DistributedDataParallel)):
            other = "a scaler" if scaler is not None else "DistributedDataParallel"
            raise ArgumentError(
                f"optimizer: found a {type(optimizer).__name__}, which evaluates the loss several times a step, "
                f"together with {other}. Take another optimizer, or leave that out."
            )
        self._wants_metric = needs_metric(scheduler)
        known, single = callable_of(trained(model)), trained(model)
        self.model: nn.Module = known.target if known is not None else single  # type: ignore[assignment]
        self.optimizer, self.scheduler, self.scaler = optimizer, scheduler, scaler
        self.max_norm, self.autocast = max_norm, autocast
        chosen = {"record": True, **{k: getattr(DEFAULTS, k) for k in ("recordings", "native")}, **(options or {})}
        self._mesh = None if known is None else known.settings["mesh"]
        self._records, self._most = chosen["record"], chosen["recordings"]
        self._recording_settings = CudaGraphSettings(chosen["native"])
        self._objective, self._options = _Objective(self.model, loss), {**chosen, "record": False}
        self._program = self._new_program()
        self._check = Checker(self.model.forward)
        self._plans: list[Plan] = []
        self._ahead = SpeculativeLaunch()
        self._settings, self._hooks = OptimizerSettings(optimizer), Changes()
        self._refused: list[tuple[Any, str]] = []
        self._graphs: list[tuple[Any, list[Captured]]] = []
        self._unplanned = "the optimizer evaluates the loss itself, by a closure" if self._closes else None
        self._averaging: GradientAveraging | None = None
        if isinstance(model, DistributedDataParallel):
            groups = optimizer.param_groups
            self._averaging = GradientAveraging(
                model, [*self._objective.parameters(), *(p for g in groups for p in g["params"])]
            )
            self._updates = self._recorded_updates(self._averaging.buffers[0].device)

    def __call__(self, *args: Any, target: Any = None, **kwargs: Any) -> Any:
        """Runs one step.

        Args:
            args: Positional arguments of the model.
            target: The second argument of the loss: a tensor, or a tuple or dict of tensors.
            kwargs: Keyword arguments of the model.

        Returns:
            The result of the loss, detached.
        """
        made = self._step((args, kwargs, target))
        if self.scheduler is not None:
            self.scheduler.step(*made[:1] if self._wants_metric else ())
        return made[0] if len(made) == 1 else made

    @property
    def not_recorded(self) -> str | None:
        """Why steps are not replayed; None if they are, or before the first step."""
        if not self._plans:
            return self._unplanned
        if self._settings.changes.in_a_row > RESTLESS:
            return "the optimizer keeps other numbers or tensors after each step"
        every = [plan.recordings for plan in self._plans]
        if self._averaging is not None and self._updates is not None:
            every.append(self._updates)
        return next((recordings.reason for recordings in every if recordings.reason is not None), None)

    def _new_program(self) -> CompiledCallable:
        program = callable_of(compile(self._objective, options=self._options, mesh=self._mesh))
        assert program is not None
        program.pads, program.backend.narrows = self._records, False
        return program

    def _step(self, given: tuple[Any, Any, Any]) -> tuple[Any, ...]:
        if self._closes:
            return self._evaluated(given)
        if self._averaging is None:
            return self._run_step(given)
        self._averaging.send_buffers()
        *made, used = self._run_step(given)
        used = self._averaging.average(used)
        self._averaging.hand_out(used)
        if self._updates is None:
            self._update()
        else:
            self._settings.keep_on(self._updates.device)
            with torch.no_grad():
                self._updates([*self._averaging.parameters, *self._averaging.buffers], (used, *self._facts()))
        return tuple(made)

    def _evaluated(self, given: tuple[Any, Any, Any]) -> tuple[Any, ...]:
        """Runs a step of an optimizer with a closure; returns the losses of the first evaluation."""
        self._check(given[0], given[1])
        found: list[tuple[Any, ...]] = []

        def evaluate() -> Tensor:
            self.optimizer.zero_grad(set_to_none=True)
            with torch.enable_grad():
                losses, loss = self._losses(lambda: self._program(given, {}))
                loss.backward()
            self._clip()
            found.append(_detached(losses))
            return loss

        self.optimizer.step(evaluate)  # type: ignore[arg-type]
        return found[0]

    def _recorded_updates(self, device: torch.device) -> CudaGraphPool | None:
        """Returns what records and replays the update after gradients were averaged over processes, or None."""
        if not self._records or not cuda_graph.supports_cuda_graphs(device):
            return None

        def update(*_: Any) -> tuple[Any, ...]:
            self._settings.keep_on(device)
            self._update()
            return ()

        return CudaGraphPool(update, self._most, device, (), self._recording_settings)

    def _run_step(self, given: tuple[Any, Any, Any]) -> tuple[Any, ...]:
        """Runs a step. If processes average gradients, runs the part before the averaging."""
        if _compat.needs_eager() is not None or self._program.watch() is not None:
            self._check(given[0], given[1])
            return finished(self._train(lambda: self._program(given, {}), whole=False))  # type: ignore[no-any-return]
        try:
            made = self._planned(given)
        finally:
            self._ahead.undo()
        return self._first(given) if made is None else made

    def _planned(self, given: tuple[Any, Any, Any]) -> tuple[Any, ...] | None:
        """Runs a step by its plan, or returns None if there is no plan for it."""
        # A launch that turns out wrong has overwritten gradients, so they must be gradients that a step clears.
        may_begin = self._averaging is not None or self._settings.trains_the_same()
        if may_begin:
            with torch.no_grad():
                self._ahead.begin_again(given)
        call = self._take(given)
        if call is None:
            return None
        found: list[Any] = []
        leaves((call.args, call.counts), found)
        with torch.no_grad():
            if may_begin:
                self._ahead.begin(found)
            plan = self._plan(call) if self._plans else None
            if not self._ahead.learn(given, found, plan):
                self._ahead.undo()
            if plan is None:
                return None
            facts = self._facts_of(plan)
            memory = None if call.taken.batch is None else call.taken.batch.memory
            return plan.recordings([*found, *plan.state()], facts, self._ahead.begun, memory)  # type: ignore[no-any-return]

    def _take(self, given: tuple[Any, Any, Any]) -> Call | None:
        """Returns a step's arguments, flattened, or None if the step can't be recorded for them."""
        try:
            call = self._program.take(given, {})
        except _compat.Recapture:
            return None
        except Exception:
            self._check(given[0], given[1])  # may raise a clearer error
            raise
        return None if call.taken.objects else call

    def _plan(self, call: Call) -> Plan | None:
        """Returns the plan of the captured graph that serves these arguments, or None."""
        capture = self._capture(call)
        return next((plan for plan in self._plans if plan.capture is capture), None)

    def _capture(self, call: Call) -> Any:
        with torch.enable_grad(), self._autocast():
            return self._program.capture_for(call)

    def _first(self, given: tuple[Any, Any, Any]) -> tuple[Any, ...]:
        """Runs a step without a plan, which may capture the graph; then makes the plan if the step can be recorded."""
        self._check(given[0], given[1])  # steps with a plan need no check: their graph was captured for checked inputs
        breaks, captured = _compat.graph_breaks(), len(self._program.backend.captured)
        with identity_cache.keeping() as kept:
            made = finished(self._train(lambda: self._program(given, {}), whole=False))
        call = self._take(given)
        capture = self._capture(call) if call is not None else None
        if _compat.graph_breaks() > breaks:
            self._refused.append((capture, "the graph breaks"))
        if new := self._program.backend.captured[captured:]:
            self._graphs.append((capture, new))
        sources = [replaced(self._objective, graph.attributes) for graph in new]
        self._refused += [(capture, _why_replaced(source)) for source in sources if source is not None]
        self._unplanned = self._why_not(call, capture)
        if call is None or capture is None or self._unplanned is not None:
            return made  # type: ignore[no-any-return]
        also = self._averaging.buffers if self._averaging is not None else []
        built_of, over_parts = [tensor for inputs, _ in kept for tensor in inputs], self._mesh is not None
        plan = Plan(capture, call, built_of, self.model, also, over_parts)
        plan.find_undone([graph for known, graphs in self._graphs if known is capture for graph in graphs])
        self._unplanned = f"its device is {plan.device}"
        if cuda_graph.supports_cuda_graphs(plan.device):
            plan.recordings = self._pool(plan)
            self._plans.append(plan)
            self._settings.keep_on(plan.device)
        return made  # type: ignore[no-any-return]

    def _pool(self, plan: Plan) -> CudaGraphPool:
        """Returns what records and replays the steps of a plan."""
        run, group = functools.partial(self._run, plan), self._program.backend.group
        if group is None:
            settings, undone = self._recording_settings, plan.undone or Undone()
            return CudaGraphPool(run, self._most, plan.device, plan.structural, settings, undone=undone)
        # A part without edges does not tell which of its empty tensors structure was built from.
        structural = union(group, "a new step", plan.structural)
        kept = range(plan.num_leaves, plan.num_leaves + len(plan.state()))
        settings = self._recording_settings
        return mesh_pool.MeshCudaGraphPool(run, self._most, plan.device, structural, settings, group, kept)

    def _why_not(self, call: Call | None, capture: Any) -> str | None:
        """Returns why steps that run a captured graph can't be recorded, or None if they can."""
        if not self._records:
            return "it is turned off"
        group = self._program.backend.group
        if group is not None and (reason := mesh_pool.why_not(group)) is not None:
            return reason
        if call is None:
            return "an argument is an object or a sparse matrix; pass its tensors"
        if _compat.are_sharded([self.model]):
            return SHARDED
        if self._averaging is not None and any(map(_compat.has_hooks, self._averaging.parameters)):
            return "a parameter has a hook"
        return next((why for refused, why in self._refused if refused is capture), None)

    def _run(self, plan: Plan, *given: Any) -> Any:
        self._settings.keep_on(plan.device)  # the optimizer may have been loaded since the last step
        if any(map(_compat.has_hooks, self.model.parameters())):
            plan.undone = None
        return self._train(lambda: self._program.run(plan.call(given)), whole=True)

    def _train(self, objective: Callable[[], Any], whole: bool) -> Any:
        """Runs forward, loss and backward, and leaves the update for later.

        Args:
            objective: Runs the model and the loss.
            whole: Whether `objective` runs exactly one captured graph.

        Returns:
            The losses, with a function for the update, which is called once the step is known to be wanted. If
            processes average gradients: the losses, and which parameters have a gradient.
        """
        if self._averaging is not None:
            return self._own_gradients(self._averaging, objective, whole)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.enable_grad(), using_parameter_aliases(whole) as standing:
            losses, scaled = self._losses(objective)
            scaled.backward()

        def update() -> Callable[[], None]:
            cleared = self._settings.parameters()
            for parameter, leaf in standing.items():
                _accumulate(parameter, leaf.grad, any(parameter is p for p in cleared))
            self._update()
            every = dict.fromkeys([*standing, *cleared])
            return functools.partial(_hand_out, [(parameter, parameter.grad) for parameter in every])

        return Unfinished(_detached(losses), update)

    def _own_gradients(
        self, averaging: GradientAveraging, objective: Callable[[], Any], whole: bool
    ) -> tuple[Any, ...]:
        """Runs forward, loss and backward, and writes the gradients to the buffers that processes average.

        Returns:
            The losses, and which parameters have a gradient.
        """
        with torch.enable_grad(), using_parameter_aliases(whole) as standing:
            losses, scaled = self._losses(objective)
            at = [standing.get(p, p) for p in averaging.parameters]
            used: Used = averaging.keep(torch.autograd.grad(scaled, at, allow_unused=True))
        return *_detached(losses), used

    def _losses(self, objective: Callable[[], Any]) -> tuple[tuple[Any, ...], Tensor]:
        """Returns the results of the loss, and the scalar (scaled, if there is a scaler) to differentiate."""
        with self._autocast():
            made = objective()
        losses = made if isinstance(made, tuple) else (made,)
        return losses, losses[0] if self.scaler is None else self.scaler.scale(losses[0])

    def _update(self) -> None:
        self._clip()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def _clip(self) -> None:
        if self.max_norm is None:
            return
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self._settings.parameters(), self.max_norm)

    def _autocast(self) -> Any:
        if self.autocast is None:
            return nullcontext()
        device = next((p.device.type for p in self.model.parameters()), "cpu")
        return torch.autocast(device, self.autocast)

    def _facts_of(self, plan: Plan) -> tuple[Any, ...]:
        """Returns everything that a recorded step depends on except its tensors, to compare with the next step's."""
        parameters = plan.parameters()
        hooks = [h for p in parameters if _compat.has_hooks(p) for h in _compat.hooks_of(p)]
        if self._averaging is not None:
            return (self._hooks(hooks),)
        facts = self._facts()
        return (*facts, self._hooks([*hooks, *self._settings.gradients_of_others(parameters)]))

    def _facts(self) -> tuple[Any, ...]:
        """Returns everything that a recorded update depends on except its tensors."""
        scaler = self.scaler
        growth: tuple[Any, ...] = ()
        if scaler is not None:
            growth = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
        return (self.max_norm, *growth, *self._settings.facts())


def objective_of(step: TrainStep) -> tuple[CompiledCallable, Any]:
    """Returns a new compiled callable of a step's forward and loss, and the autocast context to run it in.

    The callable takes the positional arguments, the keyword arguments and the target.
    """
    return step._new_program(), step._autocast()


def _why_replaced(source: str) -> str:
    """Returns why steps are not recorded whose forward has replaced an attribute, given by its source.

    A replay would read the first tensor again and again.
    """
    name = re.sub(r"\._(?:modules|buffers|parameters)\['(\w+)'\]", r".\1", source).removeprefix("L['target'].")
    return f"its forward replaces {name}, which it reads; write to it in place: {name}.copy_(...)"


def _accumulate(parameter: nn.Parameter, gradient: Tensor | None, cleared: bool) -> None:
    """Adds a gradient to a parameter's ``grad``, as a backward does; `cleared` says whether a step clears the gradient
    first. The optimizer clears only the parameters that it trains.
    """
    if parameter.grad is not None:
        if gradient is not None:
            parameter.grad.add_(gradient)
    else:
        # A gradient that is not cleared must not lie in memory that the next backward overwrites.
        parameter.grad = gradient if cleared or gradient is None else gradient.clone()


def _hand_out(gradients: list[tuple[Tensor, Tensor | None]]) -> None:
    """Sets each parameter's ``grad`` to the gradient of a replay. It may be None now, or that of another replay."""
    for parameter, gradient in gradients:
        if parameter.grad is not gradient:
            parameter.grad = gradient


def _detached(losses: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([v.detach() if isinstance(v, Tensor) else v for v in losses])
