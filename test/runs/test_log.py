"""Log and its sinks: correct numbers on any number of cores, in readable formats."""

import itertools
import json
import math
import struct
from itertools import pairwise

import numpy as np
import pytest
import stoppable_run
import torch
from stoppable_run import LOG_STEPS, MINIBATCH, NUM_STEPS, SIZES, Settings

import variable_batch_size as vbs

BACKENDS = ["gloo", pytest.param("xla", marks=pytest.mark.xla)]


def losses_by_hand(sizes, losses, every):
    """The mean loss over every N steps, from the loss of each minibatch."""
    counts = [size // MINIBATCH for size in sizes]
    ends = [sum(counts[: step + 1]) for step in range(len(counts))]
    marks = [0, *(ends[step] for step in range(every - 1, len(counts), every))]
    return [sum(losses[a:b]) / (b - a) for a, b in pairwise(marks)]


@pytest.fixture
def logged(tmp_path, monkeypatch):
    """The records of a run in one process, and the loss of each of its minibatches."""
    losses = []
    original = vbs.Log.step

    def step(log, loss):
        losses.append(loss.item())
        original(log, loss)

    monkeypatch.setattr(vbs.Log, "step", step)
    records = []
    stoppable_run.run(tmp_path, Settings(rule="adascale"), log_to=records.append)
    return records, losses


def test_record_every_n_steps_contains_all_keys(logged):
    records, losses = logged
    assert [record["step"] for record in records] == [4, 8, 12, 16, 20, 24]
    expected = losses_by_hand(SIZES[:NUM_STEPS], losses, LOG_STEPS)
    assert [record["loss"] for record in records] == pytest.approx(expected, rel=1e-5)
    assert [record["epoch"] for record in records] == [0, 0, 1, 1, 2, 2]
    assert records[1]["samples"] == sum(SIZES[:8])
    assert records[1]["batch_size"] == SIZES[7]
    for record in records:
        assert record["samples_per_second"] > 0
        assert record["idle_share"] == 0
        assert record["factor"] == pytest.approx(record["gain"])
        assert record["noise_scale"] > 0
        assert record["efficiency"] == pytest.approx(record["gain"] / record["scale"])
        assert -1 < record["cosine"] < 1
        assert record["lr"] == pytest.approx(
            0.02 * 0.98 ** (record["step"] - 1) * 0.9 ** record["epoch"] * record["gain"]
        )
    assert records[-1]["gain_low"] < records[-1]["gain"] < records[-1]["gain_high"]
    assert records[-1]["noise_scale_low"] < records[-1]["noise_scale"] < records[-1]["noise_scale_high"]
    assert records[-1]["progress"] > records[0]["progress"] > 0
    assert "graphs" not in records[0]


def test_the_gradient_norm_is_that_of_the_mean_gradient_before_clipping():
    for kind in (vbs.LinearRuleOptimizer, vbs.LinearRuleMomentumOptimizer):
        model = torch.nn.Linear(2, 1, bias=False)
        sampler = vbs.CustomSampler(dataset_size=4, trace=[4], minibatch_size=2)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = kind(inner, sampler, ref_batchsize=4, clip_grad_norm=0.5)
        records = []
        log = vbs.Log(optimizer, every=1, to=[records.append])
        for x in ([[3.0, 4.0], [3.0, 4.0]], [[3.0, 0.0], [3.0, 0.0]]):
            loss = model(torch.tensor(x)).mean()
            loss.backward()
            optimizer.step()
            log.step(loss)
        assert records[0]["gradient_norm"] == pytest.approx(math.hypot(3.0, 2.0))


def make(trace=(8, 16, 8, 4, 12, 8)):
    """A run on the numbers 0, 1, 2 … with their mean as the loss of a minibatch."""
    model = torch.nn.Linear(1, 1, bias=False)
    sampler = vbs.CustomSampler(dataset_size=32, trace=list(trace), minibatch_size=4, shuffle=False)
    optimizer = vbs.ConstantOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), sampler)
    torch.nn.init.ones_(model.weight)
    return model, sampler, optimizer


def train(model, sampler, optimizer, after_minibatch, minibatches=None):
    for indices in itertools.islice(sampler, minibatches):
        loss = model(torch.tensor(indices, dtype=torch.float32).view(-1, 1)).mean()
        loss.backward()
        optimizer.step()
        after_minibatch(loss)


def test_two_logs_are_independent():
    model, sampler, optimizer = make()
    records = {2: [], 3: []}
    logs = [vbs.Log(optimizer, every=every, to=[of.append]) for every, of in records.items()]
    for epoch in range(2):
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        train(model, sampler, optimizer, lambda loss: [log.step(loss) for log in logs])
    # the first four steps have the samples 0 to 7, 8 to 23, 24 to 31, and in epoch 1 0 to 3; then 4 to 15, 16 to 23
    assert [record["loss"] for record in records[2]] == pytest.approx([11.5, (8 * 27.5 + 4 * 1.5) / 12, 13.5])
    assert [record["loss"] for record in records[3]] == pytest.approx([15.5, 11.5])
    by_step = {record["step"]: record["gradient_norm"] for of in records.values() for record in of}
    assert [by_step[step] for step in (2, 3, 4, 6)] == pytest.approx([15.5, 27.5, 1.5, 19.5])


