"""Hugging Face's Trainer under a plan: two lines of a script change.

    from shardfold.hf import Trainer                      # instead of transformers
    trainer = Trainer(model, args, ..., plan="plan.json")  # or cluster="8xh100"

The loop stays transformers' own: callbacks, logging, schedules, accumulation, evaluation. What
changes is the model that it calls (`shardfold.parallelize`), and what follows from that:

- Every process is given the whole batch, that of `per_device_train_batch_size` samples for each
  device, in the order in which one process would read it; the module takes its part.
- Forward and backward of a batch are one call; gradients are scaled before the update.
- An evaluation runs in the plan's own shapes: a larger batch in pieces, a smaller one filled up
  with samples whose labels are ignored. Predictions come whole to every process.
- A checkpoint has the whole model as `save_pretrained` writes it, and beside it shardfold's own
  (`shardfold/`) with everything in parts: training goes on under any plan.

What cannot be honoured is refused before the first step.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardfold.api import Planner
from shardfold.cluster import Cluster, parse
from shardfold.errors import InputError, PlanError, RunError, ShardfoldError
from shardfold.graph.precision import precision_named
from shardfold.operators import Rules
from shardfold.planner.options import Options
from shardfold.plans import Plan
from shardfold.plans.batch import samples_of
from shardfold.plans.files import dumps, loads
from shardfold.runtime import parallelize
from shardfold.runtime.checkpoint import load, restore_random, save
from shardfold.runtime.checkpoint.folders import on_first
from shardfold.runtime.module import Parallel
from shardfold.runtime.parameters import whole_of
from shardfold.runtime.ranks import leave_at_exit

try:
    import transformers
    from accelerate.data_loader import prepare_data_loader
    from accelerate.utils import recursively_apply
    from safetensors import safe_open
except ImportError as error:
    raise InputError(
        f"Training with Hugging Face's Trainer needs transformers and accelerate ({error}). "
        "Run: pip install 'shardfold[hf]'"
    ) from error

FOLDER = "shardfold"  # of a checkpoint: the state of training, in parts
PLAN = "shardfold-plan.json"  # in the output folder: the plan that was made when training began
ITEMS = "num_items_in_batch"
MIXED = "bf16-mixed"  # what bf16=True asks for
IGNORED = -100  # the label that losses skip
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor")
REFUSED = {
    "deepspeed": "a plan says what is sharded: leave the DeepSpeed configuration out",
    "fsdp": "a plan says what is sharded: leave fsdp out",
    "parallelism_config": "a plan has the degrees: leave parallelism_config out",
    "fp16": "float16 needs scaled losses, which are not there: use bf16=True",
    "torch_compile": "leave torch_compile out",
    "gradient_checkpointing": "a plan says what is recomputed: plan with recompute='auto'",
    "auto_find_batch_size": "a plan is for one batch size, and says beforehand that it fits",
    "label_smoothing_factor": "the loss is the model's own: let the model smooth its labels",
    "neftune_noise_alpha": "hooks on the embedding are not seen: add the noise in the model",
    "use_liger_kernel": "a plan runs the model's own operators",
    "fp16_full_eval": "evaluation runs in the plan's dtype",
    "bf16_full_eval": "evaluation runs in the plan's dtype",
}
GONE = (
    "The weights of this model were handed to the plan, in parts, and are not here any more. Call "
    "trainer.save_model(folder) on every process, and load it with from_pretrained(folder)."
)


def results(output: Any) -> dict[str, Tensor]:
    """The loss, and what else the model returns, by name."""
    if isinstance(output, Mapping):
        named = dict(output)
    elif isinstance(output, tuple | list):
        named = {"loss": output[0], **{f"output{k}": v for k, v in enumerate(output[1:], 1)}}
    else:
        named = {"loss": output}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


class Trainer(transformers.Trainer):
    """`transformers.Trainer`, with the model under a plan.

    `plan` is a `Plan` or its file. With `cluster` instead (`8xh100`, a file, or a `Cluster`), the
    plan is made when it is first needed, for the first batch of the data and with the `planning`
    options of `shardfold.plan`, and left in the output folder. `rules` are as for `plan`. All other
    arguments are those of transformers. `make_plan` makes a plan without training.
    """

    def __init__(
        self,
        *args: Any,
        plan: Plan | str | Path | None = None,
        cluster: str | Cluster | None = None,
        planning: Options | None = None,
        rules: Rules | None = None,
        **kwargs: Any,
    ) -> None:
        if plan is not None and cluster is not None:
            raise InputError("Give a plan, or a cluster to plan for, not both.")
        given = inspect.signature(transformers.Trainer.__init__).bind(self, *args, **kwargs)
        _check(type(self), given.arguments)
        self.plan = Plan.load(plan) if isinstance(plan, str | Path) else plan
        self._cluster = parse(cluster) if isinstance(cluster, str) else cluster
        self._planning, self._rules = planning or Options(), rules
        self._parallel: Parallel | None = None
        self._planned_size: int | None = None  # while a plan is made: its devices
        super().__init__(*args, **kwargs)
        _check_processes(self.args)
        # Every process counts the whole batch.
        self.args.average_tokens_across_devices = False

    # -- the plan, and the module under it

    def make_plan(self, cluster: str | Cluster, **options: Unpack[Options]) -> Plan:
        """A plan for this model and the first batch of its data, as it would be on `cluster`.

        The batch has `per_device_train_batch_size` samples for each device of the cluster. With
        `bf16=True` the precision is `bf16-mixed`, unless one is given; no stages are looked for.
        """
        target = parse(cluster) if isinstance(cluster, str) else cluster
        if self.args.bf16 and not {"precision", "dtype"} & options.keys():
            options["precision"] = MIXED
        options.setdefault("pipeline", "off")  # no stages run here yet
        self._planned_size = target.size
        try:
            example = self._first_batch()
        finally:
            self._planned_size = None
        planner = Planner(
            self.model, (), example, cluster=target, loss=results, rules=self._rules, **options
        )
        return planner.plan()

    @property
    def parallel(self) -> Parallel:
        """The module under the plan; made when it is first asked for, on every process."""
        if self._parallel is None:
            self._parallel = self._made()
            _hollow(self.model)
        return self._parallel

    def _made(self) -> Parallel:
        if self.plan is None and self._cluster is None:
            raise InputError("Give the trainer a plan=..., or a cluster=... to plan for.")
        if self.plan is None:
            self.plan = self._agreed_plan()
        self._check_plan(self.plan)
        example = _of_plan(self.plan, self._first_batch())
        try:
            return self._under(self.plan, example)
        except PlanError:
            is_counted = ITEMS in example and all(e.name != ITEMS for e in self.plan.inputs)
            if not is_counted or self.args.gradient_accumulation_steps > 1:
                raise
        # A plan of the model alone: the mean of one batch is its sum over its own items.
        self.model_accepts_loss_kwargs = False
        return self._under(self.plan, {k: v for k, v in example.items() if k != ITEMS})

    def _under(self, plan: Plan, example: dict[str, Any]) -> Parallel:
        leave_at_exit()  # accelerate, which joined the processes, does not
        return parallelize(
            self.model,
            plan,
            (),
            example,
            loss=results,
            rules=self._rules,
            seed=self.args.seed,
        )

    def _agreed_plan(self) -> Plan:
        """The first process plans; all have its plan, and the output folder, too."""
        assert self._cluster is not None
        told: list[Any] = [None]
        if self.args.process_index == 0:
            try:
                found = self.make_plan(self._cluster, **self._planning)
                Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
                found.save(Path(self.args.output_dir) / PLAN)
                told = [dumps(found)]
            except ShardfoldError as error:
                told = [error]
        if self.args.world_size > 1:
            dist.broadcast_object_list(told)
        if isinstance(told[0], Exception):
            raise InputError(str(told[0]))
        return loads(told[0].encode())

    def _check_plan(self, plan: Plan) -> None:
        if plan.pipeline is not None:
            raise PlanError(
                f"This plan has {plan.pipeline.parts} pipeline stages, which do not run under "
                "Hugging Face's Trainer yet: plan with pipeline='off' (--pipeline off)."
            )
        precision = precision_named(plan.provenance.request.numbers)
        if self.args.bf16 and precision.computes not in ("", "float32") and not precision.master:
            raise PlanError(
                f"The plan keeps weights in {precision.name}, and bf16=True means float32 weights: "
                f"plan with precision={MIXED!r}, or leave bf16 out."
            )
        size = self.args.per_device_train_batch_size * plan.processes
        if samples_of(plan) != size:
            raise PlanError(
                f"The plan is for batches of {samples_of(plan)} samples; "
                f"per_device_train_batch_size={self.args.per_device_train_batch_size} on "
                f"{plan.processes} devices are {size}. Change one of them."
            )

    def _first_batch(self) -> dict[str, Any]:
        """The first batch as the model is called with it; random generators stay as they were."""
        with _same_random_state():
            loader = self.get_train_dataloader() if self.train_dataset else self._any_loader()
            batch = next(iter(loader))
            items = self._get_num_items_in_batch([batch], self.args.device)
        return self._call(self._prepare_inputs(batch), items)

    def _any_loader(self) -> Any:
        if self.eval_dataset is None:
            raise InputError("The trainer has no data to take an example batch from.")
        return self.get_eval_dataloader()

    def _call(self, inputs: Mapping[str, Any], items: Any) -> dict[str, Any]:
        """The arguments of the model; those that are None are left out."""
        found = {name: value for name, value in inputs.items() if value is not None}
        if self.model_accepts_loss_kwargs and items is not None:
            found[ITEMS] = torch.as_tensor(items)
        return found

    # -- data: all processes read the same whole batches

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, *args: Any, **kwargs: Any
    ) -> Any:
        devices = self._planned_size or self.args.world_size
        self.accelerator.prepare = self._as_alone
        try:
            size = batch_size * devices
            return super()._get_dataloader(dataset, description, size, *args, **kwargs)
        finally:
            del self.accelerator.prepare

    def _as_alone(self, loader: Any) -> Any:
        """A loader as accelerate prepares it for one process."""
        settings = self.accelerator.dataloader_config
        return prepare_data_loader(
            loader,
            self.accelerator.device,
            num_processes=1,
            process_index=0,
            put_on_device=self.accelerator.device_placement,
            dispatch_batches=False,
            use_seedable_sampler=settings.use_seedable_sampler,
            data_seed=settings.data_seed,
            non_blocking=settings.non_blocking,
        )

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        counted = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + counted // self.args.world_size

    def floating_point_ops(self, inputs: Any) -> int:
        """The work of a batch, of which every process counts its share."""
        return int(super().floating_point_ops(inputs)) // int(self.args.world_size)

    # -- training

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: its parts go to the devices."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        return self.parallel

    def create_optimizer(self, model: Any = None) -> Any:
        """The optimizer of the parameters in parts."""
        found = super().create_optimizer(self.parallel)
        if not isinstance(getattr(found, "optimizer", found), torch.optim.Optimizer):
            raise InputError(f"{type(found).__name__} is no optimizer of torch's kind.")
        return found

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """The names of parameters with weight decay, by the kinds of the model's own modules."""
        found: list[str] = super().get_decay_parameter_names(self.model)
        return found

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of a batch; its share of the loss of the step."""
        model.train()
        call = self._call(self._prepare_inputs(inputs), num_items_in_batch)
        with self.compute_loss_context_manager():
            loss = model.accumulate(**call)
        share = self._share(num_items_in_batch)
        if share != 1.0 and self.accelerator.sync_gradients:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(share)
        return loss.detach() * share

    def _share(self, items: Any) -> float:
        """What the loss of a batch counts in that of a step.

        A model that is given the number of items divides by it, and so its batches add up. One that
        takes such a number and does not read it is left as transformers leaves it.
        """
        is_given = self.model_accepts_loss_kwargs and items is not None
        return 1.0 if is_given else 1.0 / self.current_gradient_accumulation_steps

    def compute_loss_context_manager(self) -> Any:
        """Autocast for `bf16=True`, unless the plan computes in bf16 itself."""
        assert self.plan is not None
        if precision_named(self.plan.provenance.request.numbers).master:
            return nullcontext()
        return self.accelerator.autocast()

    def _clip_grad_norm(self, model: Parallel) -> Tensor:
        return whole_of(model.clip_grad_norm_(self.args.max_grad_norm))

    def _get_grad_norm(self, model: Parallel, grad_norm: Any = None) -> Any:
        return whole_of(model.clip_grad_norm_(float("inf"))) if grad_norm is None else grad_norm

    # -- evaluation

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As one process evaluates, with batches of all devices."""
        each = self.args.per_device_eval_batch_size
        self.args.per_device_eval_batch_size = each * self.args.world_size
        self.gather_function = self._gathered
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self.args.per_device_eval_batch_size = each

    def _gathered(self, data: Any, **_: Any) -> Any:
        """What is whole on every process; of the last batch, as many rows as there are samples."""
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return data
        return recursively_apply(lambda tensor: tensor[: state.remainder], data)

    def prediction_step(
        self,
        model: Parallel,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """The loss of a batch, the model's results and the labels, whole on every process."""
        given = dict(self._prepare_inputs(inputs))
        names = [] if prediction_loss_only else self._names(model, ignore_keys)
        has_labels = bool(self.label_names) and all(
            given.get(name) is not None for name in self.label_names
        )
        labels = tuple(given[name].detach() for name in self.label_names) if has_labels else ()
        pieces = list(self._pieces(self._labelled(given)))
        found = [self._evaluated(model, piece, names) for piece in pieces]
        weights = torch.tensor([float(piece.items) for piece in pieces], device=self.args.device)
        losses = torch.stack([each["loss"].float() for each in found])
        loss = losses @ weights / weights.sum()
        logits = tuple(torch.cat([each[name] for each in found]) for name in names)
        return loss if has_labels else None, _alone(logits), _alone(labels)

    def _names(self, model: Parallel, ignore_keys: list[str] | None) -> list[str]:
        """What the model returns that a prediction has."""
        config: Any = getattr(self.model, "config", None)
        left_out = ignore_keys or getattr(config, "keys_to_ignore_at_inference", [])
        return [name for name in model._run.program.results if name not in ("loss", *left_out)]

    def _evaluated(self, model: Parallel, piece: Piece, names: list[str]) -> dict[str, Tensor]:
        with (
            torch.no_grad(),
            self.compute_loss_context_manager(),
            model.outputs(*names) as outputs,
        ):
            loss = model(**self._call(piece.inputs, torch.tensor(piece.items)))
        return {"loss": loss} | {name: value[: piece.rows] for name, value in outputs.items()}

    def _labelled(self, given: dict[str, Any]) -> dict[str, Any]:
        """The inputs with labels, where the data has none: the plan's program asks for them."""
        assert self.plan is not None
        rows, device = _rows(given), self.args.device
        for entry in self.plan.inputs:
            if entry.name in self.label_names and given.get(entry.name) is None:
                kind = getattr(torch, entry.dtype)
                given[entry.name] = torch.zeros(rows, *entry.shape[1:], dtype=kind, device=device)
        return given

    def _pieces(self, given: dict[str, Any]) -> Iterator[Piece]:
        """A batch in pieces of as many samples as a pass of the plan takes."""
        assert self.plan is not None
        size, rows = samples_of(self.plan) // self.plan.micro_batches, _rows(given)
        for first in range(0, rows, size):
            part = {k: v[first : first + size] if _has(v, rows) else v for k, v in given.items()}
            count = min(size, rows - first)
            yield Piece(self._filled(part, count, size), count, self._items(part, count))

    def _items(self, part: dict[str, Any], rows: int) -> int:
        """What the mean of a loss is taken over: labels that count, or samples."""
        labels = part.get("labels")
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return rows
        counted = labels[..., 1:] if self._loss_shifts_labels else labels
        return int((counted != IGNORED).sum())

    def _filled(self, part: dict[str, Any], rows: int, size: int) -> dict[str, Any]:
        """A smaller batch with further samples, if a loss can skip them; else as it is."""
        labels = part.get("labels")
        can_skip = isinstance(labels, Tensor) and not labels.is_floating_point()
        routed = getattr(getattr(self.model, "config", None), "output_router_logits", False)
        if rows == size or not can_skip or routed:
            return part
        more = {
            k: torch.cat([v, v[:1].expand(size - rows, *v.shape[1:])]) if _has(v, rows) else v
            for k, v in part.items()
        }
        more["labels"] = more["labels"].clone()
        more["labels"][rows:] = IGNORED
        return more

    # -- checkpoints

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kw: Any) -> Any:
        """As transformers'; `True` resumes from the last checkpoint that is complete."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self._last_checkpoint()
        return super().train(resume_from_checkpoint, *args, **kw)

    def _last_checkpoint(self) -> str:
        def found() -> str:
            folders = Path(self.args.output_dir).glob("checkpoint-*")
            complete = [each for each in folders if _is_complete(each)]
            return str(max(complete, key=_number)) if complete else ""

        last = on_first(found)
        if not last:
            raise InputError(f"There is no complete checkpoint in {self.args.output_dir}.")
        return last

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The whole model as `save_pretrained` writes it; call it on every process."""
        whole = self._whole_state()
        if self.args.should_save:
            self._save(output_dir or self.args.output_dir, state_dict=whole)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _whole_state(self) -> dict[str, Tensor]:
        """All tensors, whole, on a process that saves; tied ones are one."""
        found: dict[str, Tensor] = {}
        known: dict[int, Tensor] = {}
        for name, tensor in self.parallel.state_dict(keep_vars=True).items():
            if id(tensor) not in known:
                whole = whole_of(tensor.detach())
                known[id(tensor)] = whole.cpu() if self.args.should_save else whole.new_empty(0)
            found[name] = known[id(tensor)]
        return found

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir) / FOLDER
        save(self.parallel, self._bare_optimizer(), folder, step=self.state.global_step, keep=1)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _bare_optimizer(self) -> Any:
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        path = Path(checkpoint)
        if on_first((path / FOLDER).is_dir):
            load(self.parallel, self._bare_optimizer(), path / FOLDER)
            state = torch.load(path / "scheduler.pt", weights_only=True)
            self.lr_scheduler.load_state_dict(state)
        elif (path / "optimizer.pt").exists():
            raise RunError(
                f"{path} was written by another trainer: its optimizer's state cannot be taken "
                "over. Load the weights with from_pretrained, and begin anew."
            )

    def _save_rng_state(self, output_dir: str) -> None:
        """It is in shardfold's checkpoint."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None and on_first((Path(checkpoint) / FOLDER).is_dir):
            restore_random(Path(checkpoint) / FOLDER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._parallel is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        for file in sorted(Path(resume_from_checkpoint).glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is no dict
                    whole = {name: tensors.get_tensor(name)}
                    self._parallel.load_state_dict(whole, strict=False)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)


@dataclass(frozen=True, slots=True)
class Piece:
    """Samples that are evaluated together: how many of them count, and what the mean is over."""

    inputs: dict[str, Any]
    rows: int
    items: int


def _check(kind: Any, given: Mapping[str, Any]) -> None:
    """Refuse what would be ignored."""
    args = given.get("args")
    for name, why in REFUSED.items():
        if getattr(args, name, None):
            raise InputError(f"{name}={getattr(args, name)!r} cannot be honoured: {why}.")
    if given.get("optimizers", (None, None)) != (None, None):
        raise InputError(
            "optimizers=... were made for the whole model: give optimizer_cls_and_kwargs, or the "
            "options of TrainingArguments, so that they are made for its parts."
        )
    optim = getattr(args, "optim", OPTIMIZERS[0])
    if given.get("optimizer_cls_and_kwargs") is None and optim not in OPTIMIZERS:
        raise InputError(
            f"optim={str(getattr(optim, 'value', optim))!r} is not known to work on parameters in "
            f"parts. Known: {', '.join(OPTIMIZERS)}; or give optimizer_cls_and_kwargs."
        )
    if getattr(args, "train_sampling_strategy", "") == "batch_rebalance":
        raise InputError("train_sampling_strategy='batch_rebalance' gives each rank its own batch.")
    for name in ("model_init", "compute_loss_func"):
        if given.get(name) is not None:
            raise InputError(f"{name} cannot be honoured: give one model, with its own loss.")
    if kind.compute_loss is not transformers.Trainer.compute_loss:
        raise InputError(
            f"{kind.__name__} has its own compute_loss, which a plan does not see: let the model's "
            "forward return that loss."
        )
    if hasattr(given.get("model"), "peft_config"):
        raise InputError("Adapters of peft cannot be saved from under a plan yet.")


def _check_processes(args: Any) -> None:
    """Refuse where transformers sees other processes than there are."""
    if args.n_gpu > 1:
        raise InputError("One process sees several GPUs: start the script with torchrun.")
    started = int(os.environ.get("WORLD_SIZE", 1))
    if started != args.world_size:
        raise InputError(
            f"{started} processes were started, transformers sees {args.world_size}: on CPUs, give "
            "TrainingArguments(use_cpu=True)."
        )


def _of_plan(plan: Plan, batch: dict[str, Any]) -> dict[str, Any]:
    """An example of the plan's own shapes, with what else the batch has."""
    shapes = {entry.name: entry.whole(plan.micro_batches) for entry in plan.inputs}
    missing = [name for name in shapes if name not in batch]
    if missing and missing != [ITEMS]:
        raise PlanError(
            f"The plan is for batches of {', '.join(shapes)}; the data has {', '.join(batch)}. "
            "Make the plan from the same data: trainer.make_plan(cluster)."
        )
    same = {tuple(batch[name].shape): shape for name, shape in shapes.items() if name in batch}

    def fitting(value: Any) -> Any:
        shape = same.get(tuple(value.shape)) if isinstance(value, Tensor) else None
        if shape is None or shape == tuple(value.shape):
            return value
        return torch.empty(shape, dtype=value.dtype, device="meta")

    return {name: fitting(value) for name, value in batch.items()}


