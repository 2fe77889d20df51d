"""Trainers of trl: SFT and DPO train as in a loop by hand; those that need samples in an order of their own raise."""

import inspect

import pytest
import torch
import trainer_runs
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.nn.functional import cross_entropy, logsigmoid
from torch.testing import assert_close
from transformers import PreTrainedTokenizerFast
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.gkd import GKDTrainer

import variable_batch_size as vbs
from variable_batch_size.integrations.transformers import VariableBatchMixin, check_arguments

# trl's own use of transformers
pytestmark = pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing.*is deprecated:FutureWarning")
TRACE = [4, 8, 2, 12, 6, 8]  # an epoch
REF_BATCHSIZE = 8
VARIABLE = {"trace": TRACE, "rule": "linear", "ref_batchsize": REF_BATCHSIZE}
TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}
BETA = 0.3  # of DPO
PAD, END = 0, 1
WORDS = ["<pad>", "<end>", *(f"w{number}" for number in range(2, 50))]


def variable(trainer):
    """A trainer with a variable batch size."""
    return type(f"Variable{trainer.__name__}", (VariableBatchMixin, trainer), {})


def tokenizer():
    made = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>")


def words(generator, number):
    return torch.randint(2, len(WORDS), (number,), generator=generator).tolist()


def as_text(tokens):
    return " ".join(WORDS[token] for token in tokens)


def texts():
    """Of very different length."""
    generator = torch.Generator().manual_seed(1)
    return [words(generator, 2 + 5 * number % 11) for number in range(40)]


def preferences():
    """Prompt, chosen and rejected answer."""
    generator = torch.Generator().manual_seed(1)
    return [[words(generator, 1 + number * factor % 7) for factor in (1, 3, 4)] for number in range(40)]


def model():
    made = trainer_runs.model_of_llama()
    made.config.pad_token_id, made.config.eos_token_id = PAD, END
    return made


def arguments(folder, kind, **changed):
    own = {"max_grad_norm": 0.0, "num_train_epochs": 1, "lr_scheduler_type": "constant", "warmup_steps": 0}
    own |= {"activation_checkpointing": True}  # the default of trl
    return trainer_runs.arguments(folder, kind=kind, bf16=False, **{**own, **changed})


def trained(kind, args, data, **others):
    """The weights after a run."""
    trainer = kind(model=model(), args=args, train_dataset=data, processing_class=tokenizer(), **others)
    trainer.train()
    return trainer_runs.weights_of(trainer.model)


