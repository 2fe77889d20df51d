"""VariableBatchModel: a Keras model on the torch backend whose ``fit`` has a variable batch size."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import torch
from torch.utils.data import DataLoader

from variable_batch_size.integrations.common import Steps, load_state, state_of
from variable_batch_size.optim.lr_scheduler import epochs as epochs_of
from variable_batch_size.optim.optimizer import CustomOptimizer

logger = logging.getLogger(__name__)

_STATE_KEY = "variable_batch_size"


class VariableBatchModel(keras.Model):  # type: ignore[misc]
    """A ``keras.Model`` that is compiled with an optimizer of this library, and whose batches are its updates.

        model = VariableBatchModel(inputs, outputs)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=128, model=model)
        model.compile(optimizer, loss="sparse_categorical_crossentropy")
        model.fit(DataLoader(dataset, batch_sampler=sampler), epochs=10)

    Epochs are those of the sampler. The progress bar and callbacks count updates, and the history has one entry for
    each epoch. Weights that Keras saves have the optimizer's state with them, and ``fit`` goes on from there.
    """

    variable_optimizer: CustomOptimizer | None = None

    def compile(self, optimizer: CustomOptimizer, loss: Any = None, **kwargs: Any) -> None:
        """Say what trains the model, and by which loss; ``metrics=`` and others as for ``keras.Model``."""
        if keras.backend.backend() != "torch":
            raise RuntimeError(
                f"Keras must run on torch, got {keras.backend.backend()}: set KERAS_BACKEND=torch before it is imported"
            )
        if not isinstance(optimizer, CustomOptimizer):
            raise ValueError(f"`optimizer` must be an optimizer of this library, got {type(optimizer).__name__}")
        if optimizer.sampler.num_replicas > 1:
            raise ValueError(f"a Keras model trains in one process, got a sampler for {optimizer.sampler.num_replicas}")
        if set(optimizer.parameters()) != {variable.value for variable in self.trainable_variables}:
            raise ValueError(
                "`optimizer` must have the model's trainable variables, and no others: torch.optim.…(p for p in "
                "model.parameters() if p.requires_grad)"
            )
        if "float16" in {layer.compute_dtype for layer in self._flatten_layers()}:
            raise ValueError(
                "`dtype` of a layer must not compute in float16, which needs a loss scale; bfloat16 does not"
            )
        if kwargs.get("jit_compile") not in (None, False, "auto"):
            raise ValueError("`jit_compile` must be False: a step runs as many minibatches as the trace says")
        super().compile(optimizer="sgd", loss=loss, **{**kwargs, "jit_compile": False})
        self.optimizer = None  # callbacks that would set its learning rate then say that they cannot
        self.variable_optimizer = optimizer

    def fit(
        self,
        x: Any = None,
        *,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_data: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Train until so many epochs are done, those before a saved state included.

        Args:
            x: the loader of the optimizer's sampler.
            epochs: of the whole run.
            verbose: how much is shown, as for ``keras.Model``.
            callbacks: likewise.
            validation_data: likewise, and so are `validation_freq`, `validation_steps` and `validation_batch_size`.
        """
        optimizer = self._checked(x, kwargs)
        settings: dict[str, Any] = {"verbose": verbose, "epochs": epochs}
        run = _Run(callbacks, add_history=True, add_progbar=verbose != 0, model=self, steps=None, **settings)
        run.begin()  # may load a state
        steps_before = optimizer.steps_made
        for epoch in epochs_of(optimizer, epochs):
            steps = _StepLoader(x, optimizer)
            run.set_params({**settings, "steps": len(steps)})
            self._initial_epoch = None  # set by a callback that has loaded a state, of which the optimizer knows more
            # one epoch at a time, as Keras takes all to have as many batches
            super().fit(
                steps,
                initial_epoch=epoch,
                epochs=epoch + 1,
                verbose=verbose,
                callbacks=run,
                validation_data=validation_data,
                shuffle=False,
                **kwargs,
            )
            if self.stop_training:
                break
        if optimizer.steps_made == steps_before:
            logger.warning("nothing was left to train: `epochs` counts those that were done before, got %d", epochs)
        run.end()
        return self.history

    def _checked(self, loader: Any, kwargs: Mapping[str, Any]) -> CustomOptimizer:
        if self.variable_optimizer is None:
            raise RuntimeError("the model must be compiled with an optimizer of this library before fit() is called")
        decided = set(kwargs) - {"validation_freq", "validation_steps", "validation_batch_size"}
        if decided:
            raise ValueError(f"fit() must not be given {sorted(decided)}: the loader and the trace say what it would")
        if getattr(loader, "batch_sampler", None) is not self.variable_optimizer.sampler:
            raise ValueError(
                "`x` must be the DataLoader(dataset, batch_sampler=sampler) of the optimizer's sampler, got "
                f"{type(loader).__name__}"
            )
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
        if optimizer.updated:
            self._constrain()
        else:  # BatchNorm's statistics are no buffers here, which the optimizer would put back
            for variable, value in zip(kept, before, strict=True):
                variable.assign(value)
        return self.get_metrics_result()

    def _constrain(self) -> None:
        """Apply the constraints of layers, as an optimizer of Keras does after each update."""
        with torch.no_grad():
            for variable in self.trainable_variables:
                if variable.constraint is not None:
                    variable.assign(variable.constraint(variable))

    def _symbolic_build(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: it would take the first minibatches from the loader, and metrics are built when they are used."""

    def save_own_variables(self, store: Any) -> None:
        """Save the optimizer's state with the weights."""
        super().save_own_variables(store)
        if self.variable_optimizer is not None:
            buffer = io.BytesIO()
            torch.save(state_of(self.variable_optimizer), buffer)
            store[_STATE_KEY] = np.frombuffer(buffer.getvalue(), dtype=np.uint8)

    def load_own_variables(self, store: Any) -> None:
        """Take over the optimizer's state if there is one, and the model is compiled."""
        super().load_own_variables({name: store[name] for name in store.keys() if name != _STATE_KEY})  # noqa: SIM118
        if self.variable_optimizer is not None and _STATE_KEY in store.keys():  # noqa: SIM118
            buffer = io.BytesIO(np.asarray(store[_STATE_KEY]).tobytes())
            load_state(self.variable_optimizer, torch.load(buffer, weights_only=True))


class _StepLoader(DataLoader[Any]):
    """The steps of an epoch as what Keras takes for a loader of torch."""

    def __init__(self, loader: DataLoader[Any], optimizer: CustomOptimizer) -> None:
        super().__init__(loader.dataset, batch_size=None)
        self._steps = Steps(loader, optimizer.sampler)

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter(self._steps)


class _Run(keras.callbacks.CallbackList):  # type: ignore[misc]
    """The callbacks of a run whose epochs are fitted one by one: it begins and ends once."""

    _logs: Mapping[str, Any] | None = None

    def begin(self) -> None:
        super().on_train_begin()

    def end(self) -> None:
        super().on_train_end(self._logs)

    def on_train_begin(self, logs: Any = None) -> None:
        """Nothing, as this is the begin of an epoch."""

    def on_train_end(self, logs: Any = None) -> None:
        """Nothing, as this is the end of an epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._logs = logs
        super().on_epoch_end(epoch, logs)
