"""Golden records: equal for the same code, and if a number changes, the comparison says which one changed first."""

import contextlib
import io
import json
from pathlib import Path
from unittest.mock import patch

import forked

import variable_batch_size as vbs


def step(number, **values):
    """A step of a record: 8 samples each, in one epoch."""
    made = {"optimizer": 0, "at": [0, number, number, 8 * number], "batch_size": 8, "lr": [0.1], "weights": "a"}
    return {**made, **values}


def run(rank=0, cores="2", scenario="some run", steps=None, **of_run):
    begin = {"optimizer": 0, "at": [0, 0, 0, 0], "weights": "0"}
    record = {"scenario": scenario, "cores": cores, "rank": rank}
    return {**record, "steps": [begin, *(steps or [step(1), step(2)])], "run": {"waits": 3, **of_run}}


def compared(folder, old, new, *, places=("2",), new_places=None, **how):
    """What comparing two records prints, and the number of runs that differ."""
    return forked_result(folder, _compare, old, new, list(places), list(new_places or places), how)


def forked_result(folder, function, *args):
    """Golden records count what tensors do, so they are imported in another process only."""
    done = forked.run(_report, function, args, folder=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _report(function, args):
    print(json.dumps(function(*args)))


def _compare(old, new, old_places, new_places, how):
    import golden

    for name, runs, places in (("old", old, old_places), ("new", new, new_places)):
        header = {"cores": places, "only": "*", "is_fast": False}
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, [header, *runs])) + "\n")
    allowed = how.pop("allowed", ())
    with contextlib.redirect_stdout(io.StringIO()) as output, patch.object(golden, "ALLOWED", allowed):
        number = golden.compare(Path("old.jsonl"), Path("new.jsonl"), **how)
    return output.getvalue().splitlines(), number


def test_first_difference_is_that_of_the_first_step_on_any_rank(tmp_path):
    old = [run(rank=0), run(rank=1)]
    later = [step(1), step(2, lr=[0.2], weights="c")]
    new = [run(rank=0, steps=later), run(rank=1, steps=[step(1, lr=[0.1], weights="b"), step(2)], waits=4)]
    lines, number = compared(tmp_path, old, new)
    where = "rank 1, step 1 (optimizer 0, epoch 0, 1 steps of it and 1 in all, batch size 8)"
    assert lines == [
        f'some run on 2: {where}: weights was "a", is "b"; 3 other differences, in 2 steps up to step 2',
        "1 runs: 1 differ; 0 allowed differences",
    ]
    assert number == 1


def test_first_difference_within_a_step_is_the_number_computed_first(tmp_path):
    lines, _ = compared(tmp_path, [run()], [run(steps=[step(1), step(2, weights="b", lr=[0.3])])])
    assert "step 2 (optimizer 0, epoch 0, 2 steps of it and 2 in all, batch size 8): lr[0] was 0.1, is 0.3" in lines[0]


def test_missing_runs_failed_runs_and_other_numbers_of_steps_are_differences(tmp_path):
    old = [run(), run(scenario="another"), run(scenario="third")]
    new = [run(steps=[step(1)]), {"scenario": "third", "cores": "2", "rank": 0, "error": "Traceback"}]
    lines, number = compared(tmp_path, old, new)
    assert lines[0] == 'another on 2: rank 0, the run:  was "there", is "missing"'
    assert "step 2" in lines[1] and 'is "missing"' in lines[1]
    assert lines[2].startswith('third on 2: rank 0, the run: error was null, is "Traceback"')
    assert number == 3


def test_nan_is_equal_to_nan_and_other_bits_are_different(tmp_path):
    not_a_number = [step(1, lr=[float("nan")]), step(2)]
    assert compared(tmp_path, [run(steps=not_a_number)], [run(steps=not_a_number)])[1] == 0
    last_bit = [step(1, lr=[0.1 + 2**-56]), step(2)]
    assert compared(tmp_path, [run()], [run(steps=last_bit)])[1] == 1


