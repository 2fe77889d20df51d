"""Transformers' Trainer: steps are updates, and the weights are those of a hand-written loop."""

import math

import pytest
import torch
import trainer_runs
from accelerate.data_loader import prepare_data_loader
from torch.testing import assert_close
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler, WeightedRandomSampler
from trainer_runs import TRACE, arguments, by_own_loop, by_trainer, samples, stopped_and_resumed, trainer_with
from transformers import Trainer

import variable_batch_size as vbs
from variable_batch_size.integrations.transformers import (
    VariableBatchMixin,
    VariableBatchTrainer,
    check_arguments,
    check_loader,
)

TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}


@pytest.fixture(scope="module")
def expected():
    return {rule: by_own_loop(rule) for rule in trainer_runs.RULES}


@pytest.mark.parametrize("rule", trainer_runs.RULES)
def test_run_equals_that_of_a_hand_written_loop(tmp_path, rule, expected):
    found = by_trainer(tmp_path, rule)
    assert_close(found["weights"], expected[rule]["weights"], **TOLERANCE)
    assert (found["steps"], found["epoch"]) == (len(TRACE), 2)
    trainer_runs.check_history(found["history"], expected[rule]["records"])


@pytest.mark.parametrize("num_steps", [4, 6, 11], ids=["within an epoch", "between two", "at the end"])
def test_stopped_run_resumes_from_the_trainers_checkpoint(tmp_path, num_steps, expected):
    found = stopped_and_resumed(tmp_path, "adascale", num_steps)
    assert_close(found["weights"], expected["adascale"]["weights"], **TOLERANCE)
    assert (found["steps"], found["epoch"]) == (len(TRACE), 2)


def test_random_states_are_restored(tmp_path):
    whole = by_trainer(tmp_path / "whole", "linear", model=trainer_runs.model_of_llama(dropout=0.3))
    found = stopped_and_resumed(tmp_path / "stopped", "linear", 4, dropout=0.3)
    assert_close(found["weights"], whole["weights"], **TOLERANCE)


def test_evaluation_saving_and_the_end_are_counted_in_updates(tmp_path, expected):
    args = arguments(tmp_path, max_steps=7, eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=2)
    trainer = trainer_with(args, eval_dataset=samples()[:4])
    trainer.train()
    assert trainer.state.global_step == trainer.variable_optimizer.steps_done == 7
    assert [logs["step"] for logs in trainer.state.log_history if "eval_loss" in logs] == [3, 6, 7]
    assert sorted(int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-*")) == [2, 4, 6, 7]
    assert trainer.lr_scheduler.last_epoch == 7


@pytest.mark.parametrize("is_cast", [False, True], ids=["in float32", "in float16"])
def test_loss_scales_that_change_within_steps_do_not_change_the_result(tmp_path, is_cast, expected):
    model = trainer_runs.model_of_llama()
    trainer = trainer_with(arguments(tmp_path), "adascale", model=model.float() if is_cast else model)
    # Accelerate has float16 on accelerators only
    trainer.accelerator.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=6)
    if is_cast:
        trainer.accelerator.native_amp, trainer.accelerator.state._mixed_precision = True, "fp16"
    trainer.train()
    tolerance = {"rtol": 0, "atol": 1e-2, "check_dtype": False} if is_cast else TOLERANCE
    assert_close(trainer_runs.weights_of(trainer.model), expected["adascale"]["weights"], **tolerance)
    assert (trainer.state.global_step, trainer.variable_optimizer.steps_skipped) == (len(TRACE), 0)
    assert scaler.get_scale() > 2.0**8


def test_half_an_epoch_is_half_of_its_steps(tmp_path):
    trainer = trainer_with(arguments(tmp_path, num_train_epochs=1.5, logging_strategy="no"))
    trainer.train()
    assert trainer.state.global_step == 6 + math.ceil(5 / 2)


def test_a_policy_decides_while_the_trainer_runs(tmp_path):
    policy = vbs.policies.FunctionPolicy(lambda situation: 4 if situation.steps_done < 4 else 8, every=2, lead=2)
    trainer = trainer_with(arguments(tmp_path, max_steps=12), trace=policy)
    trainer.train()
    sizes = [logs["batch_size"] for logs in trainer.state.log_history if "loss" in logs]
    assert (len(sizes), sizes[0], sizes[-1]) == (12, 4, 8)
    with pytest.raises(ValueError, match=r"FunctionPolicy decides batch sizes during the run.*`max_steps` is not"):
        trainer_with(arguments(tmp_path), trace=policy).train()


