"""A run follows a trace file that is edited while it trains."""

import functools
import logging
import os
import re

import pytest
import torch
from small_runs import classified, network, sgd, weights_of
from torch import nn

import variable_batch_size as vbs
from variable_batch_size.traces import watched as watched_file

MINIBATCH, NUM_SAMPLES = 8, 400


def write(path, sizes, end="\n"):
    path.write_text("\n".join(["step,batchsize", *(f"{step},{size}" for step, size in enumerate(sizes))]) + end)


def train(trace, edits=None, *, directory=None, stop_after=None, num_epochs=None, **options):
    """Train with the edits, each after a number of steps; returns the executed rows and the weights."""
    model = network(6, 8, 3)
    loader = vbs.DataLoader(classified(NUM_SAMPLES, 6, num_classes=3), trace=trace, minibatch_size=MINIBATCH, **options)
    optimizer = vbs.AdaScaleOptimizer(sgd(model, momentum=0.9), loader, ref_batchsize=2 * MINIBATCH, model=model)
    checkpoint = vbs.Checkpoint(directory, model=model, optimizer=optimizer)
    is_first, done = loader.sampler.rank == 0, []
    for _ in checkpoint.epochs(num_epochs):
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            if optimizer.step():
                done.append(optimizer.batch_size)
                if is_first and edits and optimizer.steps_done in edits:
                    edits[optimizer.steps_done]()
                if optimizer.steps_done == stop_after:
                    checkpoint.save()
                    return done, None
    return done, weights_of(model)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "trace.csv"
    write(path, [16] * 60)
    return path


def watched(path, every=2, lead=4):
    return vbs.traces.WatchedTrace(path, every=every, lead=lead)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_rows_that_are_not_fixed_are_replaced_and_the_executed_ones_replay_bit_for_bit(path, tmp_path, num_workers):
    edits = {
        5: lambda: write(path, [16] * 30 + [32] * 40),  # longer, while epochs are under way
        33: lambda: write(path, [8] * 10 + [24] * 70),
        60: lambda: write(path, [24] * 68),  # shorter
    }
    done, weights = train(watched(path), edits, directory=tmp_path / "run", num_workers=num_workers)
    assert done[:30] == [16] * 30
    assert done[30:36] == [32] * 6
    assert 32 in done[36:40]
    assert done[45:] == [24] * 23
    assert len(done) == 68
    assert list(vbs.Trace.read(tmp_path / "run" / "executed.csv")) == done
    rows, replayed = train(tmp_path / "run" / "executed.csv")
    assert rows == done
    assert torch.equal(weights, replayed)


def test_a_file_that_does_not_change_is_an_ordinary_trace(path):
    write(path, [8, 24, 40, 16] * 20)
    done, weights = train(watched(path))
    assert (done, True) == ((plain := train(path))[0], torch.equal(weights, plain[1]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([16] * 50 + [20], r"trace.csv:52: batchsize must be a multiple of 8 \(the minibatch size\), got 20"),
        ([16] * 50 + [800], r"trace.csv:52: batchsize must be at most 400 \(all full minibatches in 400 samples\)"),
        ([16] * 50 + ["x"], "trace.csv:52: batchsize must be an integer, got x"),
        ([16] * 10, "trace.csv has 10 rows, but 1[3-6] steps are fixed already"),
        ([], "trace.csv:2: expected a row below the header, got nothing"),
    ],
)
def test_an_invalid_edit_is_named_once_and_changes_nothing(path, caplog, content, message):
    done, _ = train(watched(path), {8: lambda: write(path, content)})
    assert done == [16] * 60
    warned = [record for record in caplog.records if record.levelno == logging.WARNING and "stay" in record.message]
    assert len(warned) == 1
    assert re.search(message, warned[0].message)


def test_a_half_written_file_changes_nothing_until_it_is_complete(path, caplog):
    edits = {8: lambda: write(path, [16] * 30 + [3], end=""), 12: lambda: write(path, [16] * 30 + [32] * 10)}
    done, _ = train(watched(path), edits)
    assert done == [16] * 30 + [32] * 10
    assert "trace.csv:32: the last line must end in a line break" in caplog.text


def test_a_file_that_is_removed_for_a_while_changes_nothing(path, caplog):
    done, _ = train(watched(path), {8: path.unlink, 20: lambda: write(path, [16] * 40 + [24] * 20)})
    assert done == [16] * 40 + [24] * 20
    assert caplog.text.count("trace.csv is missing") == 1


