"""VariableBatchTrainer: Transformers' Trainer with a variable batch size, whose steps are updates."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from variable_batch_size.checks import imported_extra
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.data.token_budget import TokenBudget
from variable_batch_size.integrations import common
from variable_batch_size.optim.optimizer import CustomOptimizer, Options
from variable_batch_size.optim.probe import RuleLike
from variable_batch_size.policies.policy import Policy, Situation
from variable_batch_size.schedules.schedule import OnEnd
from variable_batch_size.traces.trace import TraceLike

with imported_extra("transformers", "variable_batch_size.integrations.transformers needs transformers", "transformers"):
    # this one first: where both are missing, the error names it
    from transformers import Trainer, TrainerCallback  # isort: split
    from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler

    from variable_batch_size.integrations.accelerate import UpdateCountingOptimizer, save_sharded_model, taken_back

_SET_ELSEWHERE = {
    "clip_grad_norm": "set `max_grad_norm` of the training arguments",
    "model": "the trainer passes its model",
    "gradient_as_bucket_view": "the trainer frees gradients after each step",
}
_OF_LOADER = (
    *("collate_fn", "num_workers", "pin_memory", "worker_init_fn", "persistent_workers", "prefetch_factor"),
    "multiprocessing_context",
)
_DRAWS_SAMPLES = (
    "the trace and the seed determine the samples of each step, so others, or another order, would be ignored. Select "
    "the samples in `train_dataset`, or write your own loop with a vbs.Stream, which keeps their order"
)
_STRATEGY = (
    "the sampler of this library shuffles the samples. For samples of similar length, pass a vbs.TokenBudget as "
    "`trace`; for another order, write your own loop with a vbs.DataLoader or a vbs.Stream"
)
_ONLY_OFFLOADS = "trl.trainer."  # the `training_step` of these modules, for `activation_offloading`


def check_arguments(args: Any) -> None:
    """Reject training arguments that the trace determines, or that would change the result."""
    for name, allowed, reason in (
        ("gradient_accumulation_steps", (1,), common.TRACE_DECIDES),
        ("auto_find_batch_size", (False,), "batch sizes of the trace are multiples of the minibatch size"),
        ("include_num_input_tokens_seen", ("no", False), "`variable_optimizer.weight_done` counts tokens"),
        ("deepspeed", (None, "", {}), "it reduces gradients by itself"),
        ("train_sampling_strategy", ("random",), _STRATEGY),
        ("group_by_length", (False,), _STRATEGY),  # before transformers 5.2
        ("dataloader_in_order", (True,), "which step a minibatch belongs to depends on the order"),
        ("activation_offloading", (False,), "the `training_step` of the trainer is not called"),
    ):
        common.check_setting(f"`{name}`", getattr(args, name, allowed[0]), *allowed, because=reason)
    config, because = args.accelerator_config, "each process reads minibatches of its own"
    common.check_setting("`split_batches` of `accelerator_config`", config.split_batches, False, because=because)
    dispatches = config.dispatch_batches
    common.check_setting("`dispatch_batches` of `accelerator_config`", dispatches, None, False, because=because)
    if getattr(args, "fsdp", None):
        version = (getattr(args, "fsdp_plugin_args", None) or {}).get("fsdp_version")
        common.check_setting("`version` of `fsdp_config`", version, 2, because="others reduce gradients by themselves")
        common.check_setting("`fp16` with `fsdp`", args.fp16, False, because="use `bf16`")
    if args.n_gpu > 1:
        raise ValueError(f"each process must have one device, got {args.n_gpu}: launch one per device with torchrun")


def check_methods(kind: type) -> None:
    """Reject a trainer with its own way to draw samples, or to train on them, which this library would ignore."""
    classes = [one for one in kind.__mro__ if one not in (Trainer, VariableBatchMixin)]
    below = kind.__mro__[kind.__mro__.index(VariableBatchMixin) :]
    replaced = [one for one in classes if one in below and not one.__module__.startswith(_ONLY_OFFLOADS)]
    for name, where, reason in (
        ("_get_train_sampler", classes, _DRAWS_SAMPLES),
        ("get_train_dataloader", classes, _DRAWS_SAMPLES),
        ("_get_dataloader", classes, _DRAWS_SAMPLES),
        ("get_batch_samples", classes, "to count tokens in another way, override `_get_num_items_in_batch`"),
        ("training_step", replaced, "it would not be called. Override it in a class with VariableBatchMixin as a base"),
    ):
        for one in where:
            if name in vars(one):
                raise ValueError(f"`{name}` must be that of transformers.Trainer, got {one.__name__}'s: {reason}")


def check_loader(own: Any, num_processes: int) -> None:
    """Reject a loader of the trainer unless it reads each sample once, in random order, in one of the processes."""
    batches, number = own.batch_sampler, 1
    if isinstance(batches, BatchSamplerShard):
        batches, number = batches.batch_sampler, batches.num_processes
    sampler = getattr(batches, "sampler", own.sampler)
    is_random = type(sampler) in (RandomSampler, SeedableRandomSampler) and not sampler.replacement
    if type(batches) is not BatchSampler or not is_random or sampler.num_samples != len(own.dataset):
        found = f"{type(batches).__name__} with {type(sampler).__name__}"
        raise ValueError(f"the trainer's loader must read all samples in random order, got {found}: {_DRAWS_SAMPLES}")
    if number != num_processes:
        reason = "with tensor or context parallelism, write your own loop, and pass `process_group=` to its loader"
        raise ValueError(
            f"each of the {num_processes} processes must have samples of its own, got {number} parts: {reason}"
        )


class VariableBatchMixin:
    """Gives any ``Trainer`` a variable batch size: put it first in the bases of a class.

    It takes the arguments of :class:`VariableBatchTrainer`; all others are passed to the trainer.

    Attributes:
        variable_optimizer: the optimizer of this library around the trainer's own; None before ``train()``.
        variable_sampler: assigns the minibatches; None before ``train()``.
    """

    args: Any
    accelerator: Any
    is_fsdp_enabled: bool
    model: torch.nn.Module
    optimizer: Any
    state: Any
    train_dataset: Any

    def __init__(
        self,
        *args: Any,
        trace: TraceLike | Policy | Callable[[Situation], float] | TokenBudget,
        rule: RuleLike | Sequence[RuleLike],
        ref_batchsize: int,
        on_end: OnEnd | None = None,
        options: Options | None = None,
        callbacks: list[Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._trace, self._rule, self._ref_batchsize, self._on_end = trace, rule, ref_batchsize, on_end
        self._options: Any = dict(options or {})
        if isinstance(trace, TokenBudget) and on_end is not None:
            raise ValueError(f"`on_end` must be None with a TokenBudget, which has its own, got {on_end!r}")
        for name, reason in _SET_ELSEWHERE.items():
            if name in self._options:
                raise ValueError(f"`options` must not contain {name!r}: {reason}")
        self.variable_optimizer: CustomOptimizer | None = None
        self.variable_sampler: CustomSampler | None = None
        self._flos_of_step = 0.0
        check_methods(type(self))
        super().__init__(*args, callbacks=[_Position(self), *(callbacks or [])], **kwargs)  # type: ignore[call-arg]
        check_arguments(self.args)
        self.args.ignore_data_skip = True  # in a resumed run the sampler already skips completed steps

    def get_train_dataloader(self) -> Any:
        """The trainer's own loader with this rank's minibatches, grouped by step."""
        if self.train_dataset is not None and isinstance(self.train_dataset, IterableDataset):
            raise ValueError("`train_dataset` must have a length, got an IterableDataset: write your own training loop")
        own, args = super().get_train_dataloader(), self.args  # type: ignore[misc]
        check_loader(own, args.world_size)
        dataset, size = own.dataset, args.per_device_train_batch_size
        if self.variable_sampler is None or not isinstance(self.optimizer, UpdateCountingOptimizer):
            self.variable_sampler = self._new_sampler(dataset, size)
        sampler = self.variable_sampler
        common.refuse_open_steps(sampler, "the trainer")
        common.check_process(sampler, args.process_index, args.world_size, "the trainer", "launch it with torchrun")
        for name, before, now in (  # train() may be called again
            ("len(train_dataset)", sampler.num_samples, len(dataset)),
            ("per_device_train_batch_size", size if sampler.needs_weights else sampler.minibatch_size, size),
        ):
            if before != now:
                raise ValueError(f"`{name}` changed from {before} to {now} since training began: create a new trainer")
        settings: Any = {name: getattr(own, name) for name in _OF_LOADER}
        settings["generator"] = torch.Generator().manual_seed(
            sampler.seed
        )  # not the global one, from which it would draw
        return common.Steps(DataLoader(dataset, batch_sampler=sampler, **settings), sampler)

    def _new_sampler(self, dataset: Any, size: int) -> CustomSampler:
        # `compute_loss` may gather metrics, so all ranks call it equally often; XLA cannot drop padding within a step
        lockstep = self.args.device.type != "xla"
        if not isinstance(self._trace, TokenBudget):
            seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
            settings: Any = {"minibatch_size": size, "seed": seed, "on_end": self._on_end, "lockstep": lockstep}
            return CustomSampler(dataset, self._trace, **settings)
        if len(dataset) != self._trace.num_samples:
            rule = f"`train_dataset` must have the {self._trace.num_samples} samples of the TokenBudget's lengths"
            raise ValueError(f"{rule}, got {len(dataset)}")
        sampler = copy.copy(self._trace)  # for one run
        sampler.schedule = copy.deepcopy(sampler.schedule)
        sampler.schedule.lockstep = lockstep
        return sampler

    def set_initial_training_values(self, args: Any, dataloader: common.Steps) -> tuple[int, ...]:
        """Epochs, steps of the longest, samples of an epoch and of the run, batch size, steps again, and all steps."""
        schedule = dataloader.sampler.schedule
        if args.max_steps > 0:
            num_epochs, num_steps, most_steps = common.extent_of_steps(schedule, args.max_steps)
        else:
            try:
                num_epochs, num_steps, most_steps = common.extent_of_epochs(schedule, args.num_train_epochs)
            except ValueError as error:
                unset = f"`num_train_epochs` is {args.num_train_epochs:g}, `max_steps` is not set"
                raise ValueError(f"{error} ({unset})") from error
        is_known = num_epochs <= num_steps
        num_samples = schedule.samples_before(num_steps) if is_known else num_steps * self._ref_batchsize
        return num_epochs, most_steps, len(self.train_dataset), num_samples, self._ref_batchsize, most_steps, num_steps

    def create_optimizer(self, *args: Any) -> Optimizer:
        """The trainer's own optimizer, wrapped so that it follows the trace; with FSDP2 in :meth:`create_scheduler`."""
        if not isinstance(self.optimizer, UpdateCountingOptimizer):  # also if `model_init` has created another model
            inner = super().create_optimizer(*args)  # type: ignore[misc]
            self.optimizer = inner if self.is_fsdp_enabled else self._follow_trace(inner)
        return self.optimizer

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """The trainer's own scheduler; Accelerate has prepared the model then, and sharded it with FSDP2."""
        if self.is_fsdp_enabled and not isinstance(self.optimizer, UpdateCountingOptimizer):
            self.optimizer = self._follow_trace(taken_back(self.accelerator, self.optimizer))
        return super().create_scheduler(*args, **kwargs)  # type: ignore[misc]

    def _follow_trace(self, inner: Optimizer) -> UpdateCountingOptimizer:
        assert self.variable_sampler is not None
        self.variable_optimizer = CustomOptimizer(
            inner,
            self.variable_sampler,
            rule=copy.deepcopy(self._rule),  # it stores measurements
            ref_batchsize=self._ref_batchsize,
            clip_grad_norm=self.args.max_grad_norm or None,
            model=self.model,
            **self._options,
        )
        self.variable_optimizer.record_grad_norm(every=1)  # the trainer logs it
        return UpdateCountingOptimizer(self.variable_optimizer)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with ExitStack() as stack:
            if self.is_fsdp_enabled:
                save_sharded_model(self.accelerator, self.model, output_dir)
                stack.enter_context(self.optimizer.gathered())
                stack.enter_context(self._without_fsdp())
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with self._without_fsdp():
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]

    @contextmanager
    def _without_fsdp(self) -> Iterator[None]:
        """Let the trainer save and load the optimizer's state in full: its way for shards would lose the position."""
        is_enabled, self.is_fsdp_enabled = self.is_fsdp_enabled, False
        try:
            yield
        finally:
            self.is_fsdp_enabled = is_enabled

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], None]:
        """All minibatches of a step as one; tokens are counted per minibatch."""
        return [step for step in [next(epoch_iterator, None)] if step is not None], None

    def training_step(self, model: Any, inputs: Iterator[Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Run this rank's minibatches of a step, and update; the mean over all ranks of what it returns is the loss."""
        optimizer = self.variable_optimizer
        assert optimizer is not None
        weight_before, losses = optimizer.weight_done, torch.zeros((), device=self.args.device)
        self._flos_of_step = 0.0
        model.train()
        for minibatch in inputs:
            loss = self._run_minibatch(model, minibatch, optimizer)
            losses += 0.0 if optimizer.is_idle else loss  # padding does not count
        share = optimizer.weight_done - weight_before
        if not optimizer.minibatch_weights.is_weighted:
            share = optimizer.batch_size // optimizer.sampler.schedule.minibatch_size_of(optimizer.batch_size)
        return losses * (optimizer.sampler.num_replicas / max(share, 1))

    def _run_minibatch(self, model: Any, inputs: Any, optimizer: CustomOptimizer) -> torch.Tensor:
        """Forward, backward and ``optimizer.step()``; returns the sum of all token losses, or the loss."""
        trainer: Any = super()
        inputs = self._prepare_inputs(inputs)  # type: ignore[attr-defined]
        averages, self.args.average_tokens_across_devices = self.args.average_tokens_across_devices, False
        try:  # the optimizer averages at each update
            has_weights = getattr(self, "loss_is_scaled_for_ga", None) is not False
            weight = trainer.get_batch_samples(iter((inputs,)), 1, self.args.device)[1] if has_weights else None
            # at least 1: the loss of a minibatch without tokens would be 0 / 0
            divisor = None if weight is None else weight.clamp(min=1)
            with self.compute_loss_context_manager():  # type: ignore[attr-defined]
                found = self.compute_loss(model, dict(inputs), num_items_in_batch=divisor)  # type: ignore[attr-defined]
        finally:
            self.args.average_tokens_across_devices = averages
        loss: torch.Tensor = found if divisor is None else found * divisor
        self.accelerator.backward(loss)
        scaler = self.accelerator.scaler  # of fp16
        if scaler is None:
            optimizer.step(weight=weight)
        else:
            scaler.step(optimizer, weight=weight)
            scaler.update()
        self._flos_of_step += float(trainer.floating_point_ops(inputs))
        return loss.detach()

    def floating_point_ops(self, inputs: Any) -> float:
        """The floating point operations of the last step on this rank."""
        return self._flos_of_step

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, with the learning rate and batch size of the last step."""
        optimizer = self.variable_optimizer
        if optimizer is not None and "loss" in logs:
            own = {"learning_rate": optimizer.current_lr(), "batch_size": optimizer.batch_size}
            if optimizer.gradient_norm is not None:
                own["grad_norm"] = float(optimizer.gradient_norm)
            logs = {**logs, **own, "samples": optimizer.samples_done}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


class VariableBatchTrainer(VariableBatchMixin, Trainer):  # type: ignore[misc]
    """A ``Trainer`` whose global batch size follows a trace: steps, logs, evaluation and saving count updates.

        args = TrainingArguments("out", per_device_train_batch_size=8, learning_rate=1e-3, max_steps=1000)
        trainer = VariableBatchTrainer(
            model, args, train_dataset=dataset, trace="trace.csv", rule="adam", ref_batchsize=64
        )
        trainer.train()

    If the trainer counts the tokens of a batch, minibatches are weighted by tokens: the gradient of a step is the mean
    over the tokens of all ranks. The logged learning rate is the scheduler's after the rule is applied.

    Args:
        trace: the batch size of every step, summed over ranks; multiples of `per_device_train_batch_size`, the
            minibatch size. Or a policy, or a function of the situation; the run then needs `max_steps`. Or a
            :class:`TokenBudget`, with its own trace, in tokens.
        rule: maps the batch size of a step to the optimizer's settings; a rule or its name.
        ref_batchsize: the batch size for which `learning_rate` and the other training arguments were chosen.
        on_end: after the last row of the trace, ``"stop"``, ``"hold"`` the last size or ``"cycle"``.
        options: further options of the optimizer.
    """


class _Position(TrainerCallback):  # type: ignore[misc]
    """Sets the sampler's epochs as the trainer advances, and the trainer's position within them."""

    _optimizer: CustomOptimizer
    _epochs: Iterator[int]

    def __init__(self, trainer: VariableBatchMixin) -> None:
        self._trainer = trainer

    @property
    def _steps(self) -> range:
        return self._optimizer.sampler.schedule.steps(self._optimizer.epoch)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self._trainer.variable_optimizer is not None
        optimizer = self._optimizer = self._trainer.variable_optimizer
        if not state.global_step:
            optimizer.set_epoch(0)
        done = self._steps.start + optimizer.epoch_step
        if state.global_step != done:
            found = f"the checkpoint was saved after {state.global_step} steps, but the optimizer is at step {done}"
            raise RuntimeError(f"{found}: the checkpoint must contain the optimizer's state and use the same trace")
        self._epochs = optimizer.epochs(state.num_train_epochs)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps or next(self._epochs, None) is None:
            # the run was already complete: nothing is left to load
            self._optimizer.sampler.set_epoch(self._optimizer.epoch, len(self._steps))
        dataset = kwargs["train_dataloader"].loader.dataset
        if hasattr(dataset, "set_epoch"):  # which the trainer's own loader would call
            dataset.set_epoch(self._optimizer.epoch)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.epoch = self._optimizer.epoch + self._optimizer.epoch_step / len(self._steps)
