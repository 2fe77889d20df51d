"""Keras on the torch backend: batches are updates, and the weights are those of a hand-written loop."""

import os
import sys

import forked
import keras
import numpy as np
import pytest
import torch
from small_runs import classified
from torch.testing import assert_close
from torch.utils.data import DataLoader

import variable_batch_size as vbs
from variable_batch_size.integrations.keras import VariableBatchModel
from variable_batch_size.optim.attachments import Follower

# two epochs of 64 samples, of six and four steps
TRACE = [8, 16, 4, 20, 12, 4, 24, 8, 4, 20]
RULES = {"linear": vbs.LinearRuleOptimizer, "adascale": vbs.AdaScaleOptimizer}
# from Keras, when it converts a variable to an array
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}
INTEGRATION = VariableBatchModel.__module__


def model_of(kind):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, activation="tanh")(inputs)
    return kind(inputs, keras.layers.Dense(3)(hidden))


def data_of():
    return classified(64, 6, num_classes=3, dtype=torch.float32)


def loss_of():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Session:
    """A compiled model and its loader."""

    def __init__(self, rule="linear", kind=VariableBatchModel, trace=TRACE, **settings):
        self.model = model_of(kind)
        data = data_of()
        self.sampler = vbs.CustomSampler(data, trace=trace, minibatch_size=4)
        self.loader = DataLoader(data, batch_sampler=self.sampler)
        inner = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.optimizer = RULES[rule](inner, self.sampler, ref_batchsize=16, model=self.model)
        if kind is VariableBatchModel:
            self.model.compile(self.optimizer, loss=loss_of(), metrics=["accuracy"], **settings)

    def weights(self):
        return [torch.as_tensor(np.array(value)) for value in self.model.get_weights()]


def by_own_loop(rule):
    session = Session(rule, kind=keras.Model)
    losses = []
    for _ in session.optimizer.epochs(2):
        losses.append([])
        for data, target in session.loader:
            loss = torch.nn.functional.cross_entropy(session.model(data, training=True), target)
            loss.backward()
            session.optimizer.step()
            losses[-1].append(loss.item())
    return session.weights(), [sum(values) / len(values) for values in losses]


class Batches(keras.callbacks.Callback):
    """Records the batches of each epoch and the starts and ends of training; can stop it."""

    def __init__(self, stop_at=None):
        super().__init__()
        self.stop_at = stop_at
        self.seen, self.begun, self.ended = [], 0, 0

    def on_train_begin(self, logs=None):
        self.begun += 1

    def on_train_end(self, logs=None):
        self.ended += 1

    def on_epoch_begin(self, epoch, logs=None):
        self.seen.append([])

    def on_train_batch_end(self, batch, logs=None):
        self.seen[-1].append(batch)
        self.model.stop_training = self.model.variable_optimizer.steps_done == self.stop_at


@pytest.mark.parametrize("rule", RULES)
def test_run_equals_that_of_a_hand_written_loop(rule):
    session, batches = Session(rule), Batches()
    validation = tuple(tensor.numpy() for tensor in data_of().tensors)
    history = session.model.fit(
        session.loader, epochs=2, callbacks=[batches], validation_data=validation, verbose=0
    ).history
    weights, losses = by_own_loop(rule)
    assert_close(session.weights(), weights, **TOLERANCE)
    assert batches.seen == [list(range(6)), list(range(4))]
    assert (batches.begun, batches.ended) == (1, 1)
    assert set(history) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert_close(history["loss"], losses, rtol=1e-5, atol=0)
    assert len(history["val_loss"]) == 2


def test_layer_constraints_are_applied_as_with_a_keras_optimizer():
    def constrained(kind):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((6,))
        constraint = keras.constraints.UnitNorm(axis=0)
        return kind(inputs, keras.layers.Dense(3, kernel_constraint=constraint)(inputs))

    data = data_of()
    plain = constrained(keras.Model)
    plain.compile(keras.optimizers.SGD(0.5, momentum=0.9), loss=loss_of())
    x, y = (tensor.numpy() for tensor in data.tensors)
    plain.fit(x, y, batch_size=16, epochs=1, shuffle=False, verbose=0)

    model = constrained(VariableBatchModel)
    sampler = vbs.CustomSampler(data, trace=[16] * 4, minibatch_size=4, shuffle=False)
    inner = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model.compile(vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=16), loss=loss_of())
    model.fit(DataLoader(data, batch_sampler=sampler), verbose=0)
    for found, expected in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("save_freq", [4, "epoch"])