class Regression(torch.nn.Module):
    """A model without tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(3, 1)

    def forward(self, x, y):
        return {"loss": ((self.linear(x)[:, 0] - y) ** 2).mean()}


def test_a_token_budget_trains_as_in_a_hand_written_loop(tmp_path):
    weights, tokens = trainer_runs.budget_by_trainer(tmp_path)
    expected, expected_tokens = trainer_runs.budget_by_own_loop()
    assert tokens == expected_tokens
    assert_close(weights, expected, **TOLERANCE)


def test_a_token_budget_that_does_not_fit_raises(tmp_path):
    budget, args = trainer_runs.budget_of(), arguments(tmp_path)
    with pytest.raises(ValueError, match="`on_end` must be None with a TokenBudget, which has its own, got 'hold'"):
        trainer_with(args, trace=budget, on_end="hold")
    trainer = trainer_with(args, trace=budget, train_dataset=samples()[:30])
    with pytest.raises(
        ValueError, match="`train_dataset` must have the 40 samples of the TokenBudget's lengths, got 30"
    ):
        trainer.train()


def test_minibatches_without_tokens_have_equal_weights(tmp_path):
    generator = torch.Generator().manual_seed(3)
    data = [{"x": torch.randn(3, generator=generator), "y": torch.randn((), generator=generator)} for _ in range(40)]
    settings = {"max_grad_norm": 0.0, "lr_scheduler_type": "constant", "warmup_steps": 0}
    trainer = trainer_with(arguments(tmp_path, **settings), model=Regression(), train_dataset=data)
    trainer.train()
    model = Regression()
    sampler = vbs.CustomSampler(data, trace=TRACE, minibatch_size=2, seed=42)
    optimizer = vbs.LinearRuleOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), sampler, ref_batchsize=8)
    for _ in optimizer.epochs(2):
        for indices in sampler:
            model(*(torch.stack([data[i][name] for i in indices]) for name in "xy"))["loss"].backward()
            optimizer.step()
    assert_close(trainer.model.state_dict(), model.state_dict(), **TOLERANCE)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"gradient_accumulation_steps": 4}, "`gradient_accumulation_steps` must be 1, got 4: the trace determines"),
        ({"auto_find_batch_size": True}, "`auto_find_batch_size` must be False, got True"),
        ({"include_num_input_tokens_seen": "all"}, "`include_num_input_tokens_seen` must be 'no', got 'all'"),
        ({"train_sampling_strategy": "sequential"}, "`train_sampling_strategy` must be 'random', got 'sequential'"),
        ({"train_sampling_strategy": "group_by_length"}, "got 'group_by_length': .* similar length, pass a vbs.Token"),
        ({"train_sampling_strategy": "batch_rebalance"}, "`train_sampling_strategy` must be 'random', got 'batch_"),
        ({"dataloader_in_order": False}, "`dataloader_in_order` must be True, got False: which step a minibatch"),
        ({"accelerator_config": {"split_batches": True}}, "`split_batches` of `accelerator_config` must be False"),
        ({"accelerator_config": {"dispatch_batches": True}}, "`dispatch_batches` of `accelerator_config` must be None"),
    ],
)
def test_training_arguments_determined_by_the_trace_raise(tmp_path, setting, message):
    with pytest.raises(ValueError, match=message):
        trainer_with(arguments(tmp_path, **setting))


def test_length_groups_before_transformers_5_2_raise(tmp_path):
    args = arguments(tmp_path)
    args.group_by_length = True
    with pytest.raises(ValueError, match=r"`group_by_length` must be False, got True: .* pass a vbs.TokenBudget"):
        check_arguments(args)


class FirstEight(Trainer):
    """A trainer that trains on some of the samples."""

    def _get_train_sampler(self, dataset=None):
        return SequentialSampler(range(8))


class OwnLoader(Trainer):
    """A trainer that repeats samples."""

    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, sampler=WeightedRandomSampler([1.0] * 40, 80), batch_size=2)


class OwnWayOfLoading(Trainer):
    """A trainer that makes all loaders in another way."""

    def _get_dataloader(self, dataset, *args, **kwargs):
        return DataLoader(dataset, batch_size=2)


class OwnBatches(Trainer):
    """A trainer that leaves out samples."""

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, number = super().get_batch_samples(epoch_iterator, num_batches, device)
        return batches[:1], number


class OwnTrainingStep(Trainer):
    """A trainer that changes the samples."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        return super().training_step(model, {**inputs, "labels": inputs["input_ids"]}, num_items_in_batch)


SAMPLES_ARE_LOST = "the trace and the seed determine the samples of each step"


