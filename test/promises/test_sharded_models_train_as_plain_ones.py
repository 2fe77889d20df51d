"""Promise: the weights do not depend on the sharding of the model: fully_shard, hybrid, tensor parallel, DDP, ZeRO."""

import pytest
import sharded_models
import torch
from sharded_models import Normed, Transformer

import variable_batch_size as vbs

# number of processes, sharding, model, runs
CASES = [
    *((4, "sharded", Transformer, name) for name in ("weighted",)),
    *((4, "hybrid", Transformer, name) for name in ("adascale", "nan")),
    *((4, "sharded_and_split", Transformer, name) for name in ("weighted",)),
    *((4, "wrapped", Transformer, name) for name in ("adascale",)),
    *((3, "sharded", Transformer, name) for name in ("adascale",)),
    *((3, "sharded", Normed, name) for name in ("adascale", "nan")),
    *((3, "wrapped", Normed, name) for name in ("adascale", "nan")),
    *((2, "sharded", Transformer, name) for name in ["linear", "root", "linear-momentum", "adam", "scaled"]),
    *((2, "sharded", Normed, name) for name in ("linear-momentum",)),
    *((2, "sharded_recomputed", Transformer, name) for name in ("adascale",)),
    *((2, "sharded_compiled", Normed, name) for name in ("adascale",)),  # quicker to compile than a Transformer
    *((2, "sharded_offloaded", Transformer, name) for name in ("weighted",)),
    *((2, "sharded_otherwise", Transformer, name) for name in ("linear",)),
    *((2, "sharded_narrow", Transformer, name) for name in ("adascale",)),
    *((3, "in_lockstep", Normed, name) for name in ("adascale", "nan", "weighted")),
    *((2, "wrapped", Transformer, name) for name in ("adam",)),
    *((2, "plain", Transformer, name) for name in ("zero",)),
]
# further pairs of the same ways, models and runs; pairs of processes with tensor parallelism also have tests in
# test_consistency_process_group.py
LONG = [
    *((4, "sharded", Transformer, name) for name in ("adascale", "nan")),
    *((4, "sharded_and_split", Transformer, name) for name in ("root",)),
    *((4, "plain", Transformer, name) for name in ("zero",)),
    *((3, "sharded", Transformer, name) for name in ("adam",)),
    *((2, "sharded", Transformer, name) for name in ("adascale", "nan")),
    *((2, "sharded", Normed, name) for name in ("weighted",)),
    *((2, "sharded_compiled", Transformer, name) for name in ("adascale",)),
    *((2, "split", Transformer, name) for name in ("adascale",)),
]
ALL = [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)]


@pytest.fixture(scope="module")
def found(on_cores):
    """All runs on a number of processes, one after another; those of the long form by themselves."""
    results = {}

    def run(cores, cases=CASES):
        key = cores, cases is LONG
        if key not in results:
            results[key] = on_cores(cores, sharded_models.all_of, [case[1:] for case in cases if case[0] == cores])
        return results[key]

    return run


@pytest.fixture(scope="module")
def expected():
    results = {}

    def run(kind, name):
        if (kind, name) not in results:
            results[kind, name] = sharded_models.train(sharded_models.plain, kind, name)
        return results[kind, name]

    return run


@pytest.mark.parametrize(("cores", "way", "kind", "name"), ALL)
def test_weights_norms_and_noise_are_those_of_one_plain_process(found, expected, cores, way, kind, name):
    is_narrow = way == "sharded_narrow"  # bfloat16 has 8 significant bits
    plain = expected(kind, name)
    for core in found(cores, LONG if (cores, way, kind, name) in LONG else CASES):
        result = core[way, kind.__name__, name]
        assert not isinstance(result, str), result
        for key, value in plain["state"].items():
            if "running" not in key and "tracked" not in key:  # local to each core
                tolerance = 1e-2 if is_narrow else 1e-5
                torch.testing.assert_close(result["state"][key], value, rtol=0, atol=tolerance, msg=key)
        assert result["updates"] == plain["updates"]
        for numbers, rtol in (("norms", 1e-4), ("noise", 1e-4)):
            values = [torch.tensor(one[numbers]) for one in (result, plain)]
            torch.testing.assert_close(
                *values, rtol=0.05 if is_narrow else rtol, atol=0.1 if is_narrow else 1e-6, equal_nan=True
            )


def test_only_non_finite_steps_are_skipped(expected):
    assert expected(Transformer, "nan")["updates"] == [True, True, False, True]


def test_batch_statistics_exclude_padding_minibatches(found):
    """On core 0, which never has padding, and on the others: statistics cover only their own minibatches."""
    for cores, way, kind in ((3, "sharded", Normed), (3, "wrapped", Normed), (3, "in_lockstep", Normed)):
        tracked = [int(core[way, kind.__name__, "nan"]["state"]["norm.num_batches_tracked"]) for core in found(cores)]
        schedule = vbs.Schedule(
            vbs.Trace.of(sharded_models.SIZES),
            dataset_size=sharded_models.NUM_SAMPLES,
            minibatch_size=4,
            num_replicas=cores,
        )
        steps = [step for step in range(len(sharded_models.SIZES)) if step != sharded_models.NAN_STEP]
        assert tracked == [sum(len(schedule.minibatches(step, rank)) for step in steps) for rank in range(cores)]
