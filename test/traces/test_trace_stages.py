import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import variable_batch_size as vbs
from variable_batch_size import Trace
from variable_batch_size.traces import Stages
from variable_batch_size.traces.trace import format_count, parse_count

TRACES = st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 50)), min_size=1, max_size=20).map(
    lambda runs: Trace.from_sequence(np.repeat([size for size, _ in runs], [length for _, length in runs]))
)


@given(TRACES, st.sampled_from([("steps", None), ("samples", None), ("tokens", 4096), ("tokens", 1000)]))
def test_stages_of_a_trace_convert_back_to_it(trace, counted):
    unit, tokens = counted
    stages = Stages.of(trace, unit=unit, tokens_per_sample=tokens)
    assert stages.trace() == trace
    assert stages.trace(change="after") == trace
    assert Stages.parse(str(stages), until=stages.until, unit=unit, tokens_per_sample=tokens) == stages


@given(st.integers(0, 10**18))
def test_parse_count_inverts_format_count(value):
    assert parse_count(format_count(value)) == value


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(1, 10**5), st.integers(1, 1000)), min_size=1, max_size=8),
)
def test_rounding_errors_do_not_accumulate(stages):
    ends = np.cumsum([length for length, _ in stages])
    sizes = [size for _, size in stages]
    updates = sum(length / size for length, size in stages)
    if updates < 0.5:
        return
    trace = Stages((0, *ends[:-1].tolist()), tuple(sizes), int(ends[-1]), "samples").trace()
    assert abs(len(trace) - updates) <= 0.5 + 1e-6


def test_thresholds_may_be_counted_in_steps():
    trace = Stages.parse("0:32 3:64 5:16", until=6, unit="steps").trace()
    assert list(trace) == [32, 32, 32, 64, 64, 16]


def test_thresholds_may_be_counted_in_samples():
    trace = Stages.parse("0:100, 1K:250, 2K:500", until=4000, unit="samples").trace()
    assert list(trace) == [100] * 10 + [250] * 4 + [500] * 4


def test_thresholds_may_be_counted_in_tokens_and_sizes_remain_samples():
    stages = Stages.parse("0:100 10M:250 20M:500", until=40_000_000, unit="tokens", tokens_per_sample=10_000)
    assert list(stages.trace()) == [100] * 10 + [250] * 4 + [500] * 4


def test_change_after_as_in_megatron():
    # its calculator asks before each step which thresholds the samples so far have reached: 0, 4, … 24 are below 25
    # (7 steps of 4); 28, 36, 44 and 52 are below 60 (4 of 8); what begins at 60, 76 and 92 ends within 120 (3 of 16)
    expected = [4] * 7 + [8] * 4 + [16] * 3
    stages = Stages.parse("0:4 25:8 60:16", until=120, unit="samples")
    assert list(stages.trace(change="after")) == expected
    assert list(stages.trace()) == [4] * 6 + [8] * 5 + [16] * 3  # 25/4 = 6.25, + 35/8 = 10.63, + 60/16 = 14.38
    # with --seq-length 10 its thresholds are tokens // 10
    stages = Stages.parse("0:4 259:8 600:16", until=1209, unit="tokens", tokens_per_sample=10)
    assert list(stages.trace(change="after")) == expected


def test_the_schedule_in_the_help_of_megatron_changes_at_its_tokens():
    # 0:768 250B:1536 500B:3072 750B:6144 at a sequence length of 4096: 250e9 / 4096 = 61,035,156.25, so that
    # ⌈61,035,156 / 768⌉ = 79,473 steps lead to 61,035,264; ⌈(122,070,312 − 61,035,264) / 1536⌉ = 39,737 to 122,071,296;
    # ⌈(183,105,468 − 122,071,296) / 3072⌉ = 19,868 to 183,105,792; and ⌊(244,140,625 − 183,105,792) / 6144⌋ = 9,934
    text = "0:768 250B:1536 500B:3072 750B:6144"
    stages = Stages.parse(text, until=parse_count("1T"), unit="tokens", tokens_per_sample=4096)
    trace = stages.trace(change="after")
    assert [int(np.count_nonzero(trace.sizes == size)) for size in stages.sizes] == [79_473, 39_737, 19_868, 9_934]


