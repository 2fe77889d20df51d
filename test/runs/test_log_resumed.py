"""The first record after a resume: the mean over all steps since the record before, on any number of cores."""

import pytest
import torch
from stoppable_run import device_of
from torch import nn

import variable_batch_size as vbs
from variable_batch_size.runs import state_file

MINIBATCH, EVERY, STOPPED = 4, 4, 6
SIZES = [MINIBATCH * n for n in (3, 1, 2, 5, 1, 4, 2, 3)]  # in two epochs of 48 samples
X = torch.randn(48, 5, generator=torch.Generator().manual_seed(1))
TOKENS = torch.randint(1, 9, (48,), generator=torch.Generator().manual_seed(2))


def network():
    model, generator = nn.Linear(5, 1), torch.Generator().manual_seed(3)  # XLA cores share the generator of the host
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.rand(p.shape, generator=generator) - 0.5)
    return model


def run(
    directory,
    *,
    until=None,
    weighted=False,
    attached=True,
    first=None,
    options=None,
    logs=(EVERY,),
    minibatch=None,
    backend="cpu",
):
    """Train from a checkpoint in the directory, if there is one; returns the records of each log.

    Args:
        until: the step after which the process is killed.
        attached: whether the loop leaves the log to the optimizer; it is passed to the checkpoint otherwise.
        first: what is made first if both are attached: the "log" or the "checkpoint".
        options: of the loader.
        logs: steps between two records of each log.
    """
    device = device_of(backend)
    model = network().to(device)
    loader = vbs.DataLoader(torch.arange(48), trace=SIZES, minibatch_size=minibatch or MINIBATCH, **(options or {}))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = vbs.Optimizer(inner, loader, rule="linear", ref_batchsize=16, model=model)
    found = [[] for _ in logs]

    def make_logs():
        return [vbs.Log(optimizer, every=every, to=[own.append]) for every, own in zip(logs, found, strict=True)]

    def make_checkpoint(**how):
        changes = {"minibatch_size"} if minibatch else ()
        return vbs.Checkpoint(directory, model=model, optimizer=optimizer, every_steps=1, allow_changes=changes, **how)

    if not attached:
        (log,) = make_logs()
        checkpoint = make_checkpoint(schedulers=[log])
    elif first == "checkpoint":
        checkpoint = make_checkpoint()
        optimizer.attach(*make_logs(), checkpoint)
    else:
        optimizer.attach(*make_logs())
        checkpoint = make_checkpoint()
        optimizer.attach(checkpoint)
    for _ in checkpoint.epochs():
        for indices in loader:
            losses = (model(X[indices].to(device)) - 1).square().mean(1)
            weight = float(TOKENS[indices].sum()) if weighted else None
            loss = losses.mean() if weight is None else (losses * TOKENS[indices].to(device)).sum()
            loss.backward()
            is_complete = optimizer.step(weight=weight, loss=loss if attached else None)
            if not attached:
                log.step(loss)
                checkpoint.step()
            if is_complete and optimizer.steps_done == until:
                return found
    return found


def losses_by_hand(*, weighted=False):
    """The mean loss of the samples, or of the tokens, of steps 1 to 4 and 5 to 8, in a plain loop."""
    model = network()
    sampler = vbs.DataLoader(torch.arange(48), trace=SIZES, minibatch_size=MINIBATCH).batch_sampler
    indices, found = [], []
    for epoch in range(sampler.schedule.num_epochs):
        sampler.set_epoch(epoch)
        indices += [index for minibatch in sampler for index in minibatch]
    sums = torch.zeros(2)
    for number, size in enumerate(SIZES):
        own, indices = torch.tensor(indices[:size]), indices[size:]
        losses = (model(X[own]) - 1).square().mean(1)
        weights = TOKENS[own].float() if weighted else torch.ones(size)
        loss = (losses * weights).sum() / weights.sum()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        sums += torch.stack([(losses * weights).sum(), weights.sum()]).detach()
        with torch.no_grad():
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p -= 0.1 * size / 16 * gradient
        if (number + 1) % EVERY == 0:
            found.append(float(sums[0] / sums[1]))
            sums.zero_()
    return found


@pytest.fixture
def on(on_cores):
    """Runs on a number of cores; returns the records of core 0."""
    return lambda cores, *args: run_of(*args) if cores == 1 else on_cores(cores, run_of, *args)[0]


def run_of(directory, how):
    return run(directory, **how)


def on_two_xla_cores(directory):
    run(directory, until=STOPPED, backend="xla")
    return run(directory, backend="xla")[0] + run(directory / "whole", backend="xla")[0]


