"""A Keras model whose batch size grows, in one process or several, with validation and a backup to resume from.

python examples/keras_digits.py
torchrun --nproc-per-node 2 examples/keras_digits.py    # the same result
"""

import argparse

import torch
from sklearn.datasets import load_digits

import variable_batch_size as vbs
from variable_batch_size.integrations.keras import VariableBatchModel  # before keras: chooses the torch backend

import keras  # isort: skip


def train(num_epochs: int, backup: str | None = None) -> tuple[int, float]:
    """The number of updates, and the accuracy on the validation data."""
    keras.utils.set_random_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    images, targets = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
    dataset = torch.utils.data.TensorDataset(images[:1500], targets[:1500])

    inputs = keras.Input((64,))
    hidden = keras.layers.Dense(32, activation="relu")(inputs)
    model = VariableBatchModel(inputs, keras.layers.Dense(10)(hidden))
    # a step has 32, then 64, then 128 samples over all processes, in minibatches of 16
    loader = vbs.DataLoader(dataset, trace="0:32 60:64 100:128", minibatch_size=16)
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = vbs.Optimizer(inner, loader, rule="adascale", ref_batchsize=32, model=model)
    model.compile(optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

    callbacks = [] if backup is None else [keras.callbacks.BackupAndRestore(backup, save_freq=20)]
    validation = images[1500:], targets[1500:]
    model.fit(loader, epochs=num_epochs, validation_data=validation, callbacks=callbacks, verbose=2)
    return optimizer.steps_done, model.evaluate(*validation, verbose=0)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description="train a Keras model with a growing batch size")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--backup", help="directory from which a run that was stopped resumes")
    parser.add_argument("--cores", type=int, default=1, help="processes to start; not with torchrun")
    options = parser.parse_args()
    num_updates, accuracy = vbs.launch(train, (options.epochs, options.backup), cores=options.cores)[0]
    print(f"{num_updates} updates, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
