"""Small runs in the loops of frameworks, and of ``vbs compare``: steps are recorded by a hook of the optimizer."""

from __future__ import annotations

import csv
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from golden_recorder import Recorder
from golden_training import MINIBATCH, NUM_SAMPLES, REF_BATCHSIZE, TRACE, Normed, mean_loss, seeded, sgd, vectors
from torch.utils.data import TensorDataset

import variable_batch_size as vbs

os.environ |= {"USE_TORCH_XLA": "0", "HF_HUB_OFFLINE": "1"}  # or frameworks would train on XLA where it is installed


def in_lightning(recorder: Recorder) -> None:
    from lightning.pytorch import LightningModule, Trainer

    from variable_batch_size.integrations.lightning import VariableBatchSize

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = seeded(Normed())

        def setup(self, stage: str) -> None:
            data = TensorDataset(*vectors())
            self.loader = vbs.DataLoader(data, TRACE, minibatch_size=MINIBATCH, lockstep=True)

        def train_dataloader(self) -> Any:
            return self.loader

        def configure_optimizers(self) -> Any:
            inner = sgd(self)
            how: Any = {"ref_batchsize": REF_BATCHSIZE, "model": self, "clip_grad_norm": 0.5}
            optimizer = vbs.Optimizer(inner, self.loader, rule="adascale", **how)
            recorder.begin(self, optimizer, inner, has_hook=True)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.8)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return mean_loss(self.net, *batch)

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    quiet |= {"enable_checkpointing": False, "accelerator": "cpu", "default_root_dir": str(recorder.directory)}
    trainer = Trainer(callbacks=[VariableBatchSize()], max_epochs=3, devices=1, **quiet)
    trainer.fit(Module())
    recorder.note("trainer", [trainer.global_step, trainer.current_epoch])


def in_accelerate(recorder: Recorder) -> None:
    from accelerate import Accelerator

    from variable_batch_size.integrations.accelerate import prepare

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare_model(seeded(Normed()))
    loader = vbs.DataLoader(TensorDataset(*vectors()), TRACE, minibatch_size=MINIBATCH)
    inner = sgd(model)
    optimizer = vbs.Optimizer(inner, loader, rule="adascale", ref_batchsize=REF_BATCHSIZE, model=model)
    recorder.begin(model, optimizer, inner, has_hook=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    optimizer, loader, scheduler = prepare(accelerator, optimizer, loader, scheduler)
    for _ in recorder.tracks[-1].optimizer.epochs(2):
        for x, y in loader:
            accelerator.backward(mean_loss(model, x, y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def in_transformers(recorder: Recorder) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainingArguments

    from variable_batch_size.integrations.transformers import VariableBatchTrainer

    class Trainer(VariableBatchTrainer):
        def create_optimizer(self, *args: Any, **options: Any) -> Any:
            made = super().create_optimizer(*args, **options)
            if not recorder.tracks:
                optimizer = self.variable_optimizer
                recorder.begin(self.model, optimizer, optimizer.inner, has_hook=True)
            return made

    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "max_position_embeddings": 8}
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=2, attention_dropout=0.0, **sizes)
    generator, data = torch.Generator().manual_seed(1), []
    for number in range(40):
        tokens = torch.randint(0, 20, (6,), generator=generator)
        labels = tokens.clone()
        labels[: number % 6] = -100
        data.append({"input_ids": tokens, "labels": labels})
    settings = {"per_device_train_batch_size": 2, "learning_rate": 0.05, "num_train_epochs": 2, "warmup_steps": 2}
    settings |= {"max_grad_norm": 0.8, "logging_steps": 1, "save_strategy": "no", "optim": "sgd", "report_to": []}
    args = TrainingArguments(str(recorder.directory), disable_tqdm=True, use_cpu=True, **settings)
    how: Any = {"trace": [4, 8, 2, 12, 6, 8, 16, 4, 2, 10, 8], "rule": "adascale", "ref_batchsize": 8}
    trainer = Trainer(seeded(LlamaForCausalLM(config)), args, train_dataset=data, **how)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    names = ("loss", "learning_rate", "grad_norm", "epoch", "step", "batch_size")
    history = [{name: logs.get(name) for name in names} for logs in trainer.state.log_history if "loss" in logs]
    recorder.note("history", history)


def in_keras(recorder: Recorder) -> None:
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    from variable_batch_size.integrations.keras import VariableBatchModel

    keras.utils.set_random_seed(0)
    inputs = keras.Input((7,))
    hidden = keras.layers.BatchNormalization()(keras.layers.Dense(6, activation="tanh")(inputs))
    model = VariableBatchModel(inputs, keras.layers.Dense(5)(hidden))
    loader = vbs.DataLoader(TensorDataset(*vectors()), TRACE, minibatch_size=MINIBATCH)
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = vbs.Optimizer(inner, loader, rule="adascale", ref_batchsize=REF_BATCHSIZE, model=model)
    recorder.begin(model, optimizer, inner, has_hook=True)
    model.compile(optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    recorder.note("history", model.fit(loader, epochs=2, verbose=0).history)


def compared(recorder: Recorder) -> None:
    """``vbs compare`` of two rules on two traces, in its own processes: the results, and the log of each run."""
    folder = recorder.directory / "results"
    workload = f"{Path(__file__).stem}:{workload_of_comparison.__name__}"
    options = ["--rules", "linear,adascale", "--seeds", "1", "--jobs", "1", "--tests", "3", "--out", str(folder)]
    command = [sys.executable, "-m", "variable_batch_size", "compare", "--workload", workload, *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    if done.returncode:
        raise RuntimeError(done.stderr)
    for path in sorted(folder.rglob("results.csv")):
        recorder.note(path.name, [_timeless(row) for row in csv.DictReader(path.open())])
    for path in sorted(folder.rglob("steps.jsonl")):
        lines = path.read_text().splitlines()
        recorder.note(str(path.relative_to(folder)), [_timeless(json.loads(line)) for line in lines])
    for path in sorted(folder.rglob("executed.csv")):
        recorder.note(str(path.relative_to(folder)), recorder.text(path))


def _timeless(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if "second" not in name and "time" not in name}


def workload_of_comparison() -> vbs.Workload:
    """What is compared."""
    x, y = vectors()
    return vbs.Workload(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(7, 8), torch.nn.Tanh(), torch.nn.Linear(8, 5)),
        train=TensorDataset(x, y),
        test=TensorDataset(x[:20], y[:20]),
        loss=torch.nn.functional.cross_entropy,
        metric=lambda outputs, targets: 100 * (outputs.argmax(1) == targets).float().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        minibatch_size=MINIBATCH,
        ref_batchsize=REF_BATCHSIZE,
        num_samples=6 * NUM_SAMPLES,
    )
