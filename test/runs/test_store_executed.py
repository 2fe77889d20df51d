"""The executed trace: appended to incrementally, and complete again after any damage."""

import resource

import pytest

import variable_batch_size as vbs
from variable_batch_size.runs.store import ExecutedTrace

SIZES = [8, 16, 8, 4, 12, 8, 24, 8, 4]  # the steps of three epochs of 40 samples: 4, 2 and 3


def executed(path, sizes=SIZES):
    schedule = vbs.Schedule(vbs.Trace.of(sizes), dataset_size=40, minibatch_size=4)
    return ExecutedTrace(path, schedule, origin="seed 0")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "executed.csv"


def whole(steps):
    rows = "".join(f"{step},{size}\n" for step, size in enumerate(SIZES[:steps]))
    return f"# executed from trace: seed 0\nstep,batchsize\n{rows}"


def test_executed_trace_grows_with_the_run(path):
    file = executed(path)
    file.append([0])
    assert not path.exists()
    file.append([3])
    inode = path.stat().st_ino
    for steps_of_epochs in ([4], [4, 0], [4, 0], [4, 2, 1], [4, 2, 3, 0]):
        file.append(steps_of_epochs)
        assert path.read_text() == whole(sum(steps_of_epochs))
    assert path.stat().st_ino == inode
    assert list(vbs.Trace.read(path)) == SIZES


def test_epochs_that_ended_early_are_marked_at_the_start_of_the_next(path):
    file = executed(path)
    for steps_of_epochs in ([1], [1, 0], [1, 0, 2]):
        file.append(steps_of_epochs)
    assert path.read_text().splitlines()[2:] == [
        "0,8",
        "# epoch 0 was left after 1 of its 4 steps: in a replay, epochs begin elsewhere",
        "# epoch 1 was left after 0 of its 2 steps: in a replay, epochs begin elsewhere",
        "1,24",
        "2,8",
    ]
    assert list(vbs.Trace.read(path)) == [8, 24, 8]


@pytest.mark.parametrize("length", range(len(whole(7)) + 1))
def test_executed_trace_truncated_anywhere_resumes_from_the_checkpoint(path, length):
    """A crash may have left any prefix of the file, with more or fewer rows than the steps of the checkpoint."""
    path.write_text(whole(7)[:length])
    file = executed(path)
    file.truncate([4, 1])
    assert whole(5).startswith(path.read_text())
    file.append([4, 2])
    assert path.read_text() == whole(6)


def test_comment_left_by_a_crash_is_not_repeated(path):
    first = executed(path)
    first.append([1])
    first.append([1, 1])
    again = executed(path)
    again.truncate([1])
    again.append([1, 1])
    assert path.read_text().count("#") == 2
    assert list(vbs.Trace.read(path)) == [8, 12]


@pytest.mark.parametrize("harm", [lambda path: path.unlink(), lambda path: path.write_text("step,batchsize\n0,8\n")])
def test_removed_or_modified_file_is_rewritten(path, harm):
    file = executed(path)
    file.append([3])
    harm(path)
    file.append([4, 2])
    assert path.read_text() == whole(6)


def test_a_file_of_another_run_is_replaced(path):
    path.write_text("whatever\n")
    executed(path).append([2])
    assert path.read_text() == whole(2)


def test_full_disk_is_reported_and_the_resumed_run_completes_the_file(path):
    file = executed(path)
    file.append([3])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole(3)) + 6, limits[1]))
    try:
        with pytest.raises(OSError, match=r"executed\.csv could not be written: .*File too large"):
            file.append([4, 2])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    again = executed(path)
    again.truncate([4, 2])
    again.append([4, 2, 1])
    assert path.read_text() == whole(7)


def test_cost_of_a_save_does_not_depend_on_the_length_of_the_file(path, monkeypatch):
    schedule, asked = vbs.Schedule(vbs.Trace.of(4), dataset_size=40, minibatch_size=4), []
    batch_size = schedule.batch_size
    monkeypatch.setattr(schedule, "batch_size", lambda step: asked.append(step) or batch_size(step))
    file = ExecutedTrace(path, schedule, origin="seed 0")
    file.append([10] * 1000)
    with open(path, "r+") as there:
        there.write("! e")  # which a rewritten file would not have
    asked.clear()
    file.append([10] * 1001)
    assert asked == list(range(10_000, 10_010))
    assert path.read_text().startswith("! executed from")
    assert path.read_text().endswith("\n9999,4\n" + "".join(f"{step},4\n" for step in range(10_000, 10_010)))