@given(
    st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 60)), min_size=1, max_size=6),
    st.sampled_from([None, 1, 7, 64]),
)
def test_change_after_equals_a_check_before_each_step(lengths, tokens):
    ends = np.cumsum([length for length, _ in lengths]).tolist()
    starts, sizes, per = (0, *ends[:-1]), tuple(size for _, size in lengths), tokens or 1
    expected, done = [], 0
    while True:
        size = max((start // per, row) for row, start in enumerate(starts) if start // per <= done)[1]
        if done + sizes[size] > ends[-1] // per:
            break
        expected.append(sizes[size])
        done += sizes[size]
    unit = "samples" if tokens is None else "tokens"
    stages = Stages(starts, sizes, ends[-1], unit, tokens)
    if expected:
        assert list(stages.trace(change="after")) == expected


def test_numbers_of_the_example_in_the_documentation():
    # 250,000 / 768 = 325.52; + 250,000 / 1,536 = 488.28; + 500,000 / 3,072 = 651.04
    trace = Stages.parse("0:768 250K:1536 500K:3072", until=parse_count("1M"), unit="samples").trace()
    assert [int(np.count_nonzero(trace.sizes == size)) for size in (768, 1536, 3072)] == [326, 162, 163]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("96", 96),
        ("250K", 250_000),
        ("250k", 250_000),
        ("1.5M", 1_500_000),
        ("2B", 2 * 10**9),
        ("1T", 10**12),
    ],
)
def test_counts_may_end_in_a_suffix(text, value):
    assert parse_count(text) == value


@pytest.mark.parametrize("text", ["", "K", "-1", "1.5", "1e3", "1,000", "1KK", "1 K", "٣", "0.0001K", "9" * 30])
def test_invalid_count_is_rejected(text):
    with pytest.raises(ValueError, match=r"expected an integer such as 96, 250K, 1\.5M or 2B, got"):
        parse_count(text)


@pytest.mark.parametrize(
    ("text", "until", "unit", "message"),
    [
        ("5:32", 10, "steps", "^the first stage must begin at 0, got 5$"),
        ("0:32 7:64 7:96", 10, "steps", "^stage 3 must begin after 7, where stage 2 begins, got 7$"),
        ("0:32 7:64", 7, "steps", "^the last stage must end after 7, where stage 2 begins, got 7$"),
        ("0:32 3", 7, "steps", "^stage 2 must have the form start:size, got '3'$"),
        ("", 7, "steps", "^stage 1 must have the form start:size, got ''$"),
        ("0:0", 7, "steps", "^the batch size of stage 1 must be positive, got 0$"),
        ("0:x", 7, "steps", "^stage 1 .*: expected an integer .*, got 'x'$"),
        ("0:32", 7, "epochs", "^`unit` must be one of 'steps', 'samples', 'tokens', got 'epochs'$"),
        ("0:32", 7, "samples", "^the stages must make 1 to 20000000 steps, got 0$"),
        ("0:1", 10**9, "steps", "^the stages must make 1 to 20000000 steps, got 1000000000$"),
    ],
)
def test_invalid_stages_are_rejected(text, until, unit, message):
    with pytest.raises(ValueError, match=message):
        Stages.parse(text, until=until, unit=unit).trace()


def test_an_endless_trace_has_no_stages():
    with pytest.raises(ValueError, match="a constant trace is endless and has no stages"):
        Stages.of(Trace.constant(32), unit="steps")


@pytest.mark.parametrize(
    ("unit", "tokens", "message"),
    [
        ("tokens", None, "^`tokens_per_sample` must be a positive integer, got None$"),
        ("tokens", 0, "^`tokens_per_sample` must be a positive integer, got 0$"),
        ("samples", 4096, "^`tokens_per_sample` must be None unless `unit` is 'tokens', got 4096 with 'samples'$"),
    ],
)
def test_tokens_per_sample_is_for_stages_in_tokens(unit, tokens, message):
    with pytest.raises(ValueError, match=message):
        Stages.parse("0:32", until=100, unit=unit, tokens_per_sample=tokens)


