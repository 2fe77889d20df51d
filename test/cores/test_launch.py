"""launch: ordered results, prompt and readable failures, and no leftover processes."""

import multiprocessing
import os
import re
import signal
import time
from importlib import import_module
from types import SimpleNamespace

import forked
import pytest
import torch
import torch.distributed as dist

import variable_batch_size as vbs
from variable_batch_size.cores import live

launching = import_module("variable_batch_size.cores.launch")

XLA = pytest.param("xla", marks=pytest.mark.xla)


@pytest.fixture
def forks():
    """For tests that do not depend on the start method of the gloo processes."""
    with forked.launches():
        yield


def rank_and_size():
    from variable_batch_size.cores.detect import running_cores

    return running_cores()


def append_rank(numbers):
    rank, size = rank_and_size()
    numbers.append(rank)
    # long enough for every thread to append to a shared list, if it were shared; and the last thread ends first
    time.sleep(0.5 * (size - rank))
    return numbers, os.environ.get("CPU_NUM_DEVICES"), (rank, size), multiprocessing.get_start_method()


def fail_on_the_last_core_while_the_others_wait():
    rank, size = rank_and_size()
    if rank == size - 1:
        raise ValueError("`minibatch_size` must be a positive integer, got 0")
    time.sleep(600)


def wait_in_a_collective_for_a_core_that_fails():
    if dist.get_rank() == 1:
        vbs.CustomSampler(dataset_size=100, trace=[32, 33], minibatch_size=32)
    dist.all_reduce(torch.ones(1))


def die():
    if rank_and_size()[0] == 0:
        os._exit(3)
    time.sleep(600)


def return_something_that_cannot_travel():
    return lambda: None


@pytest.fixture
def without_xla(monkeypatch):
    """As on a machine without torch_xla and without a GPU."""
    monkeypatch.setattr("variable_batch_size.cores.xla.is_installed", lambda: False)
    monkeypatch.setattr("variable_batch_size.cores.devices.default_backend", lambda: "gloo")


def check_launch(backend):
    """Launch on new processes; returns the rank, the number of cores and the start method of each."""
    before = dict(os.environ)
    numbers, variables, *others = zip(*vbs.launch(append_rank, ([7],), cores=2, backend=backend), strict=True)
    assert numbers == ([7, 0], [7, 1])
    assert variables == (("2" if backend == "xla" else None),) * 2
    assert dict(os.environ) == before
    return list(zip(*others, strict=True))


@pytest.mark.xla
def test_each_xla_core_gets_a_copy_of_the_arguments_results_are_in_order_and_the_environment_is_restored():
    check_launch("xla")


def launch_and_return_children(function, backend):
    """The error of a launch on two cores, and the processes that it left."""
    try:
        vbs.launch(function, cores=2, backend=backend)
    except RuntimeError as error:
        return str(error), len(multiprocessing.active_children())
    return None


@pytest.fixture
def failure_of(xla_launcher):
    """The same, of gloo processes that are forked, or of XLA cores without importing torch_xla each time."""

    def fail(function, backend):
        if backend == "xla":
            return xla_launcher.call(launch_and_return_children, function, backend)
        with forked.launches():
            return launch_and_return_children(function, backend)

    return fail


@pytest.mark.parametrize("backend", ["gloo", XLA])
def test_an_exception_on_one_core_ends_the_launch_with_its_traceback(failure_of, backend):
    message, num_left = failure_of(fail_on_the_last_core_while_the_others_wait, backend)
    assert re.search(r"(?s)core 1 failed:\nTraceback.*test_launch.py.*ValueError: `minibatch_size`", message)
    assert num_left == 0


@pytest.mark.usefixtures("forks")
def test_core_that_waits_in_a_collective_is_terminated():
    with pytest.raises(
        RuntimeError, match=r"(?s)core 1 failed:.*trace\[1\]: batchsize must be a multiple of 32.*, got 33"
    ):
        vbs.launch(wait_in_a_collective_for_a_core_that_fails, cores=2, backend="gloo")


@pytest.mark.parametrize("backend", ["gloo", XLA])
def test_a_process_that_dies_ends_the_launch(failure_of, backend):
    assert failure_of(die, backend) == ("a process of the launch died with exit code 3", 0)


