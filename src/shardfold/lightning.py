"""Lightning under a plan: a `Strategy` for `lightning.Trainer`.

    trainer = Trainer(strategy=Strategy(plan, (x, y), module="net"), devices=2, ...)

The planned module is an attribute of the LightningModule that takes a batch and returns the loss.
When a run is set up, `shardfold.parallelize` takes its place: what `training_step` and
`validation_step` call is then the same on every process. Every process reads the same whole
batches, or its own part of them (`plan.sampler`).

A checkpoint is an ordinary one, written by the first process: weights and optimizer state are
whole, so that plain Lightning loads it, and a run resumes under any plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from shardfold.errors import InputError, RunError
from shardfold.operators import Rules
from shardfold.plans import Plan
from shardfold.runtime import parallelize
from shardfold.runtime.module import Parallel
from shardfold.runtime.parameters import whole_of
from shardfold.runtime.ranks import leave_at_exit

try:
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    raise InputError(
        f"Lightning cannot be imported ({error}). Run: pip install 'shardfold[lightning]'"
    ) from error

PRECISIONS = ("32-true", "bf16-mixed")
DROPOUT = "shardfold_dropout"  # in a checkpoint: the seed and the number of the next step


class Strategy(DDPStrategy):
    """Trains one module of a LightningModule under a plan.

    `plan` is a `Plan` or its file; `args`, `kwargs`, `loss` and `rules` are those that the plan was
    made with, `module` is the name of the planned attribute, which must hold all parameters.
    `options` are those of Lightning's `DDPStrategy` that concern processes (`timeout`,
    `process_group_backend`, `start_method`).
    """

    def __init__(
        self,
        plan: Plan | str | Path,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        module: str = "model",
        loss: Callable[[Any], Any] | None = None,
        rules: Rules | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        unknown = set(options) - {"timeout", "process_group_backend", "start_method"}
        if unknown:
            raise InputError(f"{', '.join(sorted(unknown))}: a plan reduces gradients itself.")
        super().__init__(**options)
        self.plan = plan if isinstance(plan, Plan) else Plan.load(plan)
        if self.plan.pipeline is not None or self.plan.micro_batches > 1:
            raise InputError(
                "Lightning runs forward and backward of one batch at a time: plan with "
                "micro_batches=1 and pipeline='off' (--micro-batches 1 --pipeline off), and use "
                "accumulate_grad_batches."
            )
        self._example, self._name = (tuple(args), dict(kwargs or {})), module
        self._more: dict[str, Any] = {"loss": loss, "rules": rules, "seed": seed}

    @property
    def parallel(self) -> Parallel:
        """The module under the plan."""
        found = getattr(self.lightning_module, self._name)
        assert isinstance(found, Parallel)
        return found

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every process reads all samples."""
        return {"num_replicas": 1, "rank": 0}

    def setup(self, trainer: Any) -> None:
        """Put the module under its plan, then make the optimizers."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        if self.precision_plugin.precision not in PRECISIONS:
            raise InputError(
                f"precision={self.precision_plugin.precision!r} cannot be honoured under a plan: "
                f"use one of {', '.join(PRECISIONS)}."
            )
        planned = self.plan.provenance.request.numbers
        if self.precision_plugin.precision != PRECISIONS[0] and planned not in (None, "fp32"):
            raise InputError(
                f"The plan computes in {planned} itself: leave precision out, or plan without one."
            )
        self._put_under_plan()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _put_under_plan(self) -> None:
        owner: Any = self.lightning_module
        found = getattr(owner, self._name, None)
        if not isinstance(found, nn.Module):
            raise InputError(
                f"{type(owner).__name__} has no module {self._name!r}: say which one is planned, "
                "Strategy(plan, ..., module=...)."
            )
        if isinstance(found, Parallel):
            return
        inside = {id(parameter) for parameter in found.parameters()}
        outside = [name for name, each in owner.named_parameters() if id(each) not in inside]
        if outside:
            raise InputError(
                f"Parameters outside {self._name!r} would be trained on each process alone: "
                f"{', '.join(outside[:5])}. Plan one module that has them all."
            )
        args, kwargs = self._example
        leave_at_exit()  # Lightning does so with NCCL alone
        setattr(owner, self._name, parallelize(found, self.plan, args, kwargs, **self._more))

    def model_to_device(self) -> None:
        """Each process has its parts on its device already."""

    def teardown(self) -> None:
        """Leave the parts where they are: another run may follow."""
        assert self.accelerator is not None
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # -- checkpoints: whole on the first process, in parts on all

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights; whole on the first process, and nothing on the others."""
        found: dict[str, Any] = self._whole(super().lightning_module_state_dict())
        return found

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The state of an optimizer; whole on the first process, and nothing on the others."""
        found: dict[str, Any] = self._whole(super().optimizer_state(optimizer))
        return found

    def _whole(self, tree: Any) -> Any:
        """The same with whole tensors; every process takes part."""
        whole = pytree.tree_map_only(DTensor, whole_of, tree)
        return whole if self.is_global_zero else {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """As ever, with where dropout stands."""
        checkpoint[DROPOUT] = (self.parallel.seed, self.parallel._run.context.step)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take over this process's parts of the optimizers' state, and where dropout stands."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(self._in_parts(optimizer, state))
        if DROPOUT in checkpoint:
            self.parallel.seed, self.parallel._run.context.step = checkpoint[DROPOUT]

    def _in_parts(self, optimizer: Any, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state like its parameters: what has a parameter's shape is kept as the parameter is."""
        run = self.parallel._run
        keepings = {id(p): run.named()[name] for name, p in self.parallel.named_parameters()}
        members = [p for group in optimizer.param_groups for p in group["params"]]
        found = {}
        for number, values in state["state"].items():
            parameter = members[number]
            keeping = keepings.get(id(parameter))
            if keeping is None:
                raise RunError("An optimizer trains a parameter that the planned module lacks.")

            def kept(value: Any, parameter: Any = parameter, keeping: Any = keeping) -> Any:
                is_alike = isinstance(value, Tensor) and value.shape == parameter.shape
                if not is_alike or not isinstance(parameter, DTensor):
                    return value
                part = keeping.part(value.to(parameter.device))
                return keeping.wrapped(part.contiguous(), run.mesh)

            found[number] = {key: kept(value) for key, value in values.items()}
        return {**state, "state": found}
