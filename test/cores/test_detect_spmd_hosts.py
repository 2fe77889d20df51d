"""The hosts of XLA's SPMD mode: together one core, coordinated, with one writer."""

import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import variable_batch_size as vbs
from variable_batch_size.cores import xla
from variable_batch_size.cores.communicator import SingleProcess
from variable_batch_size.cores.detect import SpmdHosts, everyone_for, running_cores

TRACE = [8, 24, 16] * 14
FACTS_THAT_DIFFER = r"ranks must have the same settings, but differ in ref_batchsize.*8 on rank 0, 9 on rank 1"


def be_a_host():
    """Make this process look like one of several hosts in SPMD mode; the model stays on the CPU."""
    xla.is_spmd = lambda: True
    xla.num_hosts = dist.get_world_size


def what_hosts_do_together():
    hosts = SpmdHosts(SingleProcess(), 2)
    numbers, sent = torch.tensor([1.0, hosts.rank]), torch.tensor([5 + hosts.rank])
    total = hosts.total(numbers)
    assert numbers.tolist() == [1.0, hosts.rank]
    hosts.sum([numbers])
    hosts.broadcast([sent])
    return hosts.rank, hosts.num_replicas, total.tolist(), numbers.tolist(), sent.tolist()


def said_by(wanted, *args):
    try:
        wanted(*args)
    except ValueError as error:
        return str(error)
    return None


def train(directory, stop_at=None, ref_batchsizes=(8, 8)):
    """A run on one of two hosts; only the second receives a stop request after some steps."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    x, y = torch.randn(240, 4), torch.randint(0, 3, (240,))
    sampler = vbs.CustomSampler(dataset_size=240, trace=TRACE, minibatch_size=8)
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = vbs.AdaScaleOptimizer(inner, sampler, ref_batchsize=ref_batchsizes[rank], model=model)
    checkpoint = vbs.Checkpoint(directory, model=model, optimizer=optimizer)
    code = 0
    try:
        for _ in checkpoint.epochs(sampler.schedule.num_epochs):
            for indices in sampler:
                nn.functional.cross_entropy(model(x[indices]), y[indices]).backward()
                optimizer.step()
                if optimizer.steps_done == stop_at and rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0 if stop_at is None else 0.1)
                checkpoint.step()
    except SystemExit as exit:
        code = exit.code
    cores = everyone_for(model.parameters())
    places = running_cores(), (cores.rank, cores.num_replicas)
    return {"places": places, "state": model.state_dict(), "steps": optimizer.steps_done, "code": code}


def on_two_hosts(directory):
    together = what_hosts_do_together()
    be_a_host()
    return {
        "together": together,
        "of three": said_by(SpmdHosts, SingleProcess(), 3),
        "trained": train(directory / "whole"),
        "stopped": train(directory / "stopped", 5),
        "different": said_by(train, directory / "different", None, (8, 9)),
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="module")
def found(on_new_cores, directory):
    return on_new_cores(2, on_two_hosts, directory)


def test_numbers_are_exchanged_between_hosts(found):
    together = [result["together"] for result in found]
    assert together == [(rank, 2, [2.0, 1.0], [2.0, 1.0], [5]) for rank in range(2)]


def test_hosts_that_cannot_reach_each_other_are_refused(found):
    with pytest.raises(
        RuntimeError, match=r"on several hosts needs a process group: use vbs\.launch\(…, spmd=True\), or"
    ):
        SpmdHosts(SingleProcess(), 2)
    sentence = "torch.distributed must have a process on each of the 3 hosts of XLA's SPMD mode, got 2"
    assert [result["of three"] for result in found] == [sentence] * 2


def test_each_host_has_all_samples(found, tmp_path):
    expected = train(tmp_path)["state"]
    for rank, result in enumerate(found):
        assert result["trained"]["places"] == ((0, 1), (rank, 2))
        assert all(torch.equal(result["trained"]["state"][name], expected[name]) for name in expected)


def test_all_hosts_stop_at_the_same_step_when_one_is_stopped(found):
    stopped = [result["stopped"] for result in found]
    assert [result["code"] for result in stopped] == [vbs.EXIT_STOPPED] * 2
    assert stopped[0]["steps"] == stopped[1]["steps"] < len(TRACE)


def test_the_first_host_writes_for_all(found, directory):
    steps = found[0]["stopped"]["steps"]
    path = directory / "stopped" / f"step-{steps:09d}.pt"
    assert sorted(path.parent.iterdir()) == [path.parent / "executed.csv", path.parent / "run.json", path]
    assert len(torch.load(path, weights_only=True)["random"]["torch"]) == 2  # a row for each host


def test_hosts_with_different_settings_raise(found):
    for result in found:
        assert re.match(FACTS_THAT_DIFFER, result["different"])
