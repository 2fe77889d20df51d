"""VariableBatchTrainer: Transformers' Trainer with a variable batch size, whose steps are updates."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback

from variable_batch_size.cores.detect import communicator_for
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.integrations.accelerate import UpdateCountingOptimizer
from variable_batch_size.integrations.common import Extent, Steps, extent_of_epochs, extent_of_steps
from variable_batch_size.optim.lr_scheduler import epochs
from variable_batch_size.optim.optimizer import CustomOptimizer, Options
from variable_batch_size.optim.wrappers import wrapped_by_framework
from variable_batch_size.policies.policy import Policy, Situation
from variable_batch_size.rules.rule import Rule
from variable_batch_size.schedules.batch_sizes import OnEnd
from variable_batch_size.traces.trace import TraceLike

_ELSEWHERE = {
    "clip_grad_norm": "`max_grad_norm` of the training arguments says it",
    "model": "the trainer knows its model",
    "gradient_as_bucket_view": "the trainer drops gradients after each step",
}


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the optimizer, of which none is said elsewhere."""
    for name, reason in _ELSEWHERE.items():
        if name in options:
            raise ValueError(f"`options` must not have {name!r}: {reason}")
    return dict(options)


def refuse_settings(args: Any) -> None:
    """Raise if the training arguments have what the trace decides, or what would not be right with it."""
    wrong = {
        "gradient_accumulation_steps": (args.gradient_accumulation_steps > 1, "the trace says how many minibatches"),
        "fp16": (args.fp16, "its scaler would leave out minibatches; bf16 needs none"),
        "auto_find_batch_size": (args.auto_find_batch_size, "sizes of the trace are multiples of the minibatch"),
        "include_num_input_tokens_seen": (
            args.include_num_input_tokens_seen not in ("no", False),
            "`variable_optimizer.weight_done` counts tokens",
        ),
        "deepspeed": (bool(args.deepspeed), "it reduces gradients by itself"),
        "fsdp": (bool(args.fsdp), "it reduces gradients by itself"),
        "train_sampling_strategy": (
            getattr(args, "train_sampling_strategy", "random") != "random",
            "the trace's sampler deals the samples",
        ),
    }
    for name, (is_wrong, reason) in wrong.items():
        if is_wrong:
            raise ValueError(f"`{name}` must not be set, got {getattr(args, name)!r}: {reason}")
    if args.n_gpu > 1:
        raise ValueError(f"one process must have one device, got {args.n_gpu}: start it with torchrun, one for each")


def refuse_other_processes(sampler: CustomSampler, args: Any) -> None:
    """Raise if trainer and sampler do not take this for the same process."""
    if (sampler.rank, sampler.num_replicas) != (args.process_index, args.world_size):
        raise ValueError(
            f"the trainer takes this for process {args.process_index} of {args.world_size}, but it is "
            f"{sampler.rank} of {sampler.num_replicas}: start it with torchrun, which sets RANK and WORLD_SIZE"
        )


def refuse_other_data(sampler: CustomSampler, dataset: Sized, args: Any) -> None:
    """Raise if trainer and sampler, which stays the same from one ``train()`` to the next, have different data."""
    for name, was, now in (
        ("len(train_dataset)", sampler.dataset_size, len(dataset)),
        ("per_device_train_batch_size", sampler.minibatch_size, args.per_device_train_batch_size),
    ):
        if was != now:
            raise ValueError(f"`{name}` was {was} when training began and is {now}: make another trainer")


_OF_LOADER = ("collate_fn", "num_workers", "pin_memory", "worker_init_fn", "persistent_workers", "prefetch_factor")