@pytest.mark.parametrize(
    ("kind", "name", "reason"),
    [
        (FirstEight, "_get_train_sampler", SAMPLES_ARE_LOST),
        (OwnLoader, "get_train_dataloader", SAMPLES_ARE_LOST),
        (OwnWayOfLoading, "_get_dataloader", SAMPLES_ARE_LOST),
        (OwnBatches, "get_batch_samples", "to count tokens in another way, override `_get_num_items_in_batch`"),
        (OwnTrainingStep, "training_step", "it would not be called"),
    ],
)
def test_a_trainer_whose_own_samples_would_be_lost_is_refused(tmp_path, kind, name, reason):
    message = f"^`{name}` must be that of transformers.Trainer, got {kind.__name__}'s: {reason}"
    with pytest.raises(ValueError, match=message):
        trainer_with(arguments(tmp_path), kind=type("Variable", (VariableBatchMixin, kind), {}))


class FirstEightOfOurs(VariableBatchTrainer):
    """A user's subclass that is as blind as one below."""

    _get_train_sampler = FirstEight._get_train_sampler


def test_a_subclass_with_a_sampler_of_its_own_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`_get_train_sampler` must be .*, got FirstEightOfOurs's"):
        trainer_with(arguments(tmp_path), kind=FirstEightOfOurs)


