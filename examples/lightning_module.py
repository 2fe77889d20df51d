"""Train a small network with Lightning and batches that grow: python examples/lightning_module.py

With --devices 2, two processes share each batch (strategy "ddp"). With --directory DIR, checkpoints are saved there,
and the run resumes from the last one.
"""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import TensorDataset

import variable_batch_size as vbs
from variable_batch_size.integrations.lightning import VariableBatchSize

# four epochs of 2,048 samples, over all processes
TRACE = [64] * 32 + [128] * 16 + [256] * 8 + [512] * 4


class Classifier(LightningModule):
    """Classifies points as inside or outside of a circle."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))

    def setup(self, stage: str) -> None:
        points = torch.randn(2048, 2, generator=torch.Generator().manual_seed(0))
        self.dataset = TensorDataset(points, (points.norm(dim=1) > 1.2).long())
        # made after Lightning has started its processes; in lockstep because they wait for each other in minibatches
        self.loader = vbs.DataLoader(self.dataset, trace=TRACE, minibatch_size=32, lockstep=True)

    def train_dataloader(self) -> vbs.DataLoader:
        return self.loader

    def configure_optimizers(self) -> dict:
        inner = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        optimizer = vbs.Optimizer(inner, self.loader, rule="adascale", ref_batchsize=64, model=self, clip_grad_norm=5.0)
        num_updates = self.loader.sampler.num_updates(self.trainer.max_epochs)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=num_updates)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        points, side = batch
        scores = self.network(points)
        self.log("accuracy", (scores.argmax(1) == side).float().mean(), prog_bar=True, on_step=False, on_epoch=True)
        return nn.functional.cross_entropy(scores, side)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1, help="processes")
    parser.add_argument("--directory", help="for the checkpoints; resumes from the last one")
    flags = parser.parse_args()
    callbacks: list = [VariableBatchSize()]
    if flags.directory:
        callbacks.append(ModelCheckpoint(flags.directory, every_n_train_steps=20, save_last=True))
    trainer = Trainer(
        accelerator="cpu",
        devices=flags.devices,
        strategy="ddp" if flags.devices > 1 else "auto",
        max_epochs=4,
        callbacks=callbacks,
        use_distributed_sampler=False,  # the loader already assigns samples to processes
        logger=False,
        enable_checkpointing=bool(flags.directory),
    )
    classifier = Classifier()
    trainer.fit(classifier, ckpt_path="last" if flags.directory else None)
    if trainer.is_global_zero:
        points, side = classifier.dataset.tensors
        accuracy = (classifier.network(points).argmax(1) == side).float().mean()
        print(f"{trainer.global_step} updates, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
