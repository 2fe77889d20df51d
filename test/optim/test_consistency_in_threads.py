"""The comparison of settings between cores at the start, and its exact error messages."""

import pytest
import torch
from threaded_cores import run_on

from variable_batch_size.cores.communicator import SingleProcess
from variable_batch_size.optim.consistency import check_same_on_all_ranks, compare_ranks

CPU = torch.device("cpu")


def messages(*facts_of_cores):
    def run(core):
        with pytest.raises(ValueError) as raised:
            compare_ranks(facts_of_cores[core.rank], core, CPU)()
        return str(raised.value)

    return run_on(len(facts_of_cores), run)


def test_every_core_names_the_difference_and_the_values():
    found = messages({"seed": 1, "rule": "linear"}, {"seed": 1, "rule": "root"}, {"seed": 1, "rule": "linear"})
    expected = (
        "ranks must have the same settings, but differ in rule: linear on rank 0, root on rank 1, linear on rank 2"
    )
    assert found == [expected] * 3


def test_first_difference_is_shown_and_the_others_are_named():
    found = messages({"a": 1, "b": 2, "c": 3, "d": 4}, {"a": 1, "b": 7, "c": 8, "d": 9})
    assert found == ["ranks must have the same settings, but differ in b (and in c, d): 2 on rank 0, 7 on rank 1"] * 2


def test_long_text_is_truncated_after_120_bytes_at_any_character():
    found = messages({"settings": "é" * 59 + "xéy"}, {"settings": "short"})
    told = "é" * 59 + "x\N{REPLACEMENT CHARACTER}"
    assert found[0].endswith(f"differ in settings: {told} on rank 0, short on rank 1")


@pytest.mark.parametrize(("one", "other"), [(1, "1"), (True, 1), (0.1, 0.1 + 1e-16)])
def test_equal_texts_of_different_types_differ(one, other):
    assert len(messages({"value": one}, {"value": other})) == 2


def test_cores_with_equal_settings_start():
    facts = {"seed": 3, "settings": "x" * 500, "clip": None}
    assert run_on(3, lambda core: compare_ranks(facts, core, CPU)()) == [None] * 3


def test_differences_that_cancel_are_detected():
    # with three cores, and digests that differ widely
    assert len(messages({"value": 1}, {"value": 2}, {"value": 3})) == 3


@pytest.mark.parametrize("is_one_program", [False, True])
def test_all_tensors_are_broadcast_from_core_0(is_one_program):
    def run(core):
        first, second = torch.full((2,), core.rank + 1.0), torch.tensor(core.rank == 0)
        check_same_on_all_ranks({"seed": 1}, [first, second, first], core)()
        return first.tolist(), second.item()

    assert run_on(2, run, is_one_program=is_one_program) == [([1.0, 1.0], True)] * 2


@pytest.mark.parametrize("is_one_program", [False, True])
def test_cores_with_different_settings_do_not_start(is_one_program):
    def run(core):
        with pytest.raises(ValueError, match=r"^ranks must have the same settings, but differ in seed: 0 on rank 0, 1"):
            check_same_on_all_ranks({"seed": core.rank}, [torch.zeros(1)], core)()

    run_on(2, run, is_one_program=is_one_program)


def test_single_core_always_starts():
    tensor = torch.ones(1)
    check_same_on_all_ranks({"seed": 1}, [tensor], SingleProcess())()
    assert tensor.item() == 1