def test_unknown_change_is_rejected():
    with pytest.raises(ValueError, match=r"^`change` must be one of 'nearest', 'after', got 'before'$"):
        Stages.parse("0:32", until=100, unit="samples").trace(change="before")


def test_last_step_fits_if_its_stage_is_not_the_last():
    stages = Stages.parse("0:40 90:8", until=100, unit="samples")
    assert list(stages.trace(change="after")) == [40, 40]  # the third begins at 80, before the change, and ends at 120
    assert list(Stages.parse("0:40 80:8", until=100, unit="samples").trace(change="after")) == [40, 40, 8, 8]


OPEN = [64, 64, 128, 128, 256]


@pytest.mark.parametrize(
    "source",
    [
        "0:64 2:128 4:256",
        " 0:64, 2:128, 4:256",
        {0: 64, 2: 128, 4: 256},
        {np.int64(0): np.int64(64), 2: 128, 4: 256},
        vbs.traces.Stages.parse("0:64 2:128 4:256", unit="steps"),
        vbs.traces.Stages.parse("0:64 128:128 384:256", unit="samples"),
        vbs.traces.Stages.parse("0:64 128K:128 384K:256", unit="tokens", tokens_per_sample=1000),
    ],
)
def test_stages_without_an_end_are_a_trace_whose_last_size_lasts(source):
    trace = vbs.Trace.of(source)
    assert list(trace) == OPEN and trace.is_open
    for on_end in (None, "hold"):
        assert vbs.Schedule(source, dataset_size=1024, minibatch_size=64, on_end=on_end).on_end == "hold"
    for on_end in ("stop", "cycle"):
        message = rf"`on_end` must be 'hold' or None with stages without an end, got '{on_end}': give them an end with"
        with pytest.raises(ValueError, match=message):
            vbs.Schedule(source, dataset_size=1024, minibatch_size=64, on_end=on_end)
    sampler = vbs.CustomSampler(dataset_size=1024, trace=source, minibatch_size=64)
    assert sampler.get_epochtrace(0) == [*OPEN, 256] and sampler.get_epochtrace(7) == [256] * 4


@pytest.mark.parametrize("change", ["nearest", "after"])
@pytest.mark.parametrize("text", ["0:64 100:128", "0:64 100:128 1000:96", "0:256 100:64", "0:256 20:128 30:64", "0:32"])
@pytest.mark.parametrize("tokens", [None, 7])
def test_stages_without_an_end_change_where_those_with_an_end_do(text, change, tokens):
    how = {"unit": "tokens" if tokens else "samples", "tokens_per_sample": tokens}
    without = vbs.traces.Stages.parse(text, **how).trace(change=change)
    until = vbs.traces.Stages.parse(text, until=100_000, **how).trace(change=change)
    assert list(without) == list(until)[: len(without)] and set(until[len(without) - 1 :]) == {without[-1]}
    assert without[-2] != without[-1] if len(without) > 1 else without[-1] == until[0]


def test_stages_with_an_end_are_a_trace_that_ends():
    stages = vbs.traces.Stages.parse("0:64 2:128", unit="steps", until=3)
    assert not vbs.Trace.of(stages).is_open
    assert vbs.Schedule(stages, dataset_size=1024, minibatch_size=64).on_end == "stop"