def test_loss_excludes_incomplete_steps():
    model, sampler, optimizer = make()
    records = []
    log = vbs.Log(optimizer, every=1, to=[records.append])
    train(model, sampler, optimizer, log.step, minibatches=4)  # a step of 2, and 2 of a step of 4
    for epoch in (0, 1):  # the same epoch again, then the next
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        train(model, sampler, optimizer, log.step, minibatches=3)
    assert [(record["epoch"], record["loss"]) for record in records] == [(0, 3.5), (0, 3.5), (1, 1.5)]


def test_a_loss_may_be_a_number():
    model, sampler, optimizer = make()
    records = []
    log = vbs.Log(optimizer, every=1, to=[records.append])
    train(model, sampler, optimizer, lambda loss: log.step(loss.item()), minibatches=6)
    assert [record["loss"] for record in records] == [3.5, 15.5]


def test_additional_values_may_be_torch_or_numpy_numbers(tmp_path):
    with vbs.Log(make()[2], every=1, to=[vbs.JsonLines(tmp_path / "log.jsonl")]) as log:
        log.write(accuracy=torch.tensor(0.5), correct=np.int64(3), best=0.75)
    (found,) = lines(tmp_path / "log.jsonl")
    assert (found["accuracy"], found["correct"], found["best"]) == (0.5, 3, 0.75)


def test_log_that_misses_losses_raises():
    model, sampler, optimizer = make()
    log = vbs.Log(optimizer, every=1, to=[])
    message = (
        r"^log\.step\(\) was called for 1 of this core's 2 minibatches in a step of batch size 8: call it after every "
        r"optimizer\.step\(\), not only if that returns True$"
    )
    with pytest.raises(RuntimeError, match=message):
        train(model, sampler, optimizer, lambda loss: log.step(loss) if optimizer.updated else None, minibatches=2)


def test_log_made_before_the_checkpoint_resumes(tmp_path):
    model, sampler, optimizer = make()
    checkpoint = vbs.Checkpoint(tmp_path, model=model, optimizer=optimizer, every_steps=1)
    for _ in checkpoint.epochs(2):
        train(model, sampler, optimizer, lambda loss: checkpoint.step(), minibatches=2)
        break

    model, sampler, optimizer = make()
    records = []
    log = vbs.Log(optimizer, every=1, to=[records.append])
    checkpoint = vbs.Checkpoint(tmp_path, model=model, optimizer=optimizer)
    assert optimizer.steps_done == 1
    for _ in checkpoint.epochs(2):
        train(model, sampler, optimizer, log.step)
    assert [(record["step"], record["loss"]) for record in records] == [
        (2, 15.5),
        (3, 27.5),
        (4, 1.5),
        (5, 9.5),
        (6, 19.5),
    ]


def test_a_norm_that_was_not_measured_is_nan():
    model, sampler, optimizer = make()
    records = []
    log = vbs.Log(optimizer, every=1, to=[records.append])

    def log_without_norm(loss):
        optimizer._gradient_norm.latest = None
        log.step(loss)

    train(model, sampler, optimizer, log_without_norm, minibatches=2)
    assert math.isnan(records[0]["gradient_norm"])
    assert records[0]["loss"] == 3.5


@pytest.mark.parametrize("backend", BACKENDS)
def test_records_are_the_same_on_two_cores(long_runs_on, tmp_path, backend):
    results, _ = long_runs_on(backend)
    expected = []
    stoppable_run.run(tmp_path, log_to=expected.append)
    assert results[1]["records"] == []
    assert len(results[0]["records"]) == len(expected)
    for record, alone in zip(results[0]["records"], expected, strict=True):
        for name in ("epoch", "step", "samples", "batch_size", "lr", "factor", "loss", "gradient_norm"):
            assert record[name] == pytest.approx(alone[name], rel=1e-4), name
    # the first four steps have 3, 1, 5 and 2 minibatches; in one of them, one of two cores is idle
    assert results[0]["records"][0]["idle_share"] == 1 / 8
    if backend == "xla":
        graphs = [record["graphs"] for record in results[0]["records"]]
        assert graphs[-1] == graphs[2]


# --------------------------------------------------------------------------------------------------------------- sinks


def record(step, **values):
    return {"epoch": 0, "step": step, "samples": 10 * step, **values}


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_json_lines_are_flushed_immediately(tmp_path):
    path = tmp_path / "new" / "log.jsonl"
    sink = vbs.JsonLines(path)
    sink(record(1, loss=0.5, noise_scale=math.inf, gain=math.nan))
    assert lines(path) == [record(1, loss=0.5, noise_scale=None, gain=None)]
    sink(record(2, loss=0.25))
    assert len(lines(path)) == 2
    sink.close()