def test_stopped_run_resumes_from_the_backup_of_keras(tmp_path, save_freq):
    stop_at = 4 if save_freq == 4 else 6

    def backup():
        return keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=save_freq, delete_checkpoint=False)

    first = Session("adascale")
    first.model.fit(first.loader, epochs=2, callbacks=[backup(), Batches(stop_at)], verbose=0)
    assert first.optimizer.steps_done == stop_at
    second = Session("adascale")
    second.model.fit(second.loader, epochs=2, callbacks=[backup()], verbose=0)
    assert second.optimizer.steps_done == len(TRACE)
    assert_close(second.weights(), by_own_loop("adascale")[0], **TOLERANCE)


STEPPED = {
    "each batch": lambda scheduler, optimizer: scheduler.step(),
    "by samples": lambda scheduler, optimizer: Follower.checked(scheduler, "samples", 8).follow(optimizer.run),
}


class Scheduled(Session):
    """A session whose scheduler is stepped in a callback."""

    def __init__(self, step, is_passed=True):
        super().__init__()
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, milestones=[2, 3, 6, 12], gamma=0.5)
        if is_passed:
            self.model.compile(self.optimizer, loss=loss_of(), schedulers=[self.scheduler])
        self.callback = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: STEPPED[step](self.scheduler, self.optimizer)
        )

    def fit(self, *callbacks):
        self.model.fit(self.loader, epochs=2, callbacks=[*callbacks, self.callback], verbose=0)


@pytest.mark.parametrize("how", ["backup", "weights"])
@pytest.mark.parametrize("step", STEPPED)
def test_scheduler_resumes_as_if_never_stopped(tmp_path, step, how):
    whole = Scheduled(step)
    whole.fit()
    callbacks = [keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=4, delete_checkpoint=False)]
    callbacks = callbacks if how == "backup" else []
    first = Scheduled(step)
    first.fit(*callbacks, Batches(4))
    second = Scheduled(step)
    if how == "weights":
        first.model.save_weights(tmp_path / "saved.weights.h5")
        second.model.load_weights(tmp_path / "saved.weights.h5")
    second.fit(*callbacks)
    assert second.optimizer.get_lr() == whole.optimizer.get_lr()
    assert second.scheduler.last_epoch == whole.scheduler.last_epoch > 4
    assert_close(second.weights(), whole.weights(), rtol=0, atol=0)


def test_scheduler_that_would_not_be_saved_raises(tmp_path):
    session = Scheduled("each batch", is_passed=False)
    with pytest.raises(
        ValueError, match=r"^a scheduler sets the learning rate, but would not be saved: pass it to comp"
    ):
        session.fit()
    Scheduled("each batch").model.save_weights(tmp_path / "saved.weights.h5")
    with pytest.raises(ValueError, match=r"`schedulers` of compile\(\) must be 1, as when .* saved, got 0\n"):
        Session().model.load_weights(tmp_path / "saved.weights.h5")


def test_different_run_does_not_resume(tmp_path):
    Session().model.save_weights(tmp_path / "saved.weights.h5")
    session = Session(trace=[*TRACE[:-1], 16])
    with pytest.raises(ValueError, match="the checkpoint was saved by another run: trace was"):
        session.model.load_weights(tmp_path / "saved.weights.h5")


def test_skipped_update_has_no_effect_on_batch_normalization(caplog):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,))
    normalization = keras.layers.BatchNormalization()
    model = VariableBatchModel(inputs, keras.layers.Dense(3)(normalization(inputs)))
    data = data_of()
    data.tensors[0][0] = torch.nan
    sampler = vbs.CustomSampler(data, trace=TRACE, minibatch_size=4)
    inner = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=16, model=model, skip_nonfinite=True)
    model.compile(optimizer, loss=loss_of())
    model.fit(DataLoader(data, batch_sampler=sampler), epochs=1, verbose=0)
    assert optimizer.steps_skipped == 1
    mean = normalization.moving_mean.value
    assert mean.isfinite().all()
    assert mean.any()


def test_layers_that_need_a_loss_scale_raise():
    inputs = keras.Input((6,))
    model = VariableBatchModel(inputs, keras.layers.Dense(3, dtype="mixed_float16")(inputs))
    sampler = vbs.CustomSampler(64, TRACE, minibatch_size=4)
    optimizer = vbs.LinearRuleOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sampler, ref_batchsize=16)
    with pytest.raises(ValueError, match="must not compute in float16"):
        model.compile(optimizer, loss=loss_of())


def test_fitting_completed_epochs_logs_a_message(caplog):
    session = Session()
    session.model.fit(session.loader, epochs=1, verbose=0)
    assert "nothing left" not in caplog.text
    session.model.fit(session.loader, epochs=1, verbose=0)
    assert "nothing left to train: `epochs` includes completed epochs, got 1" in caplog.text
    session.model.fit(session.loader, epochs=2, verbose=0)
    assert session.optimizer.steps_done == len(TRACE)


