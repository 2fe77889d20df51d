"""What Transformers' Trainer cannot be asked for together with a variable batch size, each refused in a sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

from variable_batch_size.training.sampler import CustomSampler

_ELSEWHERE = {
    "clip_grad_norm": "`max_grad_norm` of the training arguments says it",
    "model": "the trainer knows its model",
    "loss_scale": "the trainer's loss is not scaled",
    "keep_gradients": "the trainer drops gradients after each step",
}


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the optimizer, of which none is said elsewhere."""
    for name, reason in _ELSEWHERE.items():
        if name in options:
            raise ValueError(f"`options` must not have {name!r}: {reason}")
    return dict(options)


def refuse_settings(args: Any) -> None:
    """Raise if the training arguments have what the trace decides, or what would not be right with it."""
    wrong = {
        "gradient_accumulation_steps": (args.gradient_accumulation_steps > 1, "the trace says how many minibatches"),
        "fp16": (args.fp16, "its scaler would leave out minibatches; bf16 needs none"),
        "auto_find_batch_size": (args.auto_find_batch_size, "sizes of the trace are multiples of the minibatch"),
        "include_num_input_tokens_seen": (
            args.include_num_input_tokens_seen not in ("no", False),
            "`variable_optimizer.weight_done` counts tokens",
        ),
        "deepspeed": (bool(args.deepspeed), "it reduces gradients by itself"),
        "fsdp": (bool(args.fsdp), "it reduces gradients by itself"),
        "train_sampling_strategy": (
            getattr(args, "train_sampling_strategy", "random") != "random",
            "the trace's sampler deals the samples",
        ),
    }
    for name, (is_wrong, reason) in wrong.items():
        if is_wrong:
            raise ValueError(f"`{name}` must not be set, got {getattr(args, name)!r}: {reason}")
    if args.n_gpu > 1:
        raise ValueError(f"one process must have one device, got {args.n_gpu}: start it with torchrun, one for each")


def refuse_other_processes(sampler: CustomSampler, args: Any) -> None:
    """Raise if trainer and sampler do not take this for the same process."""
    if (sampler.rank, sampler.num_replicas) != (args.process_index, args.world_size):
        raise ValueError(
            f"the trainer takes this for process {args.process_index} of {args.world_size}, but it is "
            f"{sampler.rank} of {sampler.num_replicas}: start it with torchrun, which sets RANK and WORLD_SIZE"
        )


def refuse_other_data(sampler: CustomSampler, dataset: Sized, args: Any) -> None:
    """Raise if trainer and sampler, which stays the same from one ``train()`` to the next, have different data."""
    for name, was, now in (
        ("len(train_dataset)", sampler.dataset_size, len(dataset)),
        ("per_device_train_batch_size", sampler.minibatch_size, args.per_device_train_batch_size),
    ):
        if was != now:
            raise ValueError(f"`{name}` was {was} when training began and is {now}: make another trainer")