def _hollow(model: nn.Module) -> None:
    """Let go of the weights of a model whose parts are elsewhere, and refuse to use it."""
    empty: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None:
                twin = nn.Parameter(torch.empty_like(value, device="meta"), value.requires_grad)
                module._parameters[name] = empty.setdefault(id(value), twin)
    for name in ("forward", "save_pretrained", "generate"):
        if hasattr(model, name):
            setattr(model, name, _refusing(getattr(model, name)))


def _refusing(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("state_dict") is None:
            raise RunError(GONE)
        return method(*args, **kwargs)

    return refuse


@contextmanager
def _same_random_state() -> Iterator[None]:
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


def _alone(values: tuple[Any, ...]) -> Any:
    """One value by itself, several as a tuple, none as None."""
    return (values or None) if len(values) != 1 else values[0]


def _rows(given: Mapping[str, Any]) -> int:
    return next(int(v.shape[0]) for v in given.values() if isinstance(v, Tensor) and v.dim())


def _has(value: Any, rows: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == rows


def _is_complete(folder: Path) -> bool:
    """Whether a checkpoint has what is written last."""
    try:
        return "global_step" in json.loads((folder / "trainer_state.json").read_text())
    except (OSError, ValueError):
        return False


def _number(folder: Path) -> int:
    number = folder.name.rpartition("-")[2]
    return int(number) if number.isdigit() else -1
