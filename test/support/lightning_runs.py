"""Lightning modules, and the same training in a hand-written loop, with variable batches and a scheduler."""

import os

import torch
from lightning.fabric.accelerators import xla
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs
from variable_batch_size.integrations.lightning import VariableBatchSize

# epochs of 9, 10 and 9 minibatches of 4 samples, and of 3, 2 and 4 steps
TRACE = [8, 16, 12, 20, 20, 4, 12, 16, 4]
NUM_EPOCHS = 3
RULES = {"linear": vbs.LinearRuleOptimizer, "adascale": vbs.AdaScaleOptimizer}

# a trainer would import torch_xla if it is installed, and cores of later tests in this process would be XLA's
xla._XLA_AVAILABLE = False


def dataset():
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(40, 3, generator=generator), torch.randn(40, 1, generator=generator))


def network():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


class Net(LightningModule):
    """Trained like the network of :func:`own_loop`."""

    def __init__(self, rule="linear", *, num_workers=0, trace=TRACE, **options):
        super().__init__()
        self.rule, self.num_workers, self.trace, self.options = rule, num_workers, trace, options
        self.network = network()
        self.num_validations = 0

    def setup(self, stage):
        self.sampler = vbs.CustomSampler(40, self.trace, minibatch_size=4, **{"lockstep": True, **self.options})

    def train_dataloader(self):
        return DataLoader(dataset(), batch_sampler=self.sampler, num_workers=self.num_workers)

    def val_dataloader(self):
        return DataLoader(dataset(), batch_size=20)

    def configure_optimizers(self):
        inner = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        optimizer = RULES[self.rule](inner, self.sampler, ref_batchsize=8, model=self, clip_grad_norm=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def loss(self, batch):
        data, target = batch
        return nn.functional.mse_loss(self.network(data), target)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.num_validations += batch_idx == 0
        self.log("val_loss", self.loss(batch))


class Streamed(Net):
    """The same samples one after another, the first ones only if there is a number of them."""

    def __init__(self, *args, num_samples=40, **options):
        super().__init__(*args, **options)
        self.num_samples = num_samples

    def setup(self, stage):
        settings = {"dataset_size": 40, "lockstep": True, **self.options}
        self.sampler = vbs.Stream(self.samples, trace=self.trace, minibatch_size=4, **settings)

    def samples(self):
        return (sample for _, sample in zip(range(self.num_samples), dataset(), strict=False))

    def train_dataloader(self):
        return DataLoader(self.sampler, batch_size=None, num_workers=self.num_workers)


class Manual(Net):
    """The same with manual optimization."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        if optimizer.updated:
            self.lr_schedulers().step()
        self.log("loss", loss)


def weights(network):
    """Parameters and buffers as one tensor."""
    return torch.cat([value.flatten().double() for value in network.state_dict().values()])


def own_loop(rule="linear", *, num_epochs=NUM_EPOCHS, max_steps=-1, model=None, trace=TRACE, shuffle=True):
    """The weights and the number of updates of a hand-written loop."""
    model, data = network() if model is None else model, dataset()
    sampler = vbs.CustomSampler(40, trace, minibatch_size=4, shuffle=shuffle)
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = RULES[rule](inner, sampler, ref_batchsize=8, model=model, clip_grad_norm=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.8)
    for _ in optimizer.epochs(num_epochs):
        for samples, target in DataLoader(data, batch_sampler=sampler):
            nn.functional.mse_loss(model(samples), target).backward()
            if optimizer.step():
                scheduler.step()
            if optimizer.updated and optimizer.steps_done == max_steps:
                break
        if optimizer.steps_done == max_steps:
            break
    return model, optimizer.steps_done


def make_trainer(directory=None, *, callbacks=(), **options):
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": NUM_EPOCHS,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "logger": False if directory is None else CSVLogger(directory, name="", version=""),
        "enable_checkpointing": False,
        "limit_val_batches": 0,
        "use_distributed_sampler": False,
        "default_root_dir": directory,
    }
    return Trainer(callbacks=[VariableBatchSize(), *callbacks], **{**defaults, **options})


class StopAfter(Callback):
    """Saves with Lightning after a total number of minibatches, and ends the run there."""

    def __init__(self, path, num_minibatches):
        self.path, self.left = path, num_minibatches

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.left -= 1
        if not self.left:
            trainer.save_checkpoint(self.path)
            raise Stopped


class Stopped(Exception):
    """The run was ended intentionally."""


# ----------------------------------------------------------------------------------------------------- models in shards


def small_network():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


class Sharded(Net):
    """Each process has a shard of every parameter."""

    def __init__(self, rule):
        super().__init__(rule)
        self.network = small_network()

    def configure_model(self):
        fully_shard(self.network, mesh=self.device_mesh["data_parallel"])


def train_in_shards(rank, port, directory, rule):
    """Train as a process of torchrun, and write the full weights to a file."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="x")
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")  # the store is available
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    module, trainer = Sharded(rule), make_trainer(strategy=strategy, devices=2)
    trainer.fit(module)
    whole = torch.cat([p.full_tensor().flatten() for p in module.network.parameters()]).detach()
    torch.save((trainer.global_step, whole), directory / f"rank{rank}.pt")
