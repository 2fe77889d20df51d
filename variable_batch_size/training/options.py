"""Options: the arguments that every optimizer of the library takes, for type checkers."""

from __future__ import annotations

from typing import TypedDict

import torch


class Options(TypedDict, total=False):
    """What every optimizer of the library takes; :class:`CustomOptimizer` says what each is."""

    log_steps: int
    clip_grad_norm: float | None
    model: torch.nn.Module | None
    smooth_steps: int
    max_factor: float | None
    skip_nonfinite: bool | None
    loss_scale: float
    keep_gradients: bool
    measure_noise: bool
    exact: bool
    seed_minibatches: bool | None
    reduce_once: bool
