"""A workload in a separate file, which imports only torch, as every worker of an executor has to import it."""

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import l1_loss, mse_loss
from torch.utils.data import TensorDataset

import variable_batch_size as vbs

sys.path.append(str(Path(__file__).parent))  # of workers, too
from held import Hold

HOLD = "HOLD_SECOND_SEED"  # an environment variable: the folder of a hold for all runs of the second seed


def points(number, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(number, 4, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True) + 0.1 * torch.randn(number, 1, generator=generator))


def model():
    if HOLD in os.environ and torch.initial_seed() == 1:
        Hold(Path(os.environ[HOLD])).here()
    return nn.Linear(4, 1)


def line():
    """A line through noisy points."""
    return vbs.Workload(
        model=model,
        train=points(240, seed=0),
        test=points(60, seed=1),
        loss=mse_loss,
        metric=l1_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.5),
        minibatch_size=8,
        ref_batchsize=8,
        num_samples=1200,
        metric_name="error",
        unit="",
        is_higher_better=False,
    )
