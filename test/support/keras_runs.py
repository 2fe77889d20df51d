"""Runs of a Keras model with ``fit``, on any number of processes."""

import runpy

import torch
from documents import ROOT
from small_runs import classified
from stateful_runs import Warnings
from torch.utils.data import DataLoader, DistributedSampler, Subset

import variable_batch_size as vbs
from variable_batch_size.integrations.keras import VariableBatchModel  # before keras: chooses the torch backend

import keras  # isort: skip

# two epochs of 64 samples, of six and four steps; with two processes also idle ones, as in the first step, and uneven
TRACE = [4, 16, 8, 20, 12, 4, 24, 8, 4, 20]
RULES = ("linear", "adascale")


class Session:
    """A compiled model with statistics and random numbers, and its loader."""

    def __init__(self, rule="linear", **options):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((6,))
        hidden = keras.layers.Dense(8, activation="tanh")(inputs)
        self.statistics = keras.layers.BatchNormalization()
        # the first draws from torch's generator, the second from one of its own
        hidden = keras.layers.GaussianNoise(0.1)(keras.layers.Dropout(0.25)(self.statistics(hidden)))
        self.model = VariableBatchModel(inputs, keras.layers.Dense(3)(hidden))
        data = classified(64, 6, num_classes=3, dtype=torch.float32)
        self.validation = DataLoader(Subset(data, range(20)), batch_size=8)
        self.loader = vbs.DataLoader(data, trace=TRACE, minibatch_size=4, **options)
        inner = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        more = {"rule": rule, "ref_batchsize": 16, "model": self.model, "seed_minibatches": True}
        self.optimizer = vbs.Optimizer(inner, self.loader, **more)
        self.rank = self.optimizer.sampler.rank
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model.compile(self.optimizer, loss=loss, metrics=["accuracy"])

    def fit(self, *callbacks, **changed):
        settings = {"epochs": 2, "verbose": 2, "validation_data": self.validation, **changed}
        seen = Seen()
        with Warnings() as warnings:
            history = self.model.fit(self.loader, callbacks=[seen, *callbacks], **settings).history
        return {
            "weights": [p.detach().clone() for p in self.model.parameters()],
            "statistics": [v.value.detach().clone() for v in self.statistics.non_trainable_weights],
            "history": history,
            "seen": seen.logs,
            "steps": self.optimizer.steps_done,
            "warnings": warnings.messages,
        }


class Seen(keras.callbacks.Callback):
    """What a callback sees after each update."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append((logs["loss"], logs["accuracy"]))


class StopAt(keras.callbacks.Callback):
    """Stops after some steps, on one rank only."""

    def __init__(self, rank, num_steps):
        super().__init__()
        self.rank, self.num_steps = rank, num_steps

    def on_train_batch_end(self, batch, logs=None):
        optimizer = self.model.variable_optimizer
        self.model.stop_training = (optimizer.sampler.rank, optimizer.steps_done) == (self.rank, self.num_steps)


def files_of(folder):
    """Callbacks that write files, each of which has one writer."""
    return [
        keras.callbacks.ModelCheckpoint(str(folder / "{epoch}.weights.h5"), save_weights_only=True, save_freq=4),
        keras.callbacks.ModelCheckpoint(
            str(folder / "best.weights.h5"), save_weights_only=True, save_best_only=True, monitor="val_loss"
        ),
        keras.callbacks.CSVLogger(str(folder / "log.csv")),
        keras.callbacks.EarlyStopping("val_loss", patience=5),
    ]


def stopped(folder, rule, rank):
    """A run that one rank stops within an epoch, with the backup of Keras."""
    backup = keras.callbacks.BackupAndRestore(folder, save_freq=4, delete_checkpoint=False)
    return Session(rule).fit(backup, StopAt(rank, 4))


def resumed(folder, rule):
    return Session(rule).fit(keras.callbacks.BackupAndRestore(folder, save_freq=4, delete_checkpoint=False))


def message_of(run):
    try:
        run()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return None


def mistakes():
    """The messages for what must be the same on all ranks."""
    session = Session()
    session.optimizer.set_epoch(0, session.rank)  # as if a state had been loaded on rank 1
    part = DistributedSampler(range(64), num_replicas=2, rank=session.rank)
    loader = DataLoader(session.loader.dataset, sampler=part, batch_size=8)
    return [
        message_of(lambda: session.fit()),
        message_of(lambda: Session().fit(epochs=1 + session.rank)),
        message_of(lambda: Session().fit(validation_data=loader)),
        message_of(lambda: Session().fit(validation_data=vbs.EvaluationLoader(loader.dataset, minibatch_size=8))),
        message_of(lambda: Session(assign="by speed")),
    ]


def example():
    """Its updates and accuracy."""
    return runpy.run_path(str(ROOT / "examples" / "keras_digits.py"))["train"](1)


def all_runs(folder):
    """The results of one of several processes."""
    found = {rule: Session(rule).fit(*files_of(folder)) for rule in RULES}
    found["lockstep"] = Session("adascale", lockstep=True).fit()
    found["stopped"] = stopped(folder / "backup", "adascale", rank=1)
    found["resumed"] = resumed(folder / "backup", "adascale")
    return found, mistakes(), example()