@pytest.mark.usefixtures("forks")
def test_result_that_cannot_be_pickled_raises():
    with pytest.raises(RuntimeError, match=r"(?s)core 0 failed:.*pickle"):
        vbs.launch(return_something_that_cannot_travel, cores=1, backend="gloo")


@pytest.mark.parametrize("cores", [0, -1, 1.5, True])
def test_the_number_of_cores_must_be_positive(cores):
    with pytest.raises(ValueError, match="`cores` must be a positive integer, got"):
        vbs.launch(rank_and_size, cores=cores)


@pytest.mark.usefixtures("without_xla")
def test_without_torch_xla_launch_uses_gloo_and_keeps_the_same_promises_and_loader_workers_start_as_usual():
    method = multiprocessing.get_start_method()
    assert method != "spawn"
    assert check_launch(None) == [((0, 2), method), ((1, 2), method)]
    with pytest.raises(ValueError, match=r'backend="xla" needs torch_xla: pip install'):
        vbs.launch(rank_and_size, cores=2, backend="xla")


@pytest.mark.usefixtures("forks")
def test_torch_xla_alone_does_not_make_the_cores_xla(monkeypatch):
    monkeypatch.setattr("variable_batch_size.cores.xla.is_installed", lambda: True)
    monkeypatch.setattr("variable_batch_size.cores.xla.has_tpu", lambda: False)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    assert vbs.launch(backend_of_this_core, cores=1) == ["nccl" if torch.cuda.is_available() else "gloo"]


def backend_of_this_core():
    return dist.get_backend()


def launch_by_pjrt_device():
    os.environ["PJRT_DEVICE"] = "CPU"
    return vbs.launch(rank_and_size, cores=2)


@pytest.mark.xla
def test_pjrt_device_makes_the_cores_xla(xla_launcher):
    assert xla_launcher.call(launch_by_pjrt_device) == [(0, 2), (1, 2)]


def test_more_cores_than_devices_raise_before_a_process_starts(monkeypatch):
    monkeypatch.setattr("variable_batch_size.cores.devices.num_devices", lambda backend: 2)
    rule = '`cores` must be at most 2, the number of devices for nccl, got 3: launch with backend="gloo"'
    with pytest.raises(ValueError, match=rule):
        vbs.launch(rank_and_size, cores=3, backend="nccl")


def devices_of_this_core():
    import torch_xla.runtime

    return rank_and_size(), torch_xla.runtime.global_runtime_device_count()


@pytest.mark.xla
def test_in_spmd_mode_all_devices_are_one_core(on_xla):
    assert on_xla(3, devices_of_this_core, spmd=True) == [((0, 1), 3)]


def test_spmd_is_a_mode_of_xla_alone(monkeypatch):
    with pytest.raises(ValueError, match='`spmd` must be False with backend="gloo": only backend="xla" has this mode'):
        vbs.launch(rank_and_size, cores=2, backend="gloo", spmd=True)
    monkeypatch.setattr("variable_batch_size.cores.xla.is_installed", lambda: False)
    with pytest.raises(ValueError, match='backend="xla" needs torch_xla'):
        vbs.launch(rank_and_size, cores=2, spmd=True)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(ValueError, match="`spmd` must be False with torchrun"):
        vbs.launch(rank_and_size, spmd=True)


UNDER_TORCHRUN = """
import os, sys
import torch.distributed as dist
import variable_batch_size as vbs
from variable_batch_size.cores.detect import running_cores

meet, waited = dist.init_process_group, []


def noted(*arguments):
    waited.append(os.environ.get("TORCH_DIST_INIT_BARRIER"))
    meet(*arguments)


if __name__ == "__main__":
    dist.init_process_group = noted
    with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
        file.write(f"{vbs.launch(running_cores)} {waited}")
"""