def test_allowed_and_ignored_paths_are_no_differences(tmp_path):
    old, new = [run()], [run(waits=9)]
    assert compared(tmp_path, old, new, allowed=[("some run*", "run.waits", "saved")])[1] == 0
    assert compared(tmp_path, old, new, allowed=[("other run*", "run.waits", "saved")])[1] == 1
    assert compared(tmp_path, old, new, ignored=["*.waits"])[1] == 0


def test_only_what_both_records_contain_is_compared(tmp_path):
    old = [run(), run(cores="3"), run(scenario="resumed"), run(scenario="resumed", cores="3")]
    new = [run(), run(scenario="resumed", steps=[step(1, lr=[9.0])])]  # resumed from another number of cores
    lines, number = compared(tmp_path, old, new, places=("2", "3"), new_places=("2",))
    assert lines == ["1 runs: 0 differ; 0 allowed differences"]
    assert number == 0


def _record_three_times(only):
    """Two records of the library, and one of a library whose linear rule is wrong in the last bit."""
    import golden

    found, factor = [], vbs.rules.LinearRule.factor
    for name in ("first", "second", "wrong"):
        wrong = patch.object(vbs.rules.LinearRule, "factor", lambda self, step: factor(self, step) * (1 + 2**-52))
        with contextlib.nullcontext() if name != "wrong" else wrong:
            found.append(golden.record(Path(f"{name}.jsonl"), ["0"], only, is_fast=True))
    for name in ("second", "wrong"):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            found.append([golden.compare(Path("first.jsonl"), Path(f"{name}.jsonl")), output.getvalue().splitlines()])
    return found


def test_two_records_of_the_same_code_are_equal_and_a_changed_bit_is_found(tmp_path):
    first, second, wrong, equal, different = forked_result(tmp_path, _record_three_times, "two optimizers*")
    assert [first, second, wrong] == [0, 0, 0]  # no run has failed
    number_equal, lines = equal
    assert number_equal == 0
    assert not lines[-1].startswith("0 runs")
    number_different, lines = different
    assert number_different > 0
    # the first step has 12 samples of 8, so that the factor is 1.5
    (line,) = (line for line in lines if line.startswith("two optimizers on 0: "))
    assert (
        "rank 0, step 2 (optimizer 0, epoch 0, 1 steps of it and 1 in all, batch size 12): minibatches[0].lr was"
        in line
    )


def _unreached():
    """Fast runs that are not there, and fast runs that do not do what their name says."""
    import golden
    import golden_scenarios
    from golden_recorder import Recorder, keep_messages

    keep_messages()
    missing = [name for name in golden_scenarios.FAST if not golden_scenarios.SCENARIOS[name].is_made_at("0")]
    found = {}
    for name in ("nan skipped", "scaler", "open steps, nan", "limit of samples", "sessions"):
        made = golden_scenarios.run(name, Recorder(golden._folder(Path(), name), golden.torch.device("cpu")))
        found[name] = made
    steps = {name: made["steps"] for name, made in found.items()}
    return {
        "missing": missing,
        "skipped": [steps[name][-1]["steps_skipped"] for name in ("nan skipped", "scaler", "open steps, nan")],
        "ends": [at[4:6] for what, at in found["limit of samples"]["run"]["notes"] if what == "end"],
        "exit codes": [code for what, code in found["sessions"]["run"]["notes"] if what == "exit code"],
    }


def test_runs_do_what_their_names_say(tmp_path):
    found = forked_result(tmp_path, _unreached)
    assert found["missing"] == []
    assert found["skipped"] == [1, 1, 1]
    # 12 + 4 + 16 + 8 + 28 samples are the first sum from 50 on, and with 4 + 20 from 90 on; to the end 12 + 4 are left
    assert found["ends"] == [[5, 68], [7, 92], [9, 108]]
    assert found["exit codes"] == [vbs.EXIT_STOPPED]