def test_resumed_run_replaces_the_lines_of_repeated_steps(tmp_path):
    path = tmp_path / "log.jsonl"
    sink = vbs.JsonLines(path)
    for entry in [record(2, loss=1), record(4, loss=2), record(4, accuracy=7), record(6, loss=3), record(8, loss=4)]:
        sink(entry)
    sink.close()
    with path.open("a") as file:
        file.write('{"epoch": 0, "st')
    sink = vbs.JsonLines(path)
    sink(record(4, accuracy=8))  # a run that resumes at the end of an epoch
    sink(record(6, loss=5))
    sink.close()
    expected = [record(2, loss=1), record(4, loss=2), record(4, accuracy=8), record(6, loss=5)]
    assert lines(path) == expected


def masked_crc(data):
    """The checksum of a record in an event file (CRC-32C, rotated), bit by bit from its definition."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def events(directory):
    """The format of TensorBoard: length, its checksum, an Event, its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(directory.glob("events.out.tfevents.*")):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            data = content[12 : 12 + length]
            assert struct.unpack("<I", content[8:12])[0] == masked_crc(content[:8])
            assert struct.unpack("<I", content[12 + length : 16 + length])[0] == masked_crc(data)
            yield Event.FromString(data)
            content = content[16 + length :]


def scalars(directory):
    return [(value.tag, event.step, value.simple_value) for event in events(directory) for value in event.summary.value]


def test_foreign_lines_are_kept_when_a_run_resumes(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"note": "a larger machine"}\n{"step": 1}\n{"step": 2}\n')
    sink = vbs.JsonLines(path)
    sink({"step": 2})
    sink.close()
    assert path.read_text() == '{"note": "a larger machine"}\n{"step": 1}\n{"step": 2}\n'


def test_tensorboard_files_have_every_number_over_steps_and_over_samples(tmp_path):
    sink = vbs.TensorBoard(tmp_path)
    sink(record(1, loss=0.5))
    sink(record(2, loss=0.25, accuracy=50.0))
    sink.close()
    for axis, first, second in (("steps", 1, 2), ("samples", 10, 20)):
        assert scalars(tmp_path / axis) == [
            (f"{axis}/epoch", first, 0.0),
            (f"{axis}/loss", first, 0.5),
            (f"{axis}/epoch", second, 0.0),
            (f"{axis}/loss", second, 0.25),
            (f"{axis}/accuracy", second, 50.0),
        ]
        assert next(event.file_version for event in events(tmp_path / axis)) == "brain.Event:2"
        assert sum(bool(event.summary.value) for event in events(tmp_path / axis)) == 2  # one for each record


def test_resumed_run_marks_repeated_points_in_tensorboard(tmp_path):
    for steps in ((1, 2, 3), (2, 3)):
        sink = vbs.TensorBoard(tmp_path)
        for step in steps:
            sink(record(step, loss=step))
        sink.close()
    for axis, after in (("steps", 3), ("samples", 21)):
        restarts = [event.step for event in events(tmp_path / axis) if event.session_log.status]
        assert restarts == [after]


def test_progress_bar_has_the_number_of_steps(capsys):
    bar = vbs.ProgressBar(40)
    bar(record(30, loss=0.123456))
    bar(record(40, loss=0.1))
    bar.close()
    shown = capsys.readouterr().err
    assert "30/40" in shown
    assert "40/40" in shown
    assert "loss=0.1235" in shown


def test_progress_bar_shows_an_interval_with_its_value(capsys):
    bar = vbs.ProgressBar(40)
    bar({"step": 30, "gain": 1.6, "gain_low": 1.5, "gain_high": math.inf})
    bar.close()
    assert "gain=1.6 (1.5 to inf)" in capsys.readouterr().err


def test_any_callable_is_a_sink_and_closeable_ones_are_closed(tmp_path):
    sampler = vbs.CustomSampler(dataset_size=4, trace=[4], minibatch_size=2)
    model = torch.nn.Linear(2, 1)
    optimizer = vbs.ConstantOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sampler)
    records = []
    with vbs.Log(optimizer, every=1, to=[records.append, vbs.JsonLines(tmp_path / "log.jsonl")]) as log:
        log.write(accuracy=12.5)
    assert records == lines(tmp_path / "log.jsonl") == [record(0, progress=0.0, accuracy=12.5)]
    with pytest.raises(ValueError, match=r"`loss` must be the mean over a minibatch, got the shape \(2,\)"):
        log.step(torch.ones(2))
    with pytest.raises(ValueError, match="`every` must be a positive integer, got 0"):
        vbs.Log(optimizer, every=0, to=[])