def test_changed_rows_that_are_done_or_fixed_stay_and_are_named(path, caplog):
    done, _ = train(watched(path), {20: lambda: write(path, [16] * 3 + [8] * 2 + [16] * 35 + [24] * 20)})
    assert done == [16] * 40 + [24] * 20
    assert "trace.csv:5: batchsize was changed to 8, but the steps before" in caplog.text
    assert "2 such rows stay" in caplog.text


def test_rows_added_after_the_end_was_fixed_are_refused(path, caplog):
    done, _ = train(watched(path), {56: lambda: write(path, [16] * 90)})
    assert done == [16] * 60
    assert "trace.csv has 90 rows, but its end after 60 is fixed already" in caplog.text


def test_an_edit_of_the_same_length_at_the_same_moment_is_noticed(path, monkeypatch):
    monkeypatch.setattr(watched_file, "_SECONDS", 1000)  # a moment, however slow this machine is

    def edit():  # the same size, time and inode
        stamp = path.stat()
        path.write_text(path.read_text().replace("50,16", "50,24"))
        os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))

    done, _ = train(watched(path, every=1), {20: edit})
    assert done == [16] * 50 + [24] + [16] * 9


def test_after_the_last_row_its_size_is_held_until_the_file_says_otherwise(path):
    write(path, [16] * 3)
    done, _ = train(watched(path), {30: lambda: write(path, [16, 40])}, on_end="hold", num_epochs=2)
    assert done[:35] == [16] * 35
    assert done[-3:] == [40] * 3


def test_a_run_that_resumes_keeps_the_fixed_rows_and_follows_the_edited_file_after_them(path, tmp_path):
    edits = {12: lambda: write(path, [16] * 10 + [32] * 40)}
    whole = train(watched(path), edits)
    write(path, [16] * 60)
    first, _ = train(watched(path), edits, directory=tmp_path / "run", stop_after=13)
    second, weights = train(watched(path), directory=tmp_path / "run")
    assert first + second == whole[0]
    assert torch.equal(weights, whole[1])
    assert list(vbs.Trace.read(tmp_path / "run" / "executed.csv")) == whole[0]


def test_a_complete_run_resumes_where_its_file_has_more_rows(path, tmp_path):
    train(watched(path), directory=tmp_path / "run")
    write(path, [16] * 60 + [24] * 10)
    done, weights = train(watched(path), directory=tmp_path / "run")
    assert done == [24] * 10
    assert torch.equal(weights, train([16] * 60 + [24] * 10)[1])


def edit_on_cores(directory):
    path = directory / "trace.csv"
    edits = {5: lambda: write(path, [16] * 20 + [40] * 30), 30: lambda: write(path, [16] * 20 + [40] * 17 + [8] * 30)}
    return train(watched(path), edits)


def test_all_cores_replace_the_same_rows_at_the_same_step(on_cores, path):
    (rows, weights), (others, other_weights) = on_cores(2, edit_on_cores, path.parent)
    assert rows == others == [16] * 20 + [40] * 17 + [8] * 30
    assert torch.equal(weights, other_weights)
    alone = train(rows)[1]
    assert max((a - b).abs().max().item() for a, b in zip(alone, weights, strict=True)) < 1e-9


def test_too_short_a_lead_raises_if_loader_workers_prefetch(path):
    with pytest.raises(RuntimeError, match="step 3 was read before its batch size was fixed: `lead` of the watched"):
        train(watched(path, lead=1), num_workers=2)


def test_two_samplers_of_one_watched_trace_do_not_disturb_each_other(path):
    trace = watched(path)
    run = functools.partial(train, trace, {5: lambda: write(path, [16] * 30)})
    assert run()[0] == [16] * 30
    assert run()[0] == [16] * 30


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: watched(path, every=0), "`every` must be a positive integer, got 0"),
        (lambda path: watched("gs://bucket/trace.csv"), "`path` of a watched trace must be a file on this machine"),
        (lambda path: train(watched(path), on_end="cycle"), "`on_end` must be 'stop' or 'hold' with a watched trace"),
        (
            lambda path: vbs.Stream([], trace=watched(path), minibatch_size=8, is_sharded=True),
            "`is_sharded` must be False with a watched trace",
        ),
    ],
)
def test_what_cannot_be_watched_is_refused(path, make, message):
    with pytest.raises(ValueError, match=message):
        make(path)