def by_own_loop(loss_of):
    """The weights after the steps of the trace, each computed as one batch."""
    own, sampler = model(), vbs.CustomSampler(dataset_size=40, trace=TRACE, minibatch_size=2, seed=42)
    optimizer = torch.optim.SGD(own.parameters())
    minibatches = iter(sampler)
    for size in TRACE:
        optimizer.zero_grad()
        loss_of(own, [number for _ in range(size // 2) for number in next(minibatches)]).backward()
        optimizer.param_groups[0]["lr"] = 0.05 * size / REF_BATCHSIZE
        optimizer.step()
    return trainer_runs.weights_of(own)


def log_likelihoods(own, tokens):
    """Of each token of a text after the first."""
    logits = own(torch.tensor([tokens])).logits[0, :-1]
    return -cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none")


def loss_of_texts(own, numbers):
    found = torch.cat([log_likelihoods(own, [*texts()[number], END]) for number in numbers])
    return -found.mean()  # over the tokens of the step


def loss_of_preferences(own, numbers):
    """As in equation 7 of the paper on DPO."""
    reference, losses = model(), []
    for prompt, *answers in (preferences()[number] for number in numbers):
        gains = []
        for answer in answers:
            found = [log_likelihoods(one, [*prompt, *answer, END]) for one in (own, reference)]
            gains.append((found[0] - found[1].detach())[len(prompt) - 1 :].sum())
        losses.append(-logsigmoid(BETA * (gains[0] - gains[1])))
    return torch.stack(losses).mean()


def dataset_of_texts():
    return Dataset.from_list([{"text": as_text(tokens)} for tokens in texts()])


def dataset_of_preferences():
    rows = [[as_text(tokens) for tokens in one] for one in preferences()]
    return Dataset.from_list([{"prompt": row[0], "chosen": f" {row[1]}", "rejected": f" {row[2]}"} for row in rows])


def test_sft_equals_a_loop_by_hand(tmp_path):
    found = trained(variable(SFTTrainer), arguments(tmp_path, SFTConfig), dataset_of_texts(), **VARIABLE)
    assert_close(found, by_own_loop(loss_of_texts), **TOLERANCE)


def test_dpo_equals_a_loop_by_hand(tmp_path):
    args = arguments(tmp_path, DPOConfig, beta=BETA)
    found = trained(variable(DPOTrainer), args, dataset_of_preferences(), ref_model=model(), **VARIABLE)
    assert_close(found, by_own_loop(loss_of_preferences), **TOLERANCE)


@pytest.mark.parametrize(("trainer", "config"), [(SFTTrainer, SFTConfig), (DPOTrainer, DPOConfig)])
def test_a_constant_batch_size_gives_the_weights_of_trl(tmp_path, trainer, config):
    class InOurOrder(trainer):
        def _get_train_sampler(self, dataset=None):
            sampler = vbs.CustomSampler(dataset_size=40, trace=8, minibatch_size=2, seed=42)
            return [number for minibatch in sampler for number in minibatch]

    data, others = dataset_of_texts(), {}
    if trainer is DPOTrainer:
        data, others = dataset_of_preferences(), {"ref_model": model()}
    found = trained(variable(trainer), arguments(tmp_path, config), data, **{**VARIABLE, "trace": 8}, **others)
    args = arguments(tmp_path, config, gradient_accumulation_steps=4)
    assert_close(found, trained(InOurOrder, args, data, **others), **TOLERANCE)


@pytest.mark.parametrize(
    ("trainer", "config", "given"),
    [
        (GRPOTrainer, GRPOConfig, {"reward_funcs": len, "train_dataset": [{"prompt": "w3"}] * 8}),
        (RLOOTrainer, RLOOConfig, {"reward_funcs": len, "train_dataset": [{"prompt": "w3"}] * 8}),
        (KTOTrainer, KTOConfig, {"train_dataset": [{"prompt": "w3", "completion": "w4", "label": True}] * 8}),
    ],
)
def test_a_trainer_that_draws_samples_by_itself_is_refused(tmp_path, trainer, config, given):
    args = arguments(tmp_path, config, per_device_train_batch_size=8)
    given = {**given, "train_dataset": Dataset.from_list(given["train_dataset"])}
    with pytest.raises(
        ValueError, match=rf"^`_get_train_sampler` must be that .*, got {trainer.__name__}'s: the trace"
    ):
        variable(trainer)(model=model(), args=args, processing_class=tokenizer(), **given, **VARIABLE)


def test_a_trainer_with_a_training_step_of_its_own_is_refused():
    with pytest.raises(ValueError, match=r"^`training_step` must be that of .*, got GKDTrainer's: it would not be"):
        variable(GKDTrainer)(**VARIABLE)


@pytest.mark.parametrize("trainer", [SFTTrainer, DPOTrainer, RewardTrainer])
def test_the_step_of_other_trainers_only_offloads_activations(trainer):
    lines = [line.strip() for line in inspect.getsource(trainer.training_step).splitlines()]
    offloads = "with self.maybe_activation_offload_context:"
    assert lines == [
        "def training_step(self, *args, **kwargs):",
        offloads,
        "return super().training_step(*args, **kwargs)",
    ]


def test_offloading_of_activations_is_refused(tmp_path):
    args = arguments(tmp_path, SFTConfig, activation_offloading=True)
    with pytest.raises(ValueError, match="`activation_offloading` must be False, got True: the `training_step` of"):
        check_arguments(args)  # the trainer itself needs an accelerator for it
