"""Promise: random programs with two optimizers give the weights of a plain loop, on any number of cores.

Copies of models, rules and policies that are used again, evaluations, hooks and resumes have no effect on it.
``tools/random_programs.py`` runs more programs.
"""

import pytest
import torch
import two_optimizer_programs as programs
import two_optimizers_by_hand as by_hand

DRAWN = [programs.draw(seed) for seed in range(47, 75)]  # they cover what is drawn
# on each number of cores: a policy, exact mode, weights and BatchNorm
ON_CORES = [(2, [47, 53, 57, 66, 74]), (3, [50, 60, 63, 69, 70])]
ON_CORES = [(cores, [program for program in DRAWN if program.seed in seeds]) for cores, seeds in ON_CORES]
ON_CORES += [pytest.param(cores, DRAWN, marks=pytest.mark.long) for cores in (2, 3)]


@pytest.fixture(scope="module")
def alone():
    """The results of each program in one process."""
    return {program.seed: programs.run(program) for program in DRAWN}


@pytest.mark.parametrize("program", DRAWN, ids=lambda program: str(program.seed))
def test_weights_are_those_by_hand(alone, program):
    assert by_hand.first_difference(program, by_hand.run(program), alone[program.seed], 0) is None


@pytest.mark.parametrize(("cores", "drawn"), ON_CORES, ids=lambda value: str(value) if isinstance(value, int) else "")
def test_weights_are_those_by_hand_on_several_cores(on_cores, alone, cores, drawn):
    expected = [by_hand.run(program, cores) if program.batch_norm else None for program in drawn]
    for rank, results in enumerate(on_cores(cores, programs.run_all, drawn)):
        for program, right, found in zip(drawn, expected, results, strict=True):
            right = alone_as_expected(alone[program.seed], cores) if right is None else right
            assert by_hand.first_difference(program, right, found, rank) is None, program
            if program.is_exact:
                pairs = zip(found, alone[program.seed], strict=True)
                assert all(torch.equal(own["weights"], one["weights"]) for own, one in pairs), program


def alone_as_expected(results, cores):
    """The results of one process, which were compared with those by hand; without BatchNorm there are no buffers."""
    return [{**result, "buffers": [result["buffers"]] * cores} for result in results]


def test_programs_on_several_cores_cover_what_cores_must_agree_on():
    for _, drawn in ON_CORES[:2]:
        assert {program.is_exact for program in drawn} == {True, False}
        for name in ("policy", "is_weighted", "dropout", "batch_norm", "second", "teacher", "uses_loader"):
            assert any(getattr(program, name) for program in drawn), name


def test_programs_cover_what_users_do():
    names = ("losses", "shares_sampler", "style", "policy", "shares_rule", "is_weighted", "is_exact", "is_seeded")
    names += ("dropout", "batch_norm", "teacher", "teacher_trains", "is_new", "second", "keeps_first", "uses_loader")
    for name in names:
        values = {getattr(program, name) for program in map(programs.draw, range(400))}
        assert {getattr(program, name) for program in DRAWN} == values, name
    sides = [side for program in DRAWN for side in program.sides]
    assert {side.rule for side in sides} == programs.RULES.keys()
    assert {side.inner for side in sides} == {"sgd", "adam", "adamw", "both"}
    assert {side.schedule for side in sides} == {None, "inner hook", "wrapper", "samples"}
    assert {hook for side in sides for hook in side.hooks} == {"inner pre", "wrapper pre", "state", "scale", "clamp"}
    assert {event for program in DRAWN for event in program.events.values()} == {*programs.EVENTS}
    assert {min(program.teacher_from, 0) for program in DRAWN} == {-2, -1, 0}
