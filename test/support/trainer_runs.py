"""Runs with Transformers' Trainer, and the same with a hand-written loop; on any number of processes."""

import os

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate_runs import use_fsdp2
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments, get_scheduler

import variable_batch_size as vbs
from variable_batch_size.integrations.transformers import VariableBatchTrainer

MINIBATCH = 2
REF_BATCHSIZE = 8
# two epochs of 40 samples, of six and five steps; with two processes also idle and uneven ones
TRACE = [4, 8, 2, 12, 6, 8, 16, 4, 2, 10, 8]
RULES = {"linear": vbs.rules.LinearRule, "adascale": vbs.rules.AdaScaleRule}


def model_of_llama(dropout=0.0):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        attention_dropout=dropout,
    )
    return LlamaForCausalLM(config).double()


def samples():
    """Samples whose minibatches have very different numbers of target tokens, one of them none."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for number in range(40):
        tokens = torch.randint(0, 50, (8,), generator=generator)
        labels = tokens.clone()
        labels[: number % 9] = -100
        made.append({"input_ids": tokens, "labels": labels})
    return made


def arguments(folder, *, kind=TrainingArguments, **changed):
    settings = {
        "per_device_train_batch_size": MINIBATCH,
        "learning_rate": 0.05,
        "num_train_epochs": 2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "max_grad_norm": 0.8,
        "logging_steps": 1,
        "save_strategy": "no",
        "optim": "sgd",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return kind(str(folder), **{**settings, **changed})


def trainer_with(args, rule="linear", *, kind=VariableBatchTrainer, model=None, **changed):
    settings = {"train_dataset": samples(), "trace": TRACE, "rule": RULES[rule](), "ref_batchsize": REF_BATCHSIZE}
    return kind(model or model_of_llama(), args, **{**settings, **changed})


def weights_of(model):
    values = {name: value.detach() for name, value in model.state_dict().items()}
    return {name: getattr(value, "full_tensor", value.clone)() for name, value in values.items()}


def by_trainer(folder, rule, **changed):
    """Weights, logs and counts of a complete run."""
    trainer = trainer_with(arguments(folder), rule, **changed)
    trainer.train()
    return {
        "weights": weights_of(trainer.model),
        "steps": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "history": [logs for logs in trainer.state.log_history if "loss" in logs],
    }


def by_own_loop(rule):
    """Weights after the complete run, and a record of each step."""
    model, data = model_of_llama(), samples()
    sampler = vbs.CustomSampler(data, trace=TRACE, minibatch_size=MINIBATCH, seed=42)
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    others = [p for name, p in model.named_parameters() if "norm" not in name]
    inner = torch.optim.SGD([{"params": others}, {"params": norms}], lr=0.05)  # the trainer's groups
    optimizer = vbs.CustomOptimizer(
        inner, sampler, rule=RULES[rule](), ref_batchsize=REF_BATCHSIZE, clip_grad_norm=0.8, model=model
    )
    scheduler = get_scheduler("cosine", inner, num_warmup_steps=3, num_training_steps=len(TRACE))
    records = []
    log = vbs.Log(optimizer, every=1, to=[records.append])
    for _ in optimizer.epochs(2):
        for indices in sampler:
            tokens, labels = (torch.stack([data[i][name] for i in indices]) for name in ("input_ids", "labels"))
            loss = model(input_ids=tokens, labels=labels, num_items_in_batch=torch.tensor(1)).loss  # their sum
            loss.backward()
            if optimizer.step(weight=(labels[:, 1:] != -100).sum()):
                scheduler.step()
            log.step(loss)
    return {"weights": weights_of(model), "records": records}


def texts():
    """Samples of differing length, and a collate function that pads them."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 50, (2 + 7 * number % 13,), generator=generator) for number in range(40)]


def padded(samples):
    tokens, labels = (torch.nn.utils.rnn.pad_sequence(samples, True, value) for value in (0, -100))
    return {"input_ids": tokens, "labels": labels}


def budget_of(**options):
    return vbs.TokenBudget(list(map(len, texts())), [32, 64, 96, 32], tokens=32, on_end="cycle", **options)


