"""Lightning: weights, counts and logs equal those of a hand-written loop, and settings that would change them raise."""

import csv
import re
import runpy
import sys

import lightning_runs as runs
import pytest
import torch
from documents import ROOT
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning_runs import (
    NUM_EPOCHS,
    RULES,
    TRACE,
    Manual,
    Net,
    StopAfter,
    Stopped,
    Streamed,
    make_trainer,
    own_loop,
    weights,
)
from torch import multiprocessing, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import variable_batch_size as vbs
from variable_batch_size.integrations.lightning import VariableBatchSize, check_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:The '.*' does not have many workers"),
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
    pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX`"),
    pytest.mark.filterwarnings("ignore:.*pkg_resources is deprecated"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization"),
]


@pytest.fixture(scope="module")
def expected():
    """The results of hand-written loops, by rule."""
    return {rule: own_loop(rule)[0] for rule in RULES}


def fit(module, trainer, **options):
    trainer.fit(module, **options)
    return weights(module.network)


def parameters(network):
    return parameters_to_vector(network.parameters()).detach()


# ---------------------------------------------------------------------------------------------------- the same weights


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", [Net, Manual])
def test_weights_and_counts_equal_those_of_a_hand_written_loop(expected, kind, rule, tmp_path):
    module, trainer = kind(rule), make_trainer(tmp_path)
    assert torch.equal(fit(module, trainer), weights(expected[rule]))
    assert trainer.global_step == len(TRACE)
    assert trainer.current_epoch == NUM_EPOCHS
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05 * 0.8**4)
    with open(tmp_path / "metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["loss"]]
    assert [int(row["step"]) for row in rows] == list(range(len(TRACE)))
    assert [float(row["batch_size"]) for row in rows] == TRACE
    if rule == "linear":
        rates = [0.05 * 0.8 ** (step // 2) * size / 8 for step, size in enumerate(TRACE)]
        assert [float(row["learning_rate"]) for row in rows] == pytest.approx(rates)


class Unrounded(MixedPrecision):
    """A loss scale without autocast, whose rounding a hand-written loop in float32 does not have."""

    def __init__(self, **options):
        super().__init__("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", growth_interval=2, **options))

    def autocast_context_manager(self):
        return torch.autocast("cpu", enabled=False)


@pytest.mark.parametrize("kind", [Net, Manual])
def test_loss_scales_that_change_within_steps_do_not_change_the_result(expected, kind, tmp_path):
    plugin = Unrounded(init_scale=2.0**10)
    module, trainer = kind("adascale"), make_trainer(plugins=[plugin])
    torch.testing.assert_close(fit(module, trainer), weights(expected["adascale"]), rtol=1e-6, atol=1e-6)
    assert trainer.global_step == len(TRACE)
    assert plugin.scaler.get_scale() > 2.0**20


def test_overflow_of_the_loss_scale_skips_the_whole_step():
    plugin = Unrounded(init_scale=2.0**127, backoff_factor=2.0**-100)
    module, trainer = Net(), make_trainer(plugins=[plugin])
    fit(module, trainer)
    assert trainer.optimizers[0].steps_skipped == 1
    assert trainer.global_step == trainer.lr_scheduler_configs[0].scheduler.last_epoch == len(TRACE) - 1


def growing():
    """A policy whose epochs have 9, 10 and 9 minibatches, in 8, 5 and 8 steps."""
    return vbs.policies.FunctionPolicy(lambda seen: 4 * (1 + seen.steps_done % 4), every=1, lead=2)


@pytest.fixture(scope="module")
def decided():
    """The weights and the number of steps of a hand-written loop with this policy."""
    network, num_steps = own_loop("adascale", trace=growing())
    return weights(network), num_steps


@pytest.mark.parametrize("num_workers", [0, 1])
def test_policies_decide_as_in_a_hand_written_loop(decided, num_workers):
    module = Net("adascale", trace=growing(), num_workers=num_workers)
    trainer = make_trainer(limit_val_batches=1.0, num_sanity_val_steps=0)
    assert torch.equal(fit(module, trainer), decided[0])
    assert trainer.global_step == decided[1]
    assert module.num_validations == trainer.current_epoch == NUM_EPOCHS


def test_watched_traces_are_followed_as_in_a_hand_written_loop(expected, tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("step,batchsize\n" + "".join(f"{step},{size}\n" for step, size in enumerate(TRACE)))
    trainer = make_trainer()
    assert torch.equal(fit(Net(trace=vbs.traces.WatchedTrace(path)), trainer), weights(expected["linear"]))
    assert trainer.global_step == len(TRACE)


def test_loader_workers_change_nothing(expected):
    assert torch.equal(fit(Net(num_workers=1), make_trainer()), weights(expected["linear"]))


def test_loader_made_for_each_epoch_changes_nothing(expected):
    trainer = make_trainer(reload_dataloaders_every_n_epochs=1)
    assert torch.equal(fit(Net(), trainer), weights(expected["linear"]))


def test_validation_runs_at_the_end_of_each_epoch_and_on_request(expected):
    for interval, num_validations in ((1.0, 3), (0.5, 6)):
        module = Net()
        trainer = make_trainer(limit_val_batches=1.0, val_check_interval=interval, num_sanity_val_steps=0)
        assert torch.equal(fit(module, trainer), weights(expected["linear"]))
        assert module.num_validations == num_validations


def test_max_steps_counts_updates():
    trained, _ = own_loop(max_steps=5)
    module, trainer = Net(), make_trainer(max_epochs=-1, max_steps=5)
    assert torch.equal(fit(module, trainer), weights(trained))
    assert trainer.global_step == 5


def test_a_fast_run_makes_an_update():
    trained, _ = own_loop(max_steps=1)
    trainer = make_trainer(fast_dev_run=True)
    assert torch.equal(fit(Net(), trainer), weights(trained))
    assert trainer.global_step == 1


def test_weight_averages_follow_updates(expected):
    class Counting(EMAWeightAveraging):
        seen: list[int] = []  # noqa: RUF012

        def should_update(self, step_idx=None, epoch_idx=None):
            if step_idx is not None:
                self.seen.append(step_idx)
            return step_idx is not None

    averaging = Counting(decay=0.0)
    module = Net()
    fit(module, make_trainer(callbacks=[averaging]))
    assert averaging.seen == list(range(len(TRACE)))
    torch.testing.assert_close(parameters(module.network), parameters(expected["linear"]))


def test_the_progress_bar_shows_batch_size_and_learning_rate():
    trainer = make_trainer()
    fit(Net(), trainer)
    assert trainer.progress_bar_metrics["batch_size"] == TRACE[-1]
    assert trainer.progress_bar_metrics["learning_rate"] == pytest.approx(0.05 * 0.8**4 * TRACE[-1] / 8)


def test_skipped_update_is_neither_logged_nor_a_scheduler_step():
    class Unlucky(Net):
        def loss(self, batch):
            loss = super().loss(batch)
            return loss * torch.nan if self.trainer.optimizers[0].steps_done == 1 else loss

    module, trainer = Unlucky("adascale"), make_trainer()
    fit(module, trainer)
    assert trainer.optimizers[0].steps_skipped == 1
    assert trainer.global_step == len(TRACE) - 1
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == len(TRACE) - 1


LENGTHS = [1 + 3 * number % 7 for number in range(40)]


class Budgeted(Net):
    """With a token budget: each sample of the data set stands for some tokens."""

    def setup(self, stage):
        torch.manual_seed(7)
        self.network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.sampler = vbs.TokenBudget(LENGTHS, [16, 32, 48], tokens=16, on_end="cycle", lockstep=True)

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * len(batch[0])


def test_open_steps_raise():
    with pytest.raises(ValueError, match="`trace` must not be OpenSteps with Lightning, which needs the length of"):
        fit(Net(trace=vbs.OpenSteps()), make_trainer(max_epochs=1))


class Weighted(Budgeted):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure, weight=2.0)


def test_a_token_budget_needs_weights_and_trains_with_them():
    with pytest.raises(ValueError, match=r"`weight` must be passed to step\(\): minibatches of a TokenBudget"):
        fit(Budgeted(), make_trainer(max_epochs=1))
    module = Weighted()
    trained = fit(module, make_trainer(max_epochs=1))
    own = Weighted()
    own.setup("fit")
    optimizer = own.configure_optimizers()
    optimizer, scheduler = optimizer["optimizer"], optimizer["lr_scheduler"]["scheduler"]
    for _ in optimizer.epochs(1):
        for batch in own.train_dataloader():
            (own.loss(batch) * len(batch[0])).backward()
            if optimizer.step(weight=2.0):
                scheduler.step()
    assert torch.equal(trained, weights(own.network))


def test_minibatches_can_have_weights():
    class Weighing(Net):
        def training_step(self, batch, batch_idx):
            data, target = batch
            return nn.functional.mse_loss(self.network(data), target, reduction="sum")

        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            optimizer.step(closure=optimizer_closure, weight=4.0)

    trained, _ = own_loop()
    module = Weighing()
    fit(module, make_trainer())
    torch.testing.assert_close(parameters(module.network), parameters(trained))


@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available")
@pytest.mark.filterwarnings("ignore:`weights_only` was not set")
def test_example_runs_and_has_nothing_to_do_when_run_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lightning_module.py", "--directory", str(tmp_path)])
    for _ in range(2):
        runpy.run_path(str(ROOT / "examples" / "lightning_module.py"), run_name="__main__")
    shown = re.findall(r"^60 updates, accuracy (\S+)$", capsys.readouterr().out, re.MULTILINE)
    assert len(shown) == 2
    assert shown[0] == shown[1]
    assert float(shown[0]) > 0.9  # 0.969 to 0.981 with ten seeds


# ----------------------------------------------------------------------------------------------- stopped and continued


@pytest.mark.parametrize("num_minibatches", [1, 2, 4, 9, 19, 24])
def test_stopped_run_resumes_from_lightnings_checkpoint(expected, num_minibatches, tmp_path):
    kind = Manual if num_minibatches % 2 else Net
    path = tmp_path / "stopped.ckpt"
    with pytest.raises(Stopped):
        fit(kind("adascale"), make_trainer(callbacks=[StopAfter(path, num_minibatches)]))
    module, trainer = kind("adascale"), make_trainer()
    assert torch.equal(fit(module, trainer, ckpt_path=path, weights_only=True), weights(expected["adascale"]))
    assert trainer.global_step == len(TRACE)
    assert trainer.current_epoch == NUM_EPOCHS


@pytest.mark.parametrize("num_minibatches", [4, 9, 13, 19, 28])
def test_run_of_a_policy_resumes_from_lightnings_checkpoint(decided, num_minibatches, tmp_path):
    path = tmp_path / "stopped.ckpt"
    with pytest.raises(Stopped):
        fit(Net("adascale", trace=growing()), make_trainer(callbacks=[StopAfter(path, num_minibatches)]))
    module, trainer = Net("adascale", trace=growing()), make_trainer()
    assert torch.equal(fit(module, trainer, ckpt_path=path, weights_only=True), decided[0])
    assert trainer.global_step == decided[1]
    assert trainer.current_epoch == NUM_EPOCHS


def test_checkpoints_are_saved_by_updates_and_the_last_is_found(expected, tmp_path):
    def saving():
        return ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=4, save_top_k=-1, save_last=True)

    fit(Net(), make_trainer(callbacks=[saving()], max_epochs=-1, max_steps=6, enable_checkpointing=True))
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["last.ckpt", "step=4.ckpt"]
    module = Net()
    trainer = make_trainer(callbacks=[saving()], enable_checkpointing=True)
    assert torch.equal(fit(module, trainer, ckpt_path="last", weights_only=False), weights(expected["linear"]))
    assert sorted(path.name for path in tmp_path.glob("step*.ckpt")) == ["step=4.ckpt", "step=8.ckpt"]


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("max_steps", [2, 8], ids=["in the first epoch", "in the last"])
@pytest.mark.parametrize("saved", ["at the end of the epoch", "after the run"])
def test_epoch_interrupted_by_max_steps_is_completed_when_the_run_resumes(expected, saved, max_steps, tmp_path):
    path, saving = tmp_path / "left.ckpt", ModelCheckpoint(tmp_path, "left", save_on_train_epoch_end=True)
    trainer = make_trainer(max_steps=max_steps, callbacks=[saving], enable_checkpointing=True)
    fit(Net(), trainer)
    if saved == "after the run":
        trainer.save_checkpoint(path)
    module, trainer = Net(), make_trainer()
    assert torch.equal(fit(module, trainer, ckpt_path=path, weights_only=True), weights(expected["linear"]))
    assert trainer.global_step == module.lr_schedulers().last_epoch == len(TRACE)
    assert trainer.current_epoch == NUM_EPOCHS


def test_different_run_does_not_resume(tmp_path):
    path = tmp_path / "stopped.ckpt"
    with pytest.raises(Stopped):
        fit(Net(), make_trainer(callbacks=[StopAfter(path, 3)]))
    with pytest.raises(ValueError, match=r"^the checkpoint was saved by another run: .*trace"):
        fit(Net(trace=[*TRACE[:-1], 8]), make_trainer(), ckpt_path=path, weights_only=True)


@pytest.mark.parametrize("num_minibatches", [3, 11])
def test_validation_does_not_count_minibatches_twice_in_a_resumed_run(num_minibatches, tmp_path):
    settings = {"limit_val_batches": 1.0, "num_sanity_val_steps": 0}
    settings |= {"val_check_interval": 5, "check_val_every_n_epoch": None}
    whole, first, second, path = Validated(), Validated(), Validated(), tmp_path / "stopped.ckpt"
    fit(whole, make_trainer(**settings))
    with pytest.raises(Stopped):
        fit(first, make_trainer(callbacks=[StopAfter(path, num_minibatches)], **settings))
    fit(second, make_trainer(**settings), ckpt_path=path, weights_only=True)
    first.places = [place for place in first.places if place not in second.places]
    assert first.places + second.places == whole.places


class Validated(Net):
    """Records when it is validated."""

    def __init__(self):
        super().__init__()
        self.places = []

    def on_validation_start(self):
        self.places.append((self.current_epoch, self.trainer.fit_loop.epoch_loop.batch_idx))


def test_second_fit_of_a_trainer_raises_unless_it_resumes(expected, tmp_path):
    trainer, path = make_trainer(max_epochs=-1, max_steps=2), tmp_path / "saved.ckpt"
    fit(Net(), trainer)
    trainer.save_checkpoint(path)
    with pytest.raises(RuntimeError, match="this Trainer was already used"):
        fit(Net(), trainer)
    trainer.fit_loop.epoch_loop.max_steps = len(TRACE)
    assert torch.equal(fit(Net(), trainer, ckpt_path=path, weights_only=True), weights(expected["linear"]))
    assert trainer.global_step == len(TRACE)


# ------------------------------------------------------------------------------------------------------------- streams


@pytest.fixture(scope="module")
def in_order():
    """The network of a hand-written loop over the samples in their order."""
    return own_loop("adascale", shuffle=False)[0]


def test_a_stream_trains_as_a_hand_written_loop_over_its_samples(in_order):
    module, trainer = Streamed("adascale"), make_trainer(limit_val_batches=1.0, num_sanity_val_steps=0)
    assert torch.equal(fit(module, trainer), weights(in_order))
    assert (trainer.global_step, trainer.current_epoch, module.num_validations) == (len(TRACE), NUM_EPOCHS, NUM_EPOCHS)


@pytest.mark.parametrize("num_minibatches", [3, 9, 12])
def test_a_stream_resumes_at_any_minibatch(in_order, tmp_path, num_minibatches):
    path = tmp_path / "saved.ckpt"
    with pytest.raises(Stopped):
        fit(Streamed("adascale"), make_trainer(callbacks=[StopAfter(path, num_minibatches)]))
    trainer = make_trainer()
    found = fit(Streamed("adascale"), trainer, ckpt_path=path, weights_only=True)
    assert torch.equal(found, weights(in_order))
    assert trainer.global_step == len(TRACE)


def test_a_stream_that_ends_early_ends_the_epoch_which_is_validated(caplog):
    module, trainer = Streamed(num_samples=30), make_trainer(limit_val_batches=1.0, num_sanity_val_steps=0)
    fit(module, trainer)
    assert "the stream ended after 30 samples, so epoch 0 ends after 2 steps" in caplog.text
    assert (trainer.global_step, trainer.current_epoch, module.num_validations) == (5, NUM_EPOCHS, NUM_EPOCHS)


def test_an_endless_trace_of_a_stream_ends_with_it_or_with_max_steps():
    endless = {"dataset_size": None, "on_end": "cycle"}
    for options, num_steps in (({"max_epochs": 1}, 2), ({"max_epochs": -1, "max_steps": 1}, 1)):
        trainer = make_trainer(**options)
        fit(Streamed(num_samples=24, **endless), trainer)
        assert trainer.global_step == num_steps


def test_streams_that_cannot_begin_again_raise():
    class Once(Streamed):
        def setup(self, stage):
            self.sampler = vbs.Stream(iter(range(40)), trace=TRACE, minibatch_size=4, dataset_size=40)

    refused(Once(), "^`samples` of a Stream must not be an iterator with Lightning, which starts to read before it")
    refused(Streamed(trace=growing()), "^`trace` of a Stream must not be FunctionPolicy with Lightning: use a trace")
    refused(
        Streamed(num_workers=1), "^`num_workers` of a stream's loader must be 0, got 1: Lightning starts the workers"
    )
    refused(Streamed(), "must be 1.0 or a number of minibatches, got 0.5: a stream may end", val_check_interval=0.5)


# ------------------------------------------------------------------------------------------------------- two processes


class Telling(Callback):
    """Writes the counts of a process."""

    def __init__(self, directory):
        self.directory = directory

    def on_train_end(self, trainer, module):
        steps = trainer.lr_scheduler_configs[0].scheduler.last_epoch
        text = f"{type(trainer.model).__name__} {trainer.global_step} {steps} {trainer.world_size}"
        (self.directory / f"rank{trainer.global_rank}").write_text(text)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_two_processes_equal_one_and_resume_as_one_or_two(expected, tmp_path):
    two = {"strategy": "ddp_fork", "devices": 2}
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    callbacks = [Telling(tmp_path), saving]
    module = Net("adascale")
    fit(module, make_trainer(callbacks=callbacks, enable_checkpointing=True, **two))
    torch.testing.assert_close(parameters(module.network), parameters(expected["adascale"]), rtol=0, atol=1e-6)
    for rank in range(2):
        assert (tmp_path / f"rank{rank}").read_text() == "DistributedDataParallel 9 9 2"
    for options in (two, {}):
        module = Net("adascale")
        fit(module, make_trainer(**options), ckpt_path=tmp_path / "step=4.ckpt", weights_only=True)
        torch.testing.assert_close(parameters(module.network), parameters(expected["adascale"]), rtol=0, atol=1e-6)


def test_a_stream_on_two_processes_equals_one(in_order):
    module = Streamed("adascale")
    fit(module, make_trainer(strategy="ddp_fork", devices=2))
    torch.testing.assert_close(parameters(module.network), parameters(in_order), rtol=0, atol=1e-6)


def test_sharded_model_trains_like_an_unsharded_one(tmp_path):
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # on a free port
    arguments = (store.port, tmp_path, "adascale")
    multiprocessing.start_processes(runs.train_in_shards, arguments, nprocs=2, start_method="fork")
    trained, _ = own_loop("adascale", model=runs.small_network())
    for rank in range(2):
        steps, whole = torch.load(tmp_path / f"rank{rank}.pt")
        assert steps == len(TRACE)
        torch.testing.assert_close(whole, parameters(trained), rtol=0, atol=1e-6)


def test_checkpoints_of_sharded_models_raise():
    message = (
        "^`enable_checkpointing` of the Trainer must be False, got True: .* in a loop of your own with vbs.Checkpoint$"
    )
    trainer = make_trainer(enable_checkpointing=True, strategy=ModelParallelStrategy(), devices=2)
    with pytest.raises(ValueError, match=message):
        check_trainer(trainer, Net())


# ------------------------------------------------------------------------------------------------------ what is refused

REFUSED = {
    "`accumulate_grad_batches` of the Trainer must be 1, got 2": {"accumulate_grad_batches": 2},
    "`gradient_clip_val` of the Trainer must be None, got 1.0: set `clip_grad_norm=`": {"gradient_clip_val": 1.0},
    "`limit_train_batches` of the Trainer must be 1.0, got 5": {"limit_train_batches": 5},
    "`overfit_batches` of the Trainer must be 0, got 2": {"overfit_batches": 2},
    "`use_distributed_sampler` of the Trainer must be False, got True": {
        "strategy": "ddp",
        "use_distributed_sampler": True,
    },
    "^trace holds 3 epochs of 40 samples": {"max_epochs": 4},
    "no GradientAccumulationScheduler: the trace determines": {"callbacks": [GradientAccumulationScheduler({1: 2})]},
    "no StochasticWeightAveraging: it runs an extra epoch": {"callbacks": [StochasticWeightAveraging(0.1)]},
    "no LearningRateFinder: it counts every minibatch as a step": {"callbacks": [LearningRateFinder()]},
}


def refused(module, message, **options):
    with pytest.raises((ValueError, RuntimeError), match=message):
        fit(module, make_trainer(**options))


@pytest.mark.filterwarnings("ignore:.*srun.* command is available")
@pytest.mark.parametrize("message", REFUSED)
def test_trainer_settings_that_would_change_the_result_raise(message):
    refused(Net(), message, **REFUSED[message])


def test_missing_callback_raises_in_the_first_minibatch():
    for kind in (Net, Manual):
        trainer = make_trainer()
        trainer.callbacks = [one for one in trainer.callbacks if not isinstance(one, VariableBatchSize)]
        with pytest.raises(RuntimeError, match=r"^step\(closure\) was called before set_epoch\(\): .* Lightning$"):
            fit(kind(), trainer)


def test_loader_that_does_not_use_the_sampler_raises():
    class Plain(Net):
        def train_dataloader(self):
            return DataLoader(runs.dataset(), batch_size=4)

    class Two(Net):
        def train_dataloader(self):
            return [super().train_dataloader(), DataLoader(runs.dataset(), batch_size=4)]

    class Other(Net):
        def train_dataloader(self):
            return DataLoader(runs.dataset(), batch_sampler=vbs.CustomSampler(40, TRACE, minibatch_size=4))

    message = r"^`train_dataloader` must be one DataLoader with the optimizer's sampler .*, got "
    refused(Plain(), message + "1 with BatchSampler$")
    refused(Two(), message + "2 with CustomSampler, BatchSampler$")
    refused(Other(), message + "1 with CustomSampler$")


def test_torch_optimizer_or_two_of_ours_raise():
    class Plain(Net):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Two(Manual):
        def configure_optimizers(self):
            first = super().configure_optimizers()["optimizer"]
            return [first, torch.optim.SGD(self.parameters(), lr=0.1)]

    refused(Plain(), "must return one optimizer of variable_batch_size, got SGD: ")
    refused(Two(), "must return one optimizer of variable_batch_size, got LinearRuleOptimizer, SGD: ")


def test_schedulers_that_would_count_minibatches_raise():
    class EverySecond(Net):
        def configure_optimizers(self):
            found = super().configure_optimizers()
            return {**found, "lr_scheduler": {**found["lr_scheduler"], "frequency": 2}}

    class Estimated(Net):
        def configure_optimizers(self):
            assert self.trainer.estimated_stepping_batches == 27
            return super().configure_optimizers()

    refused(EverySecond(), "must have frequency 1 and must not monitor a metric, got StepLR with frequency 2$")
    refused(Estimated(), "^`trainer.estimated_stepping_batches` counts minibatches: ")


def test_clipping_of_minibatches_instead_of_steps_raises():
    class Clipping(Net):
        def configure_gradient_clipping(self, *args, **options):
            self.clip_gradients(*args, **options)

    refused(Clipping(), "`configure_gradient_clipping` would clip the gradient of each minibatch: ")


def test_stateful_loaders_raise():
    class Stateful(Net):
        def train_dataloader(self):
            return StatefulDataLoader(runs.dataset(), batch_sampler=self.sampler)

    refused(Stateful(), "^`train_dataloader` must not be stateful, got StatefulDataLoader: ")


def test_policies_with_a_validation_interval_that_depends_on_the_length_raise():
    message = (
        "^`val_check_interval` of the Trainer must be 1.0 or a number of minibatches, got 0.5: FunctionPolicy decides"
    )
    refused(Net(trace=growing()), message, val_check_interval=0.5)


@pytest.mark.parametrize(
    ("times", "message"),
    [
        (0, r"^optimizer.step\(\) must be called once per minibatch, .*, got 0 calls in minibatch 0$"),
        (
            2,
            r"^step\(\) was called for minibatch 2 of epoch 0, but this pass has read only 1: call it once after",
        ),
    ],
)
def test_manual_optimization_needs_one_step_per_minibatch(times, message):
    class Wrong(Manual):
        def training_step(self, batch, batch_idx):
            self.manual_backward(self.loss(batch))
            for _ in range(times):
                self.optimizers().step()

    refused(Wrong(), message)


def test_minibatch_without_a_loss_raises():
    class Lossless(Net):
        def training_step(self, batch, batch_idx):
            return None

    with pytest.warns(UserWarning, match="`training_step` returned `None`"):
        refused(Lossless(), "^training_step returned None for minibatch 0, which would count as a gradient of 0")


def test_trainer_without_the_callback_is_unchanged():
    class Plain(Net):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def train_dataloader(self):
            return DataLoader(runs.dataset(), batch_size=4)

    trainer = Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, limit_val_batches=0)
    fit(Plain(), trainer)
    assert trainer.global_step == 10
