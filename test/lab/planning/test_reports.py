import numpy as np
import pytest

import variable_batch_size as vbs
from variable_batch_size.lab.planning.reports import duration


def test_report_of_a_trace():
    trace = vbs.Trace.from_sequence([32] * 20 + [128] * 10)
    assert vbs.planning.trace_report(trace, width=24, is_ascii=True).splitlines() == [
        "30 steps, 1,920 samples",
        "batch sizes   32 to 128, mean 64, 2 distinct, 1 change",
        "over steps    ......=###",  # the seventh has 32, 32 and 128
        "over samples  ...*######",  # the fourth has a third of 32 and two thirds of 128
    ]


def test_report_of_an_endless_trace():
    assert vbs.planning.trace_report(vbs.Trace.constant(1024), width=80) == "batch size 1,024 forever"


def test_report_of_a_conversion():
    conversion = vbs.traces.convert_recording(
        vbs.traces.Recording.from_counts([0, 10, 20, 30, 43], [1, 0, 2, 5]),
        samples_per_device=48,
        minibatch_size=32,
        seconds_per_step=10,
        when_empty="skip",
        rounding="down",
    )
    # devices and seconds: 1·10 + 2·10 + 5·13 = 95, 95 · 48 / 10 / 43 = 10.6 a second; 48, 96 and 240 samples, rounded
    assert vbs.planning.conversion_report(conversion).splitlines() == [
        "recording      43 s, of which 10 s without a device; 10.6 samples per second",
        "trace          3 steps of 10 s, 352 samples; 8.8 samples per second",
        "rounding       changed 2 of 3 steps, -32 samples (-8.33 %)",
        "left at end    3 s, less than a step",
    ]


def test_report_of_a_conversion_to_short_steps():
    options = {"samples_per_device": 32, "minibatch_size": 32, "when_empty": "skip", "rounding": "down"}
    recording = vbs.traces.Recording.from_counts([0, 1.0025], [3])
    report = vbs.planning.conversion_report(vbs.traces.convert_recording(recording, seconds_per_step=0.004, **options))
    assert "250 steps of 4 ms," in report
    assert "left at end    2.5 ms," in report


def test_report_of_a_plan():
    schedule = vbs.Schedule(
        vbs.Trace.from_sequence([64, 96, 32, 256, 128]), dataset_size=310, minibatch_size=32, num_replicas=4
    )
    plan = vbs.planning.Plan.of(schedule, rules={"root": vbs.rules.RootRule()}, ref_batchsize=128, checkpoint_every=3)
    assert vbs.planning.plan_report(plan) == PLAN


PLAN = """\
steps         5
samples       576 in 3 epochs of 310
left over     172 samples that did not fit into their epoch
batch size    32 to 256, mean 115.2, 5 distinct
minibatches   18 of 32 samples, 1 to 8 in a step
load          3 to 6 minibatches on each of 4 cores, busy 75.0 % of the time if all minibatches take equally long
idle          30.0 % of all cores in all steps, 0 to 3 steps on a core
accumulation  1 to 2 minibatches deep, mean 1.2
note          the trace ends in epoch 2, after 128 of 310 samples (41.3 %)

batch sizes; learning-rate factor of root at the reference batch size 128
batch size  steps  minibatches  deep  idle cores    root
        32      1            1     1           3     0.5
        64      1            2     1           2  0.7071
        96      1            3     1           1   0.866
       128      1            4     1           0       1
       256      1            8     2           0   1.414

epochs
epoch  first step  steps  samples  left over
    0           0      3      192        118
    1           3      1      256         54
    2           4      1      128        182*
* ends with the trace

over time; learning-rate factor of root at the reference batch size 128
step  samples before  epoch  batch size  deep  idle cores    root
   0               0      0          64     1           2  0.7071
   1              64      0          96     1           1   0.866
   2             160      0          32     1           3     0.5
   3             192      1         256     2           0   1.414
   4             448      2         128     1           0       1

checkpoints
steps done  samples done  epoch  steps done in it
         3           192      0                 3
         5           576      2                 1"""


def test_report_of_a_plan_with_tokens():
    trace = vbs.Trace.from_sequence([64, 96, 32, 256])
    schedule = vbs.Schedule(trace, dataset_size=310, minibatch_size=32, num_replicas=4)
    report = vbs.planning.plan_report(vbs.planning.Plan.of(schedule, rules={}, tokens_per_sample=1000)).splitlines()
    assert report[2] == "tokens        448,000 at 1,000 in a sample; 32,000 to 256,000 in a step, mean 112,000"
    sizes = report.index("batch sizes")
    assert report[sizes + 1 : sizes + 3] == [
        "batch size   tokens  steps  minibatches  deep  idle cores",
        "        32   32,000      1            1     1           3",
    ]
    assert report[-5] == "step  samples before  tokens before  epoch  batch size  deep  idle cores"
    assert report[-1] == "   3             192        192,000      1         256     2           0"


def test_report_shows_the_first_and_last_of_many_rows():
    sizes = 32 * np.arange(1, 101)
    schedule = vbs.Schedule(vbs.Trace.from_sequence(sizes), dataset_size=10_000, minibatch_size=32)
    report = vbs.planning.plan_report(vbs.planning.Plan.of(schedule, rules={}))
    assert "(86 more rows: use --json to see all)" in report
    table = report.split("batch sizes\n")[1].split("\n\n")[0].splitlines()
    assert [row.split()[0] for row in table[1:-1]] == [
        *("32", "64", "96", "128", "160", "192", "224"),
        "…",
        *("3,008", "3,040", "3,072", "3,104", "3,136", "3,168", "3,200"),
    ]


def test_report_notes_unused_rows():
    schedule = vbs.Schedule(vbs.Trace.from_sequence([64, 96, 32, 256]), dataset_size=310, minibatch_size=32)
    report = vbs.planning.plan_report(vbs.planning.Plan.of(schedule, num_epochs=1))
    assert "note          1 row at the end of the trace is not reached" in report


def test_report_of_a_plan_in_lockstep():
    # 5, 2 and 8 minibatches: 5 rounds of 4 cores for 15 minibatches
    trace = vbs.Trace.from_sequence([5, 2, 8])
    plan = vbs.planning.Plan.of(vbs.Schedule(trace, dataset_size=20, minibatch_size=1, num_replicas=4, lockstep=True))
    line = "lockstep      5 rounds of all cores, 5 padding minibatches (25.0 % of all minibatches run)"
    assert line in vbs.planning.plan_report(plan).splitlines()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (2.5e-6, "2.5 µs"),
        (0.0009999, "1 ms"),  # rounded first
        (0.25, "250 ms"),
        (59.94, "59.9 s"),
        (59.96, "1 min"),
        (60.4, "1 min"),
        (226.872, "3 min 47 s"),  # 0.06302 hours
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h"),
        (3 * 3600 + 61, "3 h 1 min"),
        (86_399, "1 d"),
        (90_000, "1 d 1 h"),
        (1000 * 86_400, "1,000 d"),
    ],
)
def test_durations_have_readable_units(seconds, text):
    assert duration(seconds) == text
