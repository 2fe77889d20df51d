"""VariableBatchModel: a Keras model on the torch backend whose ``fit`` has a variable batch size."""

import io
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler

from variable_batch_size.checks import imported_extra
from variable_batch_size.cores.detect import communicator_for
from variable_batch_size.cores.launch import environment
from variable_batch_size.data.evaluation import EvaluationLoader
from variable_batch_size.data.sampler import MinibatchSource
from variable_batch_size.integrations.common import Steps, load_state, refuse_open_steps, state_of
from variable_batch_size.optim.buffers import share_buffers
from variable_batch_size.optim.consistency import check_same_on_all_ranks
from variable_batch_size.optim.lr_scheduler import Stateful, load_schedulers, state_of_schedulers
from variable_batch_size.optim.optimizer import CustomOptimizer

_BACKEND = "KERAS_BACKEND"

if "keras" not in sys.modules and os.environ.get(_BACKEND, "torch") != "torch":
    raise RuntimeError(f"{_BACKEND} must be torch, got {os.environ[_BACKEND]}")
# Keras reads it once; its own default is tensorflow
with (
    imported_extra("keras", "variable_batch_size.integrations.keras needs keras", "keras"),
    environment({_BACKEND: "torch"}),
):
    import keras

if keras.backend.backend() != "torch":
    found = f"Keras was imported with the {keras.backend.backend()} backend, but must use torch"
    raise RuntimeError(f"{found}: import variable_batch_size.integrations.keras first, or set {_BACKEND}=torch")

logger = logging.getLogger(__name__)

_STATE_KEY = "variable_batch_size"
_SAVERS = (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)
_WRITERS = (*_SAVERS, keras.callbacks.CSVLogger, keras.callbacks.RemoteMonitor, keras.callbacks.TensorBoard)


