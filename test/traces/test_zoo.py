"""The zoo of traces: what its entries hold, and how they are read."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

import variable_batch_size as vbs
from variable_batch_size.traces import Recording, Stages, Trace, growth_for_decay, rampup, seesaw, zoo

ROOT = Path(__file__).parents[2]
RECORDINGS = ["bamboo-g4dn-1c", "bamboo-g4dn-1d", "bamboo-p2", "parcae-p3", "pollux-arrivals"]


@pytest.mark.parametrize("name", zoo.names())
def test_every_entry_states_its_source_and_licence_and_is_drawn_on_the_page(name):
    entry = zoo.entry(name)
    assert entry.title and entry.source and entry.licence
    assert entry.is_recording == (name in RECORDINGS)
    if not entry.is_recording:
        assert re.search(r"arXiv:\d{4}\.\d{5}|github\.com/", entry.source)
    page = (ROOT / "docs/zoo.md").read_text(encoding="utf-8")
    assert re.search(rf"^\$ vbs show .*zoo:{name}\b", page, re.MULTILINE)
    assert len(Trace.of(f"zoo:{name}")) > 300


def test_all_entries_take_little_space():
    folder = Path(zoo.__file__).parent / "zoo_data"
    assert sum(file.stat().st_size for file in folder.iterdir()) < 100_000


@pytest.mark.parametrize(
    ("name", "published"),
    [  # first and last tokens in a step, tokens at the end of the ramp, and all tokens
        ("gpt-3", (32e3, 3.2e6, 12e9, 300e9)),
        ("llama-3-405b", (4e6, 16e6, 2.87e12, 15.6e12)),
        ("deepseek-v2", (2304 * 4096, 9216 * 4096, 225e9, 8.1e12)),
        ("deepseek-v3", (3072 * 4096, 15360 * 4096, 469e9, 14.8e12)),
        ("olmo-2-32b", (2048 * 4096, 2048 * 4096, 0, 6.5e12)),
    ],
)
def test_published_schedules_have_the_published_tokens(name, published):
    stages = Stages.in_file(name, zoo.entry(name).content)
    per = stages.tokens_per_sample
    found = (stages.sizes[0] * per, stages.sizes[-1] * per, stages.starts[-1], stages.until)
    assert found == pytest.approx(published, rel=0.05)
    assert per * Trace.of(f"zoo:{name}").sizes.sum() == pytest.approx(stages.until, rel=1e-4)


def test_llama_doubles_twice_at_the_published_tokens():
    stages = Stages.in_file("llama", zoo.entry("llama-3-405b").content)
    assert stages.starts == (0, 252 * 10**6, 2870 * 10**9)
    assert [after / before for before, after in pairwise(stages.sizes)] == [2, 2]


@pytest.mark.parametrize(
    ("name", "increments", "start", "final", "length"),
    [("deepseek-v3", 256, 3072, 15360, 469 * 10**9), ("gpt-3", 16, 16, 1568, 12 * 10**9)],
)
def test_ramps_agree_with_those_of_megatron_to_a_step_for_each_increment(name, increments, start, final, length):
    stages = Stages.in_file(name, zoo.entry(name).content)
    options = {"final": final, "until": stages.until, "unit": "tokens", "tokens_per_sample": stages.tokens_per_sample}
    megatron = rampup(start, increments, length, **options)
    assert abs(len(Trace.of(f"zoo:{name}")) - len(megatron)) <= len(stages.sizes)


def test_smith_and_seesaw_are_those_of_the_generators():
    grown = growth_for_decay(
        128, factor=5, at_epochs=[60, 120, 160], num_epochs=200, dataset_size=50_000, minibatch_size=32
    )
    assert Trace.of("zoo:smith-cifar10") == grown
    assert Trace.of("zoo:seesaw") == seesaw(256, num_samples=2_929_687, minibatch_size=16, factor=1.1, cap=4096)


def test_the_speed_run_has_three_equal_parts():
    sizes = Trace.of("zoo:nanogpt-speedrun").sizes
    assert [sizes[part * 705 : (part + 1) * 705].tolist() for part in range(3)] == [
        [number * 2048 * 8 // 2048] * 705 for number in (8, 16, 24)
    ]


def test_a_recording_is_a_trace_with_a_step_for_each_minute_with_devices():
    recording = Recording.read("zoo:bamboo-g4dn-1d")
    minutes = range(0, int(recording.seconds), 60)
    counts = [recording.counts[recording.times.searchsorted(second, side="right") - 1] for second in minutes]
    assert list(Trace.of("zoo:bamboo-g4dn-1d")) == [count for count in counts if count]
    assert list(Trace.of("zoo:bamboo-g4dn-1d:32")) == [32 * count for count in counts if count]


def test_the_arrivals_are_all_jobs_of_the_workload():
    recording = Recording.read("zoo:pollux-arrivals")
    assert (recording.counts.sum(), recording.seconds) == (1092, 8 * 3600)


def test_a_loader_takes_a_name():
    loader = vbs.Schedule("zoo:nanogpt-speedrun", dataset_size=10_000, minibatch_size=64, num_replicas=1)
    assert loader.batch_size(705) == 128


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zoo:gpt3", r"`name` must be one of .* got 'gpt3' \(did you mean 'gpt-3'\?\)"),
        ("zoo:gpt-3:32", "only after the name of a recording, got 'zoo:gpt-3:32'"),
        ("zoo:bamboo-p2:0", "a positive integer, only after the name of a recording, got 'zoo:bamboo-p2:0'"),
        ("zoo:../trace", "`name` must be one of"),
    ],
)
def test_a_wrong_name_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        Trace.of(name)


def test_batch_sizes_that_do_not_fit_name_the_entry():
    with pytest.raises(ValueError, match=r"zoo:bamboo-p2:2: batchsize must be a multiple of 32"):
        vbs.Schedule("zoo:bamboo-p2", dataset_size=10_000, minibatch_size=32, num_replicas=1)
    with pytest.raises(ValueError, match=r"zoo:gpt-3: step 0: batchsize must be a multiple of 32"):
        vbs.Schedule("zoo:gpt-3", dataset_size=10_000_000, minibatch_size=32, num_replicas=1)
