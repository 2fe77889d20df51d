import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from variable_batch_size import Stages, Trace
from variable_batch_size.traces.stages import format_count, parse_count

TRACES = st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 50)), min_size=1, max_size=20).map(
    lambda runs: Trace.from_sequence(np.repeat([size for size, _ in runs], [length for _, length in runs]))
)


@given(TRACES, st.sampled_from(["steps", "samples"]))
def test_the_stages_of_a_trace_make_the_same_trace_again(trace, unit):
    stages = Stages.of(trace, unit=unit)
    assert stages.trace() == trace
    assert Stages.parse(str(stages), until=stages.until, unit=unit) == stages


@given(st.integers(0, 10**18))
def test_a_count_is_read_back_from_its_text(value):
    assert parse_count(format_count(value)) == value


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(1, 10**5), st.integers(1, 1000)), min_size=1, max_size=8),
)
def test_rounding_to_steps_never_adds_up(stages):
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


def test_the_example_of_the_documentation_has_its_numbers():
    # 250,000 / 768 = 325.52; + 250,000 / 1,536 = 488.28; + 500,000 / 3,072 = 651.04
    trace = Stages.parse("0:768 250K:1536 500K:3072", until=parse_count("1M"), unit="samples").trace()
    assert [int(np.count_nonzero(trace.sizes == size)) for size in (768, 1536, 3072)] == [326, 162, 163]


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("96", 96), ("250K", 250_000), ("250k", 250_000), ("1.5M", 1_500_000), ("2B", 2 * 10**9)],
)
def test_counts_may_end_in_a_suffix(text, value):
    assert parse_count(text) == value


@pytest.mark.parametrize("text", ["", "K", "-1", "1.5", "1e3", "1,000", "1KK", "1 K", "٣", "0.0001K", "9" * 30])
def test_what_is_no_count_is_refused(text):
    with pytest.raises(ValueError, match=r"expected a whole number such as 96, 250K, 1\.5M or 2B, got"):
        parse_count(text)


@pytest.mark.parametrize(
    ("text", "until", "unit", "message"),
    [
        ("5:32", 10, "steps", "^the first stage must begin at 0, got 5$"),
        ("0:32 7:64 7:96", 10, "steps", "^stage 2 must end after its start at 7, got 7$"),
        ("0:32 7:64", 7, "steps", "^stage 2 must end after its start at 7, got 7$"),
        ("0:32 3", 7, "steps", "^stage 2 must be written start:size, got '3'$"),
        ("", 7, "steps", "^stage 1 must be written start:size, got ''$"),
        ("0:0", 7, "steps", "^the batch size of stage 1 must be positive, got 0$"),
        ("0:x", 7, "steps", "^expected a whole number .*, got 'x'$"),
        ("0:32", 7, "epochs", "^`unit` must be one of 'steps', 'samples', got 'epochs'$"),
        ("0:32", 7, "samples", "^the stages must make from 1 to 20000000 steps, got 0$"),
        ("0:1", 10**9, "steps", "^the stages must make from 1 to 20000000 steps, got 1000000000$"),
    ],
)
def test_wrong_stages_are_refused(text, until, unit, message):
    with pytest.raises(ValueError, match=message):
        Stages.parse(text, until=until, unit=unit).trace()


def test_an_endless_trace_has_no_stages():
    with pytest.raises(ValueError, match="a constant trace is endless and has no stages"):
        Stages.of(Trace.constant(32), unit="steps")