def test_under_torchrun_launch_runs_the_function_after_a_barrier(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(UNDER_TORCHRUN)
    results = tmp_path / "results"  # one file per process: their output might be interleaved
    results.mkdir()
    arguments = ["--standalone", "--nproc-per-node=2", str(script), str(results)]
    done = forked.run(forked.torchrun_program.main, arguments, folder=tmp_path)  # which starts interpreters
    assert done.returncode == 0, done.stderr
    assert [(results / rank).read_text() for rank in "01"] == ["[(0, 2)] ['1']", "[(1, 2)] ['1']"]


NOT_JOINED = """
import os, sys
import torch
import torch.distributed as dist
import variable_batch_size as vbs

def error_of(**cores):
    loader = vbs.DataLoader(torch.zeros(8, 1), trace=4, minibatch_size=2, **cores)
    if "late" in sys.argv:
        dist.init_process_group("gloo")
    inner = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    try:
        vbs.Optimizer(inner, loader, rule="linear", ref_batchsize=4)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    print(error_of(), file=file)
    if "late" not in sys.argv:
        print(error_of(num_replicas=1, rank=0), file=file)
"""


@pytest.mark.parametrize(
    "arguments, beginnings",
    [
        ([], ["RuntimeError: torchrun has started 2 processes, but torch.distributed is not initialized", "None"]),
        (["late"], ["ValueError: the sampler is for rank 0 of 1, but this is rank {rank} of 2: make the loader after"]),
    ],
    ids=["not joined", "joined after the loader was made"],
)
def test_under_torchrun_processes_that_would_train_alone_raise(arguments, beginnings, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(NOT_JOINED)
    flags = ["--standalone", "--nproc-per-node=2"]
    done = forked.run(forked.torchrun, flags, script, tmp_path, *arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in "01":
        lines = (tmp_path / rank).read_text().splitlines()
        for line, beginning in zip(lines, beginnings, strict=True):
            assert line.startswith(beginning.format(rank=rank))


def test_script_without_a_main_guard_is_named(tmp_path):
    script = tmp_path / "script.py"
    script.write_text('import variable_batch_size as vbs\nvbs.launch(print, cores=1, backend="gloo")\n')
    done = forked.start_script(script, folder=tmp_path, spawns=True).finish()
    said = 'died with exit code 1: see its output, and call launch() under `if __name__ == "__main__":` in a script'
    assert done.returncode == 1 and done.stderr.rstrip().endswith(said)


PARENT = """
import sys, time
import variable_batch_size as vbs

def wait(fifo):
    with open(fifo, "w") as file:
        print("started", file=file, flush=True)
        time.sleep(600)
        print("slept to the end", file=file)

if __name__ == "__main__":
    vbs.launch(wait, (sys.argv[1],), cores=1, backend="gloo")
"""


def test_processes_exit_when_their_parent_is_killed(tmp_path):
    (tmp_path / "parent.py").write_text(PARENT)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    parent = forked.start_script(tmp_path / "parent.py", fifo, folder=tmp_path, spawns=True)
    with open(fifo) as file:
        assert file.readline() == "started\n"
        parent.send_signal(signal.SIGKILL)
        parent.finish()
        assert file.read() == ""  # end of file: no process holds the other end


def train_until_another_core_has_joined(dataset_size):
    """The second core kills itself; the first one trains slowly until another has taken its place.

    More slowly towards the end, which must not come before.
    """
    torch.manual_seed(os.getpid())
    model = torch.nn.Linear(1, 1)
    loader = vbs.DataLoader(torch.ones(dataset_size, 1), trace=[4] * (dataset_size // 4), minibatch_size=2)
    inner = torch.optim.SGD(model.parameters(), lr=0.001)
    optimizer = vbs.Optimizer(inner, loader, rule="linear", ref_batchsize=4, model=model)
    records, sizes = [], []
    with vbs.Log(optimizer, every=1, to=[records.append]) as log:
        for _ in optimizer.epochs():
            for data in loader:
                loss = model(data).sum()
                loss.backward()
                if optimizer.step() and optimizer.steps_done == 3 and live.current().core == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                log.step(loss)
                sizes.append(optimizer.sampler.num_replicas)
                has_joined = sizes[-1] == 2 and live.current().core + max(live.current().members) > 3
                time.sleep(0 if has_joined else 0.02 if optimizer.steps_done < 200 else 1)
    steps = [record["step"] for record in records]
    return model.weight.item(), {*sizes}, steps, optimizer.steps_done


def test_elastic_run_replaces_a_core_that_dies_and_ends_as_if_it_had_not(forks):
    (weight, sizes, steps, num_steps), (other, _, none, _) = vbs.launch(
        train_until_another_core_has_joined, (1200,), elastic=(1, 2)
    )
    assert weight == other
    assert num_steps == 300
    assert sizes == {1, 2}
    assert steps == list(range(1, 301))  # written by the first core
    assert none == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"elastic": 2}, r"`elastic` must be the smallest and largest number of cores, as \(1, 4\), got 2"),
        ({"elastic": (3, 2)}, r"the smaller one first, got \(3, 2\)"),
        ({"elastic": (0, 2)}, "`elastic` must be a positive integer, got 0"),
        ({"elastic": (1, 2), "cores": 3}, "`cores` must be at most 2, the largest number of `elastic`, got 3"),
        ({"elastic": (1, 2), "backend": "nccl"}, '`backend` must be None or "gloo" with `elastic`'),
        ({"elastic": (1, 2), "timeout": 0}, "`timeout` must be a positive number, got 0"),
        ({"elastic": (1, 2), "store": "here"}, "`store` must be an address such as"),
        ({"store": "127.0.0.1:1"}, "`store` must be None without `elastic`"),
    ],
)
def test_arguments_of_elastic_runs_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        vbs.launch(rank_and_size, **options)


def train_and_kill(pids):
    """All cores train until each has written its process id; one of them then kills all."""
    model = torch.nn.Linear(1, 1)
    loader = vbs.DataLoader(torch.ones(40_000, 1), trace=[4] * 10_000, minibatch_size=2)
    inner = torch.optim.SGD(model.parameters(), lr=0.001)
    optimizer = vbs.Optimizer(inner, loader, rule="linear", ref_batchsize=4, model=model)
    for _ in optimizer.epochs():
        (pids / str(os.getpid())).touch()
        for data in loader:
            model(data).sum().backward()
            time.sleep(0.01)
            if optimizer.step() and len(found := list(pids.iterdir())) == 2:
                for path in sorted(found, key=lambda path: int(path.name) == os.getpid()):
                    os.kill(int(path.name), signal.SIGKILL)


def test_elastic_run_whose_cores_have_all_died_raises(forks, tmp_path):
    with pytest.raises(RuntimeError, match="all cores of the run have died: resume from a checkpoint"):
        vbs.launch(train_and_kill, (tmp_path,), elastic=(1, 2))


def wait_as_a_core(pids):
    loader = vbs.DataLoader(torch.ones(4, 1), trace=[4], minibatch_size=2)
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.001)
    vbs.Optimizer(inner, loader, rule="linear", ref_batchsize=4).epochs()
    (pids / str(os.getpid())).touch()
    time.sleep(600)