class VariableBatchModel(keras.Model):  # type: ignore[misc]
    """A ``keras.Model`` that is compiled with an optimizer of this library. Each of its batches is an update.

        model = VariableBatchModel(inputs, outputs)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = vbs.DataLoader(dataset, trace="0:64 20:128 40:256", minibatch_size=32)
        optimizer = vbs.Optimizer(inner, loader, rule="linear", ref_batchsize=128, model=model)
        model.compile(optimizer, loss="sparse_categorical_crossentropy")
        model.fit(loader, epochs=10)

    Epochs are those of the loader. The progress bar and callbacks count updates, and the history has one entry per
    epoch. Weights saved by Keras include the state of the optimizer and its schedulers, and ``fit`` resumes from it.

    On several processes each must call ``fit``, with the same arguments. Losses and metrics are those of all of them,
    and rank 0 writes files. Weights that are not trained, such as the statistics of BatchNormalization, are buffers of
    the model and not parameters: each rank has its own within an epoch, and those of rank 0 after it.
    """

    variable_optimizer: CustomOptimizer | None = None
    variable_schedulers: Sequence[Stateful] = ()
    _ranks: "_Ranks | None" = None  # within a fit on several of them

    def compile(
        self, optimizer: CustomOptimizer, loss: Any = None, *, schedulers: Sequence[Stateful] = (), **kwargs: Any
    ) -> None:
        """Set the optimizer and the loss; ``metrics=`` and other arguments as for ``keras.Model``.

        Args:
            optimizer: of this library, with the model's trainable variables.
            loss: as for ``keras.Model``.
            schedulers: of torch, which a callback steps; they are saved and loaded with the weights.
        """
        if not isinstance(optimizer, CustomOptimizer):
            raise ValueError(f"`optimizer` must be an optimizer of this library, got {type(optimizer).__name__}")
        _check_sampler(optimizer.sampler)
        if set(optimizer.parameters()) != {variable.value for variable in self.trainable_variables}:
            advice = "pass (p for p in model.parameters() if p.requires_grad) to the optimizer of torch"
            raise ValueError(f"`optimizer` must have the model's trainable variables and no others: {advice}")
        if "float16" in {layer.compute_dtype for layer in self._flatten_layers()}:
            raise ValueError("layers must not compute in float16, which needs a loss scale: use bfloat16")
        if kwargs.get("jit_compile") not in (None, False, "auto"):
            raise ValueError("`jit_compile` must be False: the number of minibatches in a step varies")
        norms = [layer for layer in self._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]
        statistics = [variable for layer in norms for variable in layer.non_trainable_variables]
        # fit sets the seeds for each minibatch, and statistics have no influence on the loss
        optimizer.ignored_state += [f"*{variable.path}" for variable in [*_seeds_of(self), *statistics]]
        super().compile(optimizer="sgd", loss=loss, **{**kwargs, "jit_compile": False})
        self.optimizer = None  # callbacks that set its learning rate then raise
        self.variable_optimizer, self.variable_schedulers = optimizer, tuple(schedulers)

    def fit(self, x: Any = None, *, epochs: int = 1, verbose: Any = "auto", callbacks: Any = None, **other: Any) -> Any:
        """Train until `epochs` epochs are complete, including those before a loaded state.

        Args:
            x: the loader of the optimizer's sampler.
            epochs: number of epochs of the whole run.
            verbose: as for ``keras.Model``, as are `callbacks`. On several ranks, it is 0 on all but the first.
            other: `validation_data`, `validation_freq`, `validation_steps` or `validation_batch_size` of the same.
        """
        optimizer = self._checked(x, other)
        is_first, has_several = optimizer.sampler.rank == 0, optimizer.sampler.num_replicas > 1
        verbose = verbose if is_first else 0
        settings: dict[str, Any] = {"verbose": verbose, "epochs": epochs}
        self._ranks = _Ranks(self, optimizer, {**other, "epochs": epochs}) if has_several else None
        try:
            run = _Run(_callbacks_of(callbacks, self._ranks, is_first=is_first), self, settings)
            return self._fit_epochs(x, epochs, run, settings, {**other, "callbacks": run, "shuffle": False})
        finally:
            self._ranks = None

    def _fit_epochs(self, x: Any, epochs: int, run: "_Run", settings: Mapping[str, Any], other: Any) -> Any:
        optimizer = self.variable_optimizer
        assert optimizer is not None
        super(_Run, run).on_train_begin()  # may load a state
        if optimizer.sampler.rank > 0:
            run.callbacks = [one for one in run.callbacks if not isinstance(one, _SAVERS)]  # these have loaded it
        steps_before = optimizer.steps_made
        for epoch in optimizer.epochs(epochs):
            steps = _StepLoader(x, optimizer)
            run.set_params({**settings, "steps": len(steps)})
            self._initial_epoch = None  # set by a callback that has loaded a state; the optimizer has the position
            # one epoch at a time, because Keras assumes that all epochs have the same number of batches
            super().fit(steps, initial_epoch=epoch, epochs=epoch + 1, verbose=settings["verbose"], **other)
            if self.stop_training:
                break
        if optimizer.steps_made == steps_before and optimizer.sampler.rank == 0:
            logger.warning("nothing left to train: `epochs` includes completed epochs, got %d", epochs)
        super(_Run, run).on_train_end(run.latest)
        return self.history

    def _checked(self, loader: Any, kwargs: Mapping[str, Any]) -> CustomOptimizer:
        if self.variable_optimizer is None:
            raise RuntimeError("call compile() with an optimizer of this library before fit()")
        decided = set(kwargs) - {"validation_data", "validation_freq", "validation_steps", "validation_batch_size"}
        if decided:
            raise ValueError(f"fit() does not accept {sorted(decided)}: the loader and the trace determine them")
        if getattr(loader, "batch_sampler", None) is not self.variable_optimizer.sampler:
            rule = "`x` must be a DataLoader(dataset, batch_sampler=sampler) with the optimizer's sampler"
            raise ValueError(f"{rule}, got {type(loader).__name__}")
        validation = kwargs.get("validation_data")
        is_part = isinstance(validation, EvaluationLoader) or isinstance(
            getattr(validation, "sampler", None), DistributedSampler
        )
        if is_part and self.variable_optimizer.sampler.num_replicas > 1:
            found = f"a {type(validation).__name__} of this rank's part"
            raise ValueError(f"`validation_data` must be all of the data on each rank, got {found}")
        is_scheduled = any("initial_lr" in group for group in self.variable_optimizer.param_groups)
        if is_scheduled and not self.variable_schedulers:
            advice = "pass it to compile(…, schedulers=[…])"
            raise ValueError(f"a scheduler sets the learning rate, but would not be saved: {advice}")
        return self.variable_optimizer

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The parameters that are trained."""
        return (pair for pair in super().named_parameters(*args, **kwargs) if pair[1].requires_grad)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """What else belongs to the model, such as BatchNormalization's statistics."""
        yield from super().named_buffers(*args, **kwargs)
        yield from (pair for pair in super().named_parameters(*args, **kwargs) if not pair[1].requires_grad)

    def train_step(self, data: Iterator[Any]) -> Any:
        """Run this rank's minibatches of a step, and update."""
        optimizer, ranks = self.variable_optimizer, self._ranks
        assert optimizer is not None
        kept = self.non_trainable_weights if optimizer.skip_nonfinite else []
        before = [variable.value.clone() for variable in kept]
        if ranks is None:
            for minibatch in data:
                self._run_minibatch(minibatch)
        else:
            with ranks.step():
                for minibatch in data:
                    with ranks.minibatch() as is_padding:
                        self._run_minibatch(minibatch, training=not is_padding)
        with torch.no_grad():
            if optimizer.updated:
                for variable in self.trainable_variables:  # as an optimizer of Keras does after each update
                    if variable.constraint is not None:
                        variable.assign(variable.constraint(variable))
            else:  # BatchNorm's statistics are in no module's buffers, which the optimizer would restore
                for variable, value in zip(kept, before, strict=True):
                    variable.assign(value)
        return self.get_metrics_result()

    def _run_minibatch(self, minibatch: Any, *, training: bool = True) -> None:
        optimizer = self.variable_optimizer
        assert optimizer is not None
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(minibatch)
        y_pred = self(x, training=training) if self._call_has_training_arg else self(x)
        loss = self.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
        loss.backward()
        optimizer.step()
        self._loss_tracker.update_state(loss.detach())
        with torch.no_grad():
            self.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

    def _symbolic_build(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: it would consume the first minibatches of the loader, and metrics are built on first use."""

    def save_own_variables(self, store: Any) -> None:
        super().save_own_variables(store)
        if self.variable_optimizer is not None:
            buffer = io.BytesIO()
            schedulers = state_of_schedulers(self.variable_schedulers)
            seeds = [_value(seed) for seed in _seeds_of(self)]  # which Keras does not save
            state = {"optimizer": state_of(self.variable_optimizer), "schedulers": schedulers, "seeds": seeds}
            torch.save(state, buffer)
            store[_STATE_KEY] = np.frombuffer(buffer.getvalue(), dtype=np.uint8)

    def load_own_variables(self, store: Any) -> None:
        super().load_own_variables({name: store[name] for name in store.keys() if name != _STATE_KEY})  # noqa: SIM118
        if self.variable_optimizer is not None and _STATE_KEY in store.keys():  # noqa: SIM118
            state = torch.load(io.BytesIO(np.asarray(store[_STATE_KEY]).tobytes()), weights_only=True)
            saved, here = len(state["schedulers"]), len(self.variable_schedulers)
            if saved != here:
                rule = f"`schedulers` of compile() must be {saved}, as when the weights were saved"
                raise ValueError(f"{rule}, got {here}")
            load_state(self.variable_optimizer, state["optimizer"])
            load_schedulers(self.variable_schedulers, state["schedulers"])
            for seed, value in zip(_seeds_of(self), state.get("seeds", ()), strict=False):
                seed.assign(value)


class _StepLoader(DataLoader[Any]):
    """The steps of an epoch, as a DataLoader for Keras."""

    def __init__(self, loader: DataLoader[Any], optimizer: CustomOptimizer) -> None:
        super().__init__(loader.dataset, batch_size=None)
        self._steps = Steps(loader, optimizer.sampler)

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter(self._steps)


class _Run(keras.callbacks.CallbackList):  # type: ignore[misc]
    """The callbacks of a run whose epochs are fitted one by one, but which begins and ends once."""

    latest: Mapping[str, Any] | None = None  # of the logs of an epoch

    def __init__(self, callbacks: list[Any], model: VariableBatchModel, settings: Mapping[str, Any]) -> None:
        more: Any = {"add_history": True, "add_progbar": settings["verbose"] != 0, "steps": None, **settings}
        super().__init__(callbacks, model=model, **more)

    def on_train_begin(self, logs: Any = None) -> None:
        """Ignored, as is the end: both are called for every epoch."""

    on_train_end = on_train_begin

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.latest = logs if self.model._ranks is None else self.model._ranks.of_first(logs)
        super().on_epoch_end(epoch, self.latest)


def _callbacks_of(callbacks: Any, ranks: "_Ranks | None", *, is_first: bool) -> list[Any]:
    """The callbacks that this rank runs, in their order: savers save what the others change, and ranks then agree."""
    own = keras.tree.flatten(callbacks) if callbacks else []
    if not is_first:  # which loads a state on all ranks
        own = [one for one in own if not isinstance(one, _WRITERS) or isinstance(one, keras.callbacks.BackupAndRestore)]
    return [*sorted(own, key=lambda one: isinstance(one, _SAVERS)), *([] if ranks is None else [ranks])]


class _Ranks(keras.callbacks.Callback):  # type: ignore[misc]
    """Makes metrics, random seeds and the decision to stop the same on all ranks; the last callback of each.

    Its collectives are at the beginning of a fit, after each update and at the end of each epoch, where all ranks are.
    Evaluation, minibatches and files have none.
    """

    def __init__(self, model: VariableBatchModel, optimizer: CustomOptimizer, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self._optimizer, self._sampler = optimizer, optimizer.sampler
        self._communicator = communicator_for(optimizer.parameters(), optimizer.sampler.process_group)
        self._device = next(optimizer.parameters()).device
        data = settings.get("validation_data")
        self._facts = {**settings, "validation_data": None if data is None else type(data).__name__}
        self._seeds = _seeds_of(model)
        self._draws = [torch.tensor([0, 1], device=self._device)] * len(self._seeds)  # of a minibatch, once it is known
        self._has_drawn = False

    def on_train_begin(self, logs: Any = None) -> None:
        """After a state may have been loaded: all ranks must have the same."""
        optimizer = self._optimizer
        position = f"{optimizer.steps_done} steps, epoch {optimizer.epoch}, step {optimizer.epoch_step}"
        facts = {name: self._facts.get(name) for name in ("epochs", "validation_data", "validation_freq")}
        tensors = [*self.model.parameters(), *self.model.buffers()]
        self._communicator.flush_before_collective()
        check_same_on_all_ranks({"what is done": position, **facts}, tensors, self._communicator)()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._agree_to_stop()
        if self.model.stop_training or self._optimizer.has_completed_epoch:
            share_buffers(self.model, self._sampler.process_group)  # validation follows

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._agree_to_stop()

    def _agree_to_stop(self) -> None:
        is_stopping = torch.tensor([float(self.model.stop_training)], device=self._device)
        self.model.stop_training = bool(self._communicator.total(is_stopping) > 0)

    def of_first(self, logs: Any) -> Any:
        """The logs of rank 0, so that callbacks decide alike: ranks may round differently."""
        tensors = [torch.as_tensor(value, device=self._device).double() for value in keras.tree.flatten(logs)]
        self._communicator.flush_before_collective()
        self._communicator.broadcast(tensors)
        values = [value.item() if value.numel() == 1 else value.cpu().numpy() for value in tensors]
        return keras.tree.pack_sequence_as(logs, values)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Within, this rank runs its minibatches of a step. Then metrics and seeds are as if it had run all of them."""
        size = self._optimizer.get_bs()
        self._number, self._place = size // self._sampler.schedule.minibatch_size_of(size), self._sampler.rank
        self._first_seeds, before = [_value(seed) for seed in self._seeds], self._metrics()
        yield
        self._draw_as(self._number)
        variables = self.model.metrics_variables
        starts = [before.get(id(variable), torch.zeros_like(_value(variable))) for variable in variables]
        added = [_value(variable).double() - start for variable, start in zip(variables, starts, strict=True)]
        total = self._communicator.total(torch.cat([change.flatten() for change in added])).to(self._device)
        parts = torch.split(total, [change.numel() for change in added])
        for variable, start, part in zip(variables, starts, parts, strict=True):
            variable.assign(start + part.view_as(start))

    @contextmanager
    def minibatch(self) -> Iterator[bool]:
        """Within, run the next minibatch; yields whether it is padding, which leaves metrics as they are, but built."""
        is_padding, before = self._place >= self._number, self._metrics()
        self._draw_as(self._place)
        seeds = [_value(seed) for seed in self._seeds]
        yield is_padding
        if not (self._has_drawn or is_padding):
            self._draws = [_value(seed) - start for seed, start in zip(self._seeds, seeds, strict=True)]
            self._has_drawn = True
        for variable in self.model.metrics_variables if is_padding else ():
            variable.assign(before.get(id(variable), torch.zeros_like(_value(variable))))
        self._place += self._sampler.num_replicas

    def _draw_as(self, place: int) -> None:
        """Set the seeds to those that one process has at a minibatch of the step, if each draws equally often."""
        for seed, first, draws in zip(self._seeds, self._first_seeds, self._draws, strict=True):
            seed.assign(first + place * draws)

    def _metrics(self) -> dict[int, torch.Tensor]:
        return {id(variable): _value(variable) for variable in self.model.metrics_variables}


def _value(variable: Any) -> torch.Tensor:
    """A copy of the value of a variable."""
    copied: torch.Tensor = variable.value.detach().clone()
    return copied


def _seeds_of(model: VariableBatchModel) -> list[Any]:
    """The states of the seed generators of layers."""
    return [variable for variable in model.variables if variable.name == "seed_generator_state"]


def _check_sampler(sampler: MinibatchSource) -> None:
    """Raise for steps whose minibatches are not known in advance."""
    refuse_open_steps(sampler, "Keras")
    for name, is_wrong in (("assign", sampler.shares is not None), ("elastic", sampler.is_elastic)):
        if is_wrong:
            reason = "which needs to know each rank's minibatches of a step"
            raise ValueError(f"`{name}` must not be given with Keras, {reason}")