@pytest.mark.parametrize(
    ("sampler", "name"),
    [
        (SequentialSampler(range(8)), "BatchSampler with SequentialSampler"),
        (WeightedRandomSampler([1.0] * 40, 40), "BatchSampler with WeightedRandomSampler"),
        (RandomSampler(range(40), replacement=True), "BatchSampler with SeedableRandomSampler"),
        (RandomSampler(range(40), num_samples=8), "BatchSampler with SeedableRandomSampler"),
        (list(range(40)), "BatchSampler with list"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_sampler_that_is_set_on_the_trainer_is_refused(tmp_path, sampler, name):
    trainer = trainer_with(arguments(tmp_path))
    trainer._get_train_sampler = lambda dataset: sampler
    message = f"^the trainer's loader must read all samples in random order, got {name}: {SAMPLES_ARE_LOST}"
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_batches_that_are_set_on_the_trainer_are_refused(tmp_path):
    trainer = trainer_with(arguments(tmp_path))
    batches = type("PairsOfNeighbours", (BatchSampler,), {})(SequentialSampler(range(40)), 2, False)
    trainer._get_dataloader = lambda dataset, **settings: DataLoader(dataset, batch_sampler=batches)
    with pytest.raises(ValueError, match="got PairsOfNeighbours with SequentialSampler"):
        trainer.train()


@pytest.mark.parametrize("number", [1, 2])
def test_processes_that_share_their_samples_are_refused(number):
    plain = DataLoader(range(40), batch_size=2, shuffle=True)
    own = prepare_data_loader(plain, num_processes=number, process_index=0)
    check_loader(own, number)
    with pytest.raises(ValueError, match=rf"^each of the 4 processes must have samples of its own, got {number} parts"):
        check_loader(own, 4)


class OtherSamplesInEachEpoch(Dataset):
    """A curriculum: the epochs have different labels."""

    def __init__(self):
        self.samples, self.epochs = samples(), []

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, number):
        return self.samples[number]

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


def test_set_epoch_of_the_data_set_is_called(tmp_path):
    data = OtherSamplesInEachEpoch()
    trainer_with(arguments(tmp_path), train_dataset=data).train()
    assert data.epochs == [0, 1]


def test_settings_of_the_trainers_loader_are_kept(tmp_path):
    own = {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 3, "dataloader_multiprocessing_context": "fork"}
    loader = trainer_with(arguments(tmp_path, **own)).get_train_dataloader().loader
    assert (loader.num_workers, loader.prefetch_factor) == (1, 3)
    assert loader.multiprocessing_context.get_start_method() == "fork"


def test_fsdp1_and_fsdp_with_float16_raise(tmp_path, monkeypatch):
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # which these arguments set
    args = arguments(tmp_path, fsdp=True, fsdp_config={"version": 1})
    with pytest.raises(ValueError, match="`version` of `fsdp_config` must be 2, got 1: others reduce gradients"):
        check_arguments(args)
    args = arguments(tmp_path, fsdp=True)
    check_arguments(args)
    args.fp16 = True
    with pytest.raises(ValueError, match="`fp16` with `fsdp` must be False, got True: use `bf16`"):
        check_arguments(args)


def test_an_option_that_the_training_arguments_have_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match="must not contain 'clip_grad_norm': set `max_grad_norm` of the training arguments"
    ):
        trainer_with(arguments(tmp_path), options={"clip_grad_norm": 1.0})


def test_too_short_trace_raises_before_the_first_step(tmp_path):
    with pytest.raises(ValueError, match=r"holds 2 epochs.*`num_train_epochs` is 3, `max_steps` is not set"):
        trainer_with(arguments(tmp_path, num_train_epochs=3)).train()
    with pytest.raises(ValueError, match="holds 11 steps"):
        trainer_with(arguments(tmp_path, max_steps=12)).train()


def test_open_steps_raise(tmp_path):
    with pytest.raises(ValueError, match="`trace` must not be OpenSteps with the trainer, which needs the length"):
        trainer_with(arguments(tmp_path), trace=vbs.OpenSteps()).train()


def test_minibatch_that_does_not_divide_the_trace_raises(tmp_path):
    with pytest.raises(ValueError, match="batchsize must be a multiple of 8"):
        trainer_with(arguments(tmp_path, per_device_train_batch_size=8)).train()


def test_checkpoint_without_the_optimizer_raises(tmp_path):
    args = {"save_strategy": "steps", "save_steps": 4, "max_steps": 4}
    trainer_with(arguments(tmp_path, save_only_model=True, **args)).train()
    with pytest.raises(RuntimeError, match="was saved after 4 steps, but the optimizer is at step 0"):
        trainer_with(arguments(tmp_path)).train(resume_from_checkpoint=True)


class OwnStep(VariableBatchMixin, Trainer):
    """A user's subclass that does not call the `training_step` of this library."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        for minibatch in inputs:
            self.compute_loss(model, minibatch).backward()
        return torch.zeros(())


def test_a_step_that_makes_no_update_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match="the loop counted one step, but the optimizer made 0"):
        trainer_with(arguments(tmp_path), kind=OwnStep).train()


def test_different_run_does_not_resume(tmp_path):
    trainer_with(arguments(tmp_path, save_strategy="steps", save_steps=2, max_steps=2)).train()
    trainer = trainer_with(arguments(tmp_path), trace=[*TRACE[:-1], 6])
    with pytest.raises(ValueError, match=r"^the checkpoint was saved by another run: trace was"):
        trainer.train(resume_from_checkpoint=True)


class MeanOfMinibatches(VariableBatchMixin, Trainer):
    """A trainer whose loss is declared as the mean over a minibatch."""

    loss_is_scaled_for_ga = False


def test_minibatches_have_equal_weights_if_the_trainer_requests_it(tmp_path):
    data = [sample for sample in samples() if sample["labels"][-1] != -100][:32]  # each has tokens to predict
    settings = {"max_grad_norm": 0.0, "lr_scheduler_type": "constant", "warmup_steps": 0, "num_train_epochs": 1}
    trainer = trainer_with(
        arguments(tmp_path, **settings), kind=MeanOfMinibatches, train_dataset=data, trace=[8, 4, 12, 8]
    )
    trainer.train()
    model = trainer_runs.model_of_llama()
    sampler = vbs.CustomSampler(data, trace=[8, 4, 12, 8], minibatch_size=2, seed=42)
    optimizer = vbs.LinearRuleOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), sampler, ref_batchsize=8)
    for _ in optimizer.epochs(1):
        for indices in sampler:
            model(**{name: torch.stack([data[i][name] for i in indices]) for name in data[0]}).loss.backward()
            optimizer.step()
    assert_close(trainer.model.state_dict(), model.state_dict(), **TOLERANCE)


def test_training_twice_with_a_new_model_gives_the_same_run(tmp_path):
    trainer = trainer_with(arguments(tmp_path), "adascale", kind=OfFunction)
    weights = []
    for _ in range(2):
        trainer.train()
        weights.append(trainer_runs.weights_of(trainer.model))
    assert_close(weights[0], weights[1], rtol=0, atol=0)
    assert trainer.variable_optimizer.steps_done == len(TRACE)


class OfFunction(VariableBatchMixin, Trainer):
    """A trainer whose model is made when training starts."""

    def __init__(self, model, args, **settings):
        super().__init__(None, args, model_init=lambda: trainer_runs.model_of_llama(), **settings)


def test_training_again_with_other_data_raises(tmp_path):
    trainer = trainer_with(arguments(tmp_path, max_steps=1, logging_strategy="no"))
    trainer.train()
    trainer.train_dataset = samples() * 2
    with pytest.raises(ValueError, match=r"`len\(train_dataset\)` changed from 40 to 80 since training began"):
        trainer.train()


def test_training_twice_starts_over(tmp_path):
    trainer = trainer_with(arguments(tmp_path, max_steps=4, logging_strategy="no"))
    trainer.train()
    trainer.train()
    assert trainer.variable_optimizer.steps_done == 8
    assert (trainer.variable_optimizer.epoch, trainer.variable_optimizer.epoch_step) == (0, 4)


def test_plain_trainer_rejects_an_optimizer_of_this_library(tmp_path):
    model, data = trainer_runs.model_of_llama(), samples()
    sampler = vbs.CustomSampler(data, trace=TRACE, minibatch_size=2)
    optimizer = vbs.LinearRuleOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), sampler, ref_batchsize=8)
    trainer = Trainer(model, arguments(tmp_path), train_dataset=data, optimizers=(optimizer, None))
    with pytest.raises(RuntimeError, match="in Transformers the VariableBatchTrainer"):
        trainer.train()