def launch_two_that_wait(pids):
    vbs.launch(wait_as_a_core, (pids,), elastic=(1, 2))


@pytest.mark.parametrize(
    ("number", "code", "error"), [(signal.SIGTERM, -signal.SIGTERM, ""), (signal.SIGINT, 1, "KeyboardInterrupt")]
)
def test_elastic_run_that_is_told_to_stop_ends_with_its_cores(tmp_path, number, code, error):
    pids = tmp_path / "pids"
    pids.mkdir()
    program = forked.Program(launch_two_that_wait, pids, folder=tmp_path)
    while len(list(pids.iterdir())) < 2:
        assert program.poll() is None, program.finish()
        time.sleep(0.01)
    program.send_signal(number)
    done = program.finish()
    assert done.returncode == code, done
    assert error in done.stderr
    found = [int(path.name) for path in pids.iterdir()]
    assert len(found) == 2  # none was replaced
    for pid in found:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_processes_that_end_before_they_join_an_elastic_run_are_replaced_until_three_have_in_a_row():
    elastic = launching._Elastic.__new__(launching._Elastic)
    elastic._store, elastic._cores, elastic._num_failed, elastic._is_stopping = dist.HashStore(), [*range(6)], 0, False
    elastic._store.set("0/decision", "")
    elastic._store.set("joined/2", "")
    codes = [-9, 1, -9, -9, 1, -9]  # the third one has joined
    replaced = [elastic._is_to_be_replaced(n, SimpleNamespace(exitcode=code), {}) for n, code in enumerate(codes)]
    assert replaced == [True, True, True, True, True, False]
    assert not elastic._is_to_be_replaced(2, SimpleNamespace(exitcode=-9), {0: "the run has ended"})