def test_the_progress_bar_shows_the_updates_of_each_epoch(capsys):
    session = Session()
    session.model.fit(session.loader, epochs=2, verbose=2)
    shown = capsys.readouterr().out
    assert "Epoch 1/2" in shown
    assert "6/6" in shown
    assert "Epoch 2/2" in shown
    assert "4/4" in shown


def test_weights_without_optimizer_state_are_loaded(tmp_path):
    plain = model_of(keras.Model)
    plain.save_weights(tmp_path / "plain.weights.h5")
    session = Session()
    session.model.load_weights(tmp_path / "plain.weights.h5")
    assert session.optimizer.steps_done == 0


def test_other_loader_raises():
    session = Session()
    other = DataLoader(data_of(), batch_size=4)
    with pytest.raises(ValueError, match=r"`x` must be a DataLoader.* with the optimizer's sampler, got DataLoader"):
        session.model.fit(other)
    with pytest.raises(ValueError, match="got Tensor"):
        session.model.fit(torch.zeros(8, 6))


def test_settings_determined_by_the_trace_raise():
    session = Session()
    with pytest.raises(ValueError, match=r"fit\(\) does not accept \['batch_size', 'steps_per_epoch'\]"):
        session.model.fit(session.loader, batch_size=8, steps_per_epoch=3)
    with pytest.raises(ValueError, match="`jit_compile` must be False"):
        Session(jit_compile=True)


def test_too_short_trace_raises_before_the_first_step():
    session = Session()
    with pytest.raises(ValueError, match="holds 2 epochs"):
        session.model.fit(session.loader, epochs=3, verbose=0)


def test_open_steps_raise():
    with pytest.raises(ValueError, match="`trace` must not be OpenSteps with Keras, which needs the length of steps"):
        Session(trace=vbs.OpenSteps())


def test_keras_optimizers_and_optimizers_of_other_models_raise():
    with pytest.raises(ValueError, match="must be an optimizer of this library, got SGD"):
        model_of(VariableBatchModel).compile(keras.optimizers.SGD())
    with pytest.raises(ValueError, match="must have the model's trainable variables"):
        model_of(VariableBatchModel).compile(Session().optimizer)


def test_callback_that_sets_the_learning_rate_raises():
    session = Session()
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1)
    with pytest.raises(ValueError, match="learning_rate"):
        session.model.fit(session.loader, callbacks=[schedule], verbose=0)


def test_a_model_that_was_not_compiled_says_so():
    with pytest.raises(RuntimeError, match=r"^call compile\(\) with an optimizer of this library before fit\(\)"):
        model_of(VariableBatchModel).fit(Session().loader)


# -------------------------------------------------------------------------------------------------------------- backend


PRINTING = """import os, variable_batch_size.integrations.keras
import keras
print(keras.backend.backend(), os.environ.get('KERAS_BACKEND'))"""


def without_backend(**variables):
    """The variables of this process without KERAS_BACKEND, and these."""
    return {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"} | variables


def test_torch_is_chosen_if_keras_is_not_imported_yet(tmp_path):
    done = import_of_keras(KERAS_HOME=str(tmp_path))
    assert done.stdout.split() == ["torch", "None"], done.stderr


def import_of_keras(code="", **variables):
    """The outcome of a process that imports the integration, with the modules of keras of a new process: none."""
    return forked.run(_import, code, without_backend(**variables), folder=".")


def error_of_import(code="", **variables):
    """The last line of its error."""
    return import_of_keras(code, **variables).stderr.splitlines()[-1]


def _import(code, variables):
    os.environ.clear()
    os.environ.update(variables)
    for name in [name for name in sys.modules if name.split(".")[0] == "keras" or name == INTEGRATION]:
        del sys.modules[name]
    exec(f"{code}\n{PRINTING}", {"__name__": "__main__"})


def test_another_backend_raises_in_one_sentence():
    message = error_of_import(KERAS_BACKEND="tensorflow")
    assert message == "RuntimeError: KERAS_BACKEND must be torch, got tensorflow"
    loaded = "import sys, unittest.mock as mock\nsys.modules['keras'] = mock.MagicMock()\n"
    message = error_of_import(loaded + "sys.modules['keras'].backend.backend.return_value = 'jax'")
    assert message == (
        "RuntimeError: Keras was imported with the jax backend, but must use torch: import "
        "variable_batch_size.integrations.keras first, or set KERAS_BACKEND=torch"
    )