class VariableBatchMixin:
    """What makes any ``Trainer`` one with a variable batch size: put it before that in the bases of a class.

    It takes the arguments of :class:`VariableBatchTrainer`, and all others are the trainer's.

    Attributes:
        variable_optimizer: the optimizer of the library, around the trainer's own; None before ``train()``.
        variable_sampler: what deals the minibatches; None before ``train()``.
    """

    args: Any
    accelerator: Any
    model: torch.nn.Module
    optimizer: Any
    state: Any
    train_dataset: Any

    def __init__(
        self,
        *args: Any,
        trace: TraceLike | Policy | Callable[[Situation], float],
        rule: Rule | Sequence[Rule],
        ref_batchsize: int,
        on_end: OnEnd = "stop",
        options: Options | None = None,
        callbacks: list[Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._trace, self._rule, self._ref_batchsize, self._on_end = trace, rule, ref_batchsize, on_end
        self._options = checked_options(options or {})
        self.variable_optimizer: CustomOptimizer | None = None
        self.variable_sampler: CustomSampler | None = None
        self._flos_of_step = 0.0
        super().__init__(*args, callbacks=[_Position(self), *(callbacks or [])], **kwargs)  # type: ignore[call-arg]
        refuse_settings(self.args)
        # a run that goes on finds its place by itself, and the trainer must not skip what the loader leaves out
        self.args.ignore_data_skip = True

    def get_train_dataloader(self) -> Any:
        """The trainer's own loader, with the minibatches of this process, those of a step together."""
        if self.train_dataset is not None and isinstance(self.train_dataset, IterableDataset):
            raise ValueError(
                "`train_dataset` must have a length, got an IterableDataset: train it in a loop of your own"
            )
        own = super().get_train_dataloader()  # type: ignore[misc]
        if self.variable_sampler is None or not isinstance(self.optimizer, UpdateCountingOptimizer):
            self.variable_sampler = CustomSampler(
                own.dataset,
                trace=self._trace,
                minibatch_size=self.args.per_device_train_batch_size,
                seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
                on_end=self._on_end,
            )
        refuse_other_processes(self.variable_sampler, self.args)
        refuse_other_data(self.variable_sampler, own.dataset, self.args)
        # with a generator of its own a loader draws nothing from that of the run when it is set up, which would not be
        # as it was where the run goes on
        generator = torch.Generator().manual_seed(self.variable_sampler.seed)
        settings = {name: getattr(own, name) for name in _OF_LOADER}
        loader: DataLoader[Any] = DataLoader(
            own.dataset, batch_sampler=self.variable_sampler, generator=generator, **settings
        )
        return Steps(loader, self.variable_sampler)

    def set_initial_training_values(self, args: Any, dataloader: Steps) -> tuple[int, int, int, int, int, int, int]:
        """Epochs, steps of the longest, samples of an epoch and of the run, batch size, steps again, and all steps."""
        schedule = dataloader.sampler.schedule
        extent = self._extent(args, dataloader)
        is_known = extent.num_epochs < extent.num_steps + 1
        num_samples = schedule.samples_before(extent.num_steps) if is_known else extent.num_steps * self._ref_batchsize
        size = len(self.train_dataset)
        return (
            extent.num_epochs,
            extent.most_steps,
            size,
            num_samples,
            self._ref_batchsize,
            extent.most_steps,
            extent.num_steps,
        )

    def _extent(self, args: Any, dataloader: Steps) -> Extent:
        schedule = dataloader.sampler.schedule
        if args.max_steps > 0:
            return extent_of_steps(schedule, args.max_steps)
        try:
            return extent_of_epochs(schedule, args.num_train_epochs)
        except ValueError as error:
            raise ValueError(
                f"{error} (`num_train_epochs` is {args.num_train_epochs:g}, `max_steps` is not set)"
            ) from error

    def create_optimizer(self, *args: Any) -> Optimizer:
        """The trainer's own optimizer, made to update as the trace says."""
        if not isinstance(self.optimizer, UpdateCountingOptimizer):  # also where `model_init` has made another model
            assert self.variable_sampler is not None
            self.variable_optimizer = CustomOptimizer(
                super().create_optimizer(*args),  # type: ignore[misc]
                self.variable_sampler,
                rule=copy.deepcopy(self._rule),  # which notes what it measures
                ref_batchsize=self._ref_batchsize,
                clip_grad_norm=self.args.max_grad_norm or None,
                model=self.model,
                **self._options,
            )
            self.variable_optimizer.record_grad_norm(every=1)  # as the trainer does
            self.optimizer = UpdateCountingOptimizer(self.variable_optimizer)
        return self.optimizer

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], None]:
        """The minibatches of a step as one; their tokens are counted as each is run."""
        return [step for step in [next(epoch_iterator, None)] if step is not None], None

    def training_step(self, model: Any, inputs: Iterator[Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Run all minibatches that this process has in a step, and update.

        Returns:
            What the mean over all processes is the mean loss of the step of.
        """
        optimizer = self.variable_optimizer
        assert optimizer is not None
        weight_before, losses = optimizer.weight_done, torch.zeros((), device=self.args.device)
        self._flos_of_step = 0.0
        model.train()
        for minibatch in inputs:
            losses += self._run_minibatch(model, minibatch, optimizer)
        if optimizer.is_idle:
            return torch.zeros_like(losses)
        share = optimizer.weight_done - weight_before
        if not optimizer.minibatch_weights.is_weighted:
            share = optimizer.batch_size // optimizer.sampler.minibatch_size
        return losses * (optimizer.sampler.num_replicas / max(share, 1))

    def _run_minibatch(self, model: Any, inputs: Any, optimizer: CustomOptimizer) -> torch.Tensor:
        """Forward and backward pass, and the optimizer's step; the sum of the losses of all tokens, or the loss."""
        inputs = self._prepare_inputs(inputs)  # type: ignore[attr-defined]
        with _set_for_now(self.args, average_tokens_across_devices=False):  # the optimizer does so, at each update
            weight = self._tokens_of(inputs)
            # at least 1, as the loss of a minibatch without a token is 0 / 0 otherwise
            divisor = None if weight is None else weight.clamp(min=1)
            with self.compute_loss_context_manager():  # type: ignore[attr-defined]
                loss = self.compute_loss(model, dict(inputs), num_items_in_batch=divisor)  # type: ignore[attr-defined]
        if divisor is not None:
            loss = loss * divisor
        self.accelerator.backward(loss)
        optimizer.step(weight=weight)
        self._flos_of_step += float(super().floating_point_ops(inputs))  # type: ignore[misc]
        found: torch.Tensor = loss.detach()
        return found

    def _tokens_of(self, inputs: Any) -> torch.Tensor | None:
        """What a minibatch weighs; None if all weigh the same, as where `loss_is_scaled_for_ga` is False."""
        if getattr(self, "loss_is_scaled_for_ga", None) is False:
            return None
        _, weight = super().get_batch_samples(iter((inputs,)), 1, self.args.device)  # type: ignore[misc]
        found: torch.Tensor | None = weight
        return found

    def floating_point_ops(self, inputs: Any) -> float:
        """Those of the latest step on this process."""
        return self._flos_of_step

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, with what the latest step was made with."""
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
            model, args, train_dataset=dataset, trace="trace.csv", rule=vbs.rules.AdamRule(), ref_batchsize=64
        )
        trainer.train()

    Where the trainer counts the tokens of a batch, minibatches weigh by their tokens: the gradient of a step is the
    mean over the tokens of all processes. The logged learning rate is what the rule has made of the scheduler's.

    Args:
        trace: the batch size of every step, over all processes; multiples of `per_device_train_batch_size`, which is
            the minibatch. Or a policy, or a function of the situation; the run then needs `max_steps`.
        rule: what the batch size of a step makes of the settings.
        ref_batchsize: the batch size at which `learning_rate` and the other training arguments are right.
        on_end: what follows the last row of the trace: ``"stop"``, ``"hold"`` the last size or ``"cycle"``.
        options: further options of the optimizer.
    """


class _Position(TrainerCallback):  # type: ignore[misc]
    """Goes through the epochs with the trainer, and says where it stands in them."""

    def __init__(self, trainer: VariableBatchMixin) -> None:
        self._trainer = trainer
        self._epochs: Iterator[int] = iter(())

    @property
    def _optimizer(self) -> CustomOptimizer:
        assert self._trainer.variable_optimizer is not None
        return self._trainer.variable_optimizer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = self._optimizer
        parameters = list(optimizer.parameters())
        wrapped_by_framework(
            optimizer._wrappers, communicator_for(parameters)
        )  # the model was wrapped after it was made
        if not state.global_step:
            optimizer.set_epoch(0)
        steps = optimizer.sampler.schedule.steps(optimizer.epoch)
        if state.global_step != steps.start + optimizer.epoch_step:
            raise RuntimeError(
                f"the checkpoint was saved after {state.global_step} steps, and the optimizer stands behind "
                f"{steps.start + optimizer.epoch_step}: it must have the optimizer's state, and be of the same trace"
            )
        self._epochs = epochs(optimizer, state.num_train_epochs)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps or next(self._epochs, None) is None:
            optimizer = self._optimizer  # whose run was complete: nothing is left to be loaded
            last = len(optimizer.sampler.schedule.steps(optimizer.epoch))
            optimizer.sampler.set_epoch(optimizer.epoch, last)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = self._optimizer
        steps = optimizer.sampler.schedule.steps(optimizer.epoch)
        state.epoch = optimizer.epoch + optimizer.epoch_step / len(steps)


@contextmanager
def _set_for_now(thing: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(thing, name) for name in values}
    for name, value in values.items():
        setattr(thing, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(thing, name, value)
