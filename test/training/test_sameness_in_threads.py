"""What cores tell each other before they begin, word by word."""

import pytest
import torch
from threaded_cores import run_on

from variable_batch_size.cores.communicator import SingleProcess
from variable_batch_size.optim.consistency import Comparison, check_same_on_all_ranks

CPU = torch.device("cpu")


def messages(*facts_of_cores):
    def run(core):
        with pytest.raises(ValueError) as raised:
            Comparison(facts_of_cores[core.rank], core, CPU).refuse_different()
        return str(raised.value)

    return run_on(len(facts_of_cores), run)


def test_every_core_says_in_what_they_differ_and_who_has_what():
    found = messages({"seed": 1, "rule": "linear"}, {"seed": 1, "rule": "root"}, {"seed": 1, "rule": "linear"})
    expected = (
        "ranks must have the same settings, but differ in rule: linear on rank 0, root on rank 1, linear on rank 2"
    )
    assert found == [expected] * 3


def test_the_first_difference_is_told_and_the_others_are_named():
    found = messages({"a": 1, "b": 2, "c": 3, "d": 4}, {"a": 1, "b": 7, "c": 8, "d": 9})
    assert found == ["ranks must have the same settings, but differ in b (and in c, d): 2 on rank 0, 7 on rank 1"] * 2


def test_a_long_text_is_cut_after_120_bytes_and_a_letter_cut_in_two_is_marked():
    found = messages({"settings": "é" * 59 + "xéy"}, {"settings": "short"})
    told = "é" * 59 + "x\N{REPLACEMENT CHARACTER}"
    assert found[0].endswith(f"differ in settings: {told} on rank 0, short on rank 1")


@pytest.mark.parametrize(("one", "other"), [(1, "1"), (True, 1), (0.1, 0.1 + 1e-16)])
def test_what_is_written_alike_is_the_same_only_if_it_is_of_one_kind(one, other):
    assert len(messages({"value": one}, {"value": other})) == 2


def test_cores_that_are_set_up_alike_begin():
    facts = {"seed": 3, "settings": "x" * 500, "clip": None}
    assert run_on(3, lambda core: Comparison(facts, core, CPU).refuse_different()) == [None] * 3


def test_differences_that_add_up_to_nothing_are_seen():
    # with three cores, and digests that are far from each other
    assert len(messages({"value": 1}, {"value": 2}, {"value": 3})) == 3


@pytest.mark.parametrize("is_one_program", [False, True])
def test_all_tensors_are_those_of_core_0(is_one_program):
    def run(core):
        first, second = torch.full((2,), core.rank + 1.0), torch.tensor(core.rank == 0)
        check_same_on_all_ranks({"seed": 1}, [first, second, first], core)()
        return first.tolist(), second.item()

    assert run_on(2, run, is_one_program=is_one_program) == [([1.0, 1.0], True)] * 2


@pytest.mark.parametrize("is_one_program", [False, True])
def test_cores_that_differ_do_not_begin(is_one_program):
    def run(core):
        with pytest.raises(ValueError, match=r"^ranks must have the same settings, but differ in seed: 0 on rank 0, 1"):
            check_same_on_all_ranks({"seed": core.rank}, [torch.zeros(1)], core)()

    run_on(2, run, is_one_program=is_one_program)


def test_a_core_alone_is_like_itself():
    tensor = torch.ones(1)
    check_same_on_all_ranks({"seed": 1}, [tensor], SingleProcess())()
    assert tensor.item() == 1