@pytest.mark.xla
def test_sums_of_xla_cores_continue_and_saving_them_adds_no_graph_after_the_first_time(tmp_path, on_xla):
    (record, *of_whole), others = on_xla(2, on_two_xla_cores, tmp_path)
    assert others == []
    earlier, later = losses_by_hand()
    assert [one["loss"] for one in (record, *of_whole)] == pytest.approx([later, earlier, later], rel=1e-5)
    assert len({one["graphs"] for one in (record, *of_whole)}) == 1


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 1), (1, 3), (3, 2)])
def test_first_record_after_a_resume_is_the_mean_of_all_steps_since_the_one_before(
    tmp_path, on, before, after, weighted
):
    how = {"weighted": weighted}
    ((first,),) = on(before, tmp_path, {**how, "until": STOPPED})
    ((record,),) = on(after, tmp_path, how)
    assert [first["step"], record["step"]] == [4, 8]
    assert [first["loss"], record["loss"]] == pytest.approx(losses_by_hand(**how), rel=1e-5)
    if before == after == 1:
        ((_, right),) = run(None, **how)
        assert {**record, "samples_per_second": 0, "loss": 0} == {**right, "samples_per_second": 0, "loss": 0}


def test_idle_share_counts_the_cores_of_each_session(tmp_path, on):
    on(3, tmp_path, {"until": STOPPED})
    ((record,),) = on(2, tmp_path, {})
    counts = [size // MINIBATCH for size in SIZES[4:]]
    cores = [3, 3, 2, 2]  # of steps 5 to 8
    idle = sum(max(0, own - number) for own, number in zip(cores, counts, strict=True))
    assert record["idle_share"] == pytest.approx(idle / sum(cores))
    assert idle


@pytest.mark.parametrize("cores", [1, 2])
def test_with_minibatches_that_are_assigned_as_cores_are_free(tmp_path, on, cores):
    how = {"options": {"assign": "as free"}}
    on(cores, tmp_path, {**how, "until": STOPPED})
    ((record,),) = on(cores, tmp_path, how)
    assert record["loss"] == pytest.approx(losses_by_hand()[1], rel=1e-5)
    assert 0 <= record["idle_share"] < 1


@pytest.mark.parametrize("first", ["log", "checkpoint"])
def test_each_of_several_logs_continues_from_its_own_sums(tmp_path, first):
    run(tmp_path, until=STOPPED, first=first, logs=(4, 3, 8))
    of_all, of_half = run(tmp_path, first=first, logs=(8, 4))
    earlier, later = losses_by_hand()
    assert [record["loss"] for record in of_half] == pytest.approx([later], rel=1e-5)
    samples = [sum(SIZES[:4]), sum(SIZES[4:])]
    mean = (earlier * samples[0] + later * samples[1]) / sum(samples)
    assert [record["loss"] for record in of_all] == pytest.approx([mean], rel=1e-5)


def test_a_log_that_another_session_did_not_have_starts_with_its_first_step(tmp_path):
    run(tmp_path, until=STOPPED, logs=(4,))
    ((record,),) = run(tmp_path, logs=(8,))
    losses = losses_by_hand()
    assert record["loss"] != pytest.approx(sum(losses) / 2, rel=1e-3)


def test_a_log_that_is_not_attached_is_saved_as_one_of_the_schedulers(tmp_path):
    run(tmp_path, until=STOPPED, attached=False)
    ((record,),) = run(tmp_path, attached=False)
    assert record["loss"] == pytest.approx(losses_by_hand()[1], rel=1e-5)


def test_losses_are_of_samples_if_the_minibatch_size_changes(tmp_path):
    run(tmp_path, until=STOPPED)
    ((record,),) = run(tmp_path, minibatch=2)
    assert record["loss"] == pytest.approx(losses_by_hand()[1], rel=1e-5)


def test_saving_changes_no_record(tmp_path):
    for saved, right in zip(*(run(directory)[0] for directory in (tmp_path, None)), strict=True):
        assert {**saved, "samples_per_second": 0} == {**right, "samples_per_second": 0}


def test_time_before_the_stop_counts(tmp_path):
    run(tmp_path, until=STOPPED)
    path = state_file.checkpoints(tmp_path)[-1]
    state = state_file.load(path)
    (log,) = state["parts"]
    assert (log["every"], log["state"]["samples"], log["state"]["core_steps"]) == (4, SIZES[4] + SIZES[5], 2)
    assert 0 < log["state"]["seconds"] < 60
    log["state"]["seconds"] += 1000
    state_file.save(path, state)
    ((record,),) = run(tmp_path)
    assert 0 < record["samples_per_second"] < sum(SIZES[4:]) / 1000