def budget_by_trainer(folder):
    """The weights of a run with a token budget."""
    settings = {"data_collator": padded, "train_dataset": texts(), "trace": budget_of(), "ref_batchsize": 64}
    trainer = trainer_with(arguments(folder, lr_scheduler_type="constant", warmup_steps=0), **settings)
    trainer.train()
    return weights_of(trainer.model), trainer.variable_optimizer.weight_done


def budget_by_own_loop():
    model, budget, data = model_of_llama(), budget_of(), texts()
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    others = [p for name, p in model.named_parameters() if "norm" not in name]
    inner = torch.optim.SGD([{"params": others}, {"params": norms}], lr=0.05)
    optimizer = vbs.CustomOptimizer(inner, budget, rule="linear", ref_batchsize=64, clip_grad_norm=0.8, model=model)
    for _ in optimizer.epochs(2):
        for indices in budget:
            own = padded([data[index] for index in indices])
            model(**own, num_items_in_batch=torch.tensor(1)).loss.backward()  # their sum
            optimizer.step(weight=(own["labels"][:, 1:] != -100).sum())
    return weights_of(model), optimizer.weight_done


def check_history(history, records):
    """Check that the trainer's log equals that of the loop."""
    assert [logs["step"] for logs in history] == list(range(1, len(TRACE) + 1))
    assert [logs["batch_size"] for logs in history] == TRACE
    for name, own in (("loss", "loss"), ("learning_rate", "lr")):
        assert_close([logs[name] for logs in history], [record[own] for record in records], rtol=1e-4, atol=1e-6)


class GathersMetrics(VariableBatchTrainer):
    """A trainer that communicates in each minibatch, as those of trl do."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        assert len(self.accelerator.gather(loss.detach()[None])) == self.args.world_size
        return loss


class StopAfter(TrainerCallback):
    """Ends training after some steps, as if the process had been killed."""

    def __init__(self, num_steps):
        self.num_steps = num_steps

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.num_steps


def stopped_and_resumed(folder, rule, num_steps, dropout=0.0):
    """A run that was stopped after some steps and resumes in another trainer, from the trainer's own checkpoint."""
    args = arguments(folder, save_strategy="steps", save_steps=num_steps)
    trainer_with(args, rule, model=model_of_llama(dropout), callbacks=[StopAfter(num_steps)]).train()
    trainer = trainer_with(args, rule, model=model_of_llama(dropout))
    trainer.train(resume_from_checkpoint=True)
    return {"weights": weights_of(trainer.model), "steps": trainer.state.global_step, "epoch": trainer.state.epoch}


def sharded_trainer(folder, state_dict_type, **changed):
    """A trainer whose model Accelerate shards, as it does on accelerators; on CPUs, it ignores these arguments."""
    config = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "state_dict_type": state_dict_type}
    args = arguments(folder, save_strategy="steps", save_steps=4, fsdp=True, fsdp_config=config)
    trainer = trainer_with(args, "adascale", **changed)
    use_fsdp2(trainer.accelerator, FullyShardedDataParallelPlugin(**args.fsdp_plugin_args))
    trainer.is_fsdp_enabled = True
    return trainer


def in_shards(folder):
    """Weights and logs of runs in FSDP2, stopped after four steps and resumed, for both formats of its files."""
    found = []
    try:
        for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
            sharded_trainer(folder / kind, kind, callbacks=[StopAfter(4)]).train()
            trainer = sharded_trainer(folder / kind, kind)
            trainer.train(resume_from_checkpoint=True)
            found.append((weights_of(trainer.model), [logs for logs in trainer.state.log_history if "loss" in logs]))
    finally:
        AcceleratorState._reset_state(True)
        for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
            os.environ.pop(name, None)
    return found


def all_runs(folder):
    """The results of one of several processes: a complete run with the linear rule, and resumed ones with AdaScale."""
    runs = {"linear": by_trainer(folder / "linear", "linear", kind=GathersMetrics)}
    return runs, stopped_and_resumed(folder / "resumed", "adascale", 4), in_shards(folder / "shards")