def test_a_trace_that_is_open_differs_from_one_that_ends_and_is_not_written(tmp_path):
    trace = vbs.Trace.of("0:64 2:128")
    assert trace != vbs.Trace.of([64, 64, 128]) and trace == vbs.Trace.of({0: 64, 2: 128})
    with pytest.raises(ValueError, match="stages without an end cannot be written to a file: make them with `until`"):
        trace.write(tmp_path / "trace.csv")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("0:64 20", r"stage 2 must have the form start:size, got '20'"),
        ("0:64 20:x", r"stage 2 \(20:x\): expected an integer such as 96, 250K, 1.5M or 2B, got 'x'"),
        ("0:64 0:128", r"stage 2 must begin after 0, where stage 1 begins, got 0"),
        ({}, r"the first stage must begin at 0, got no stage"),
        ({5: 64}, r"the first stage must begin at 0, got 5"),
        ({0: 64.0}, r"stages must map integer steps to integer batch sizes, got 0: 64.0"),
        ({"0": 64}, r"stages must map integer steps to integer batch sizes, got '0': 64"),
        ({0: 64, 20: 0}, r"the batch size of stage 2 must be positive, got 0"),
        ({0: 64, 20: 2**63}, r"the batch size of stage 2 must be below 2\*\*63, got 9223372036854775808"),
        ({64}, r"`trace` must be a path, stages, a sequence of batch sizes or an integer, got \{64\}"),
    ],
)
def test_stages_that_are_wrong_are_refused_as_a_trace(source, message):
    with pytest.raises(ValueError, match=message):
        vbs.CustomSampler(dataset_size=1024, trace=source, minibatch_size=64)


def test_the_column_may_be_called_batch_size(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("step,batch_size\n0,64\n1,128\n")
    assert list(vbs.Trace.read(path)) == [64, 128]
    path.write_text("step,batch_size\n0,64\n1,x\n")
    with pytest.raises(ValueError, match=r"trace\.csv:3: batchsize must be an integer, got x"):
        vbs.Trace.read(path)
    path.write_text("step,batch_size,batchsize\n0,1,64\n")  # a further column
    assert list(vbs.Trace.read(path)) == [64]


# --------------------------------------------------------------------------------------------------- files of stages


def test_a_file_of_stages_is_the_trace_of_the_stages(tmp_path):
    path = tmp_path / "stages.csv"
    path.write_text("# from a paper\nsamples, batch_size\n0,768\n250000,1536\n\n500000,3072\n1000000,\n")
    trace = Trace.read(path)
    assert trace == Stages.parse("0:768 250K:1536 500K:3072", until=1_000_000, unit="samples").trace()
    assert (trace.comment, trace.name) == ("from a paper", str(path))
    path.write_text("tokens,batchsize,tokens_per_sample\n0,64,1024\n1000000,128,1024\n")
    open_ended = Trace.read(path)
    assert open_ended.is_open
    assert open_ended == Stages.parse("0:64 1M:128", unit="tokens", tokens_per_sample=1024).trace()
    path.write_text("samples,step,batchsize\n64,0,64\n192,1,128\n")  # a trace with another column in front
    assert list(Trace.read(path)) == [64, 128]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tokens,batchsize\n0,64\n", ":1: the columns of stages in tokens must be tokens,batchsize,tokens_per_sample"),
        ("steps,batchsize\n0,64,3\n", ":2: a row must have 2 values, got 3"),
        ("steps,batchsize\n0,64\n9,\n12,32\n", ":4: the row without a batch size must be the last"),
        ("steps,batchsize\n0,64\n9,x\n", ":3: batchsize must be an integer, got x"),
        ("steps,batchsize\n0,64\n9,-1\n", ":3: batchsize must be a positive integer, got -1"),
        ("steps,batchsize\n0,64\n9,32\n9,64\n", ": stage 3 must begin after 9, where stage 2 begins, got 9"),
        ("steps,batchsize\n3,64\n", ": the first stage must begin at 0, got 3"),
        ("tokens,batchsize,tokens_per_sample\n0,64,8\n9,,9\n", ":3: tokens_per_sample must be the same in all rows"),
        ("steps,batchsize\n", ": the first stage must begin at 0, got no stage"),
    ],
)
def test_a_wrong_file_of_stages_is_refused_with_its_line(tmp_path, text, message):
    path = tmp_path / "stages.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}{message}"):
        Trace.read(path)
