"""VariableBatchModel: a Keras model on the torch backend whose ``fit`` has a variable batch size."""

import io
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from variable_batch_size.checks import imported_extra
from variable_batch_size.cores.launch import environment
from variable_batch_size.integrations.common import Steps, load_state, refuse_open_steps, state_of
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
    found = f"Keras was imported with the {keras.backend.backend()} backend, and must use torch"
    raise RuntimeError(f"{found}: import variable_batch_size.integrations.keras first, or set {_BACKEND}=torch")

logger = logging.getLogger(__name__)

_STATE_KEY = "variable_batch_size"
_SAVERS = (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)


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
    """

    variable_optimizer: CustomOptimizer | None = None
    variable_schedulers: Sequence[Stateful] = ()

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
        refuse_open_steps(optimizer.sampler, "Keras")
        if optimizer.sampler.num_replicas > 1:
            raise ValueError(f"Keras trains in one process, got a sampler for {optimizer.sampler.num_replicas} ranks")
        if set(optimizer.parameters()) != {variable.value for variable in self.trainable_variables}:
            advice = "pass (p for p in model.parameters() if p.requires_grad) to the optimizer of torch"
            raise ValueError(f"`optimizer` must have the model's trainable variables and no others: {advice}")
        if "float16" in {layer.compute_dtype for layer in self._flatten_layers()}:
            raise ValueError("layers must not compute in float16, which needs a loss scale: use bfloat16")
        if kwargs.get("jit_compile") not in (None, False, "auto"):
            raise ValueError("`jit_compile` must be False: the number of minibatches in a step varies")
        super().compile(optimizer="sgd", loss=loss, **{**kwargs, "jit_compile": False})
        self.optimizer = None  # callbacks that set its learning rate then raise
        self.variable_optimizer, self.variable_schedulers = optimizer, tuple(schedulers)

    def fit(self, x: Any = None, *, epochs: int = 1, verbose: Any = "auto", callbacks: Any = None, **other: Any) -> Any:
        """Train until `epochs` epochs are complete, including those before a loaded state.

        Args:
            x: the loader of the optimizer's sampler.
            epochs: number of epochs of the whole run.
            verbose: as for ``keras.Model``, and `callbacks`, too.
            other: `validation_data`, `validation_freq`, `validation_steps` or `validation_batch_size` of the same.
        """
        optimizer = self._checked(x, other)
        settings: dict[str, Any] = {"verbose": verbose, "epochs": epochs}
        run = _Run(callbacks, add_history=True, add_progbar=verbose != 0, model=self, steps=None, **settings)
        run.callbacks.sort(key=lambda callback: isinstance(callback, _SAVERS))  # to save what the others change
        super(_Run, run).on_train_begin()  # may load a state
        other |= {"verbose": verbose, "callbacks": run, "shuffle": False}
        steps_before = optimizer.steps_made
        for epoch in optimizer.epochs(epochs):
            steps = _StepLoader(x, optimizer)
            run.set_params({**settings, "steps": len(steps)})
            self._initial_epoch = None  # set by a callback that has loaded a state; the optimizer has the position
            # one epoch at a time, because Keras assumes that all epochs have the same number of batches
            super().fit(steps, initial_epoch=epoch, epochs=epoch + 1, **other)
            if self.stop_training:
                break
        if optimizer.steps_made == steps_before:
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
        is_scheduled = any("initial_lr" in group for group in self.variable_optimizer.param_groups)
        if is_scheduled and not self.variable_schedulers:
            advice = "pass it to compile(…, schedulers=[…])"
            raise ValueError(f"a scheduler sets the learning rate, but would not be saved: {advice}")
        return self.variable_optimizer

    def train_step(self, data: Iterator[Any]) -> Any:
        """Run all minibatches of a step, and update."""
        optimizer = self.variable_optimizer
        assert optimizer is not None
        kept = self.non_trainable_weights if optimizer.skip_nonfinite else []
        before = [variable.value.clone() for variable in kept]
        for minibatch in data:
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(minibatch)
            y_pred = self(x, training=True) if self._call_has_training_arg else self(x)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
            loss.backward()
            optimizer.step()
            self._loss_tracker.update_state(loss.detach())
            with torch.no_grad():
                self.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        with torch.no_grad():
            if optimizer.updated:
                for variable in self.trainable_variables:  # as an optimizer of Keras does after each update
                    if variable.constraint is not None:
                        variable.assign(variable.constraint(variable))
            else:  # BatchNorm's statistics are not buffers here, which the optimizer would restore
                for variable, value in zip(kept, before, strict=True):
                    variable.assign(value)
        return self.get_metrics_result()

    def _symbolic_build(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: it would consume the first minibatches of the loader, and metrics are built on first use."""

    def save_own_variables(self, store: Any) -> None:
        super().save_own_variables(store)
        if self.variable_optimizer is not None:
            buffer = io.BytesIO()
            schedulers = state_of_schedulers(self.variable_schedulers)
            torch.save({"optimizer": state_of(self.variable_optimizer), "schedulers": schedulers}, buffer)
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

    def on_train_begin(self, logs: Any = None) -> None:
        """Ignored, as the end: called for every epoch."""

    on_train_end = on_train_begin

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.latest = logs
        super().on_epoch_end(epoch, logs)
