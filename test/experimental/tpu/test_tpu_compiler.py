"""Every program of the promises compiles for TPUs, with the collectives and donated buffers that it should have."""

import json
import os
from pathlib import Path

import pytest
import tpu_programs

from variable_batch_size.experimental.tpu.tpu import CHIPS, compile_programs, parse_topology
from variable_batch_size.lab.command.main import main

pytestmark = pytest.mark.tpu_compiler

PYTHON = str(Path(__file__).parents[3] / ".venv-tpu" / "bin" / "python")
TOPOLOGIES = os.environ.get("TPU_TOPOLOGIES", "v5e:2x2 v6e:2x2").split()

# For each training, the all-reduces of its programs, and how many buffers each of them donates. Programs that an
# earlier training has compiled are not compiled again. Before its first minibatch, a run has a program for what the
# script has traced, such as BatchNorm's counters, and one with two all-reduces: hashes of the settings are integers,
# weights of rank 0 are floats, and an all-reduce sums one type. After that a step has one, and the first of an epoch
# another one, for which parameters have a gradient, unless the host reads each step; accumulating has none. A record of
# a log has one, of 64-bit floats with weights, which the compiler makes all-gathers.
# No buffers are donated where a program only reads: which parameters have a gradient, the numbers of a step, the total
# weight; and in exact mode in that of the minibatch itself, which is apart from its addition. Where the host reads
# between them, the reduction and the update are two programs, which both donate the sums.
EXPECTED = {
    "linear": ([0, 2, 0, 1, 1, 1], [0, 12, 11, 0, 20, 26]),
    "clipped": ([1, 1], [20, 26]),
    "linear momentum": ([], []),
    "adascale": ([2, 0, 1, 0, 1], [12, 12, 9, 15, 26]),
    "adamscale": ([2, 0, 1, 0, 0], [12, 12, 9, 15, 27]),
    "adam": ([1, 1], [20, 32]),
    "weighted linear": ([2, 0, 0, 1, 0, 1, 0, 0, 0, 0], [6, 6, 6, 6, 11, 6, 16, 0, 0, 1]),
    "weighted adascale": ([2, 0, 0, 1, 1, 0, 1], [6, 7, 7, 0, 19, 7, 19]),
    "gpt": ([2, 0, 1, 0, 0], [31, 31, 31, 61, 121]),
    "exact adascale": ([2, 0, 0, 1, 0, 1, 0, 0, 0], [5, 0, 0, 1, 18, 19, 0, 4, 8]),
    "exact weighted": ([2, 0, 0, 0, 1, 0, 0, 0], [5, 0, 0, 18, 19, 0, 5, 13]),
}


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dumps")
    one, all_devices = directory / "one", directory / "all"
    return tpu_programs.dumped(one, cores=4), tpu_programs.dumped(all_devices, cores=4, spmd=True)


@pytest.fixture(scope="module", params=TOPOLOGIES)
def compiled(request, dumps, tmp_path_factory):
    """For each training its compiled programs."""
    found, cache = {}, tmp_path_factory.mktemp("cache")
    for trainings, is_spmd in zip(dumps, (False, True), strict=True):
        files = [file for programs in trainings.values() for file in programs]
        programs = compile_programs(files, request.param, python=PYTHON, cache=cache, is_spmd=is_spmd)
        assert programs.problems == []
        assert programs.devices == parse_topology(request.param)[1]
        rest = iter(programs.programs)
        found |= {name: [next(rest) for _ in own] for name, own in trainings.items()}
    return found


def test_every_training_compiles_without_transfers_to_the_host(compiled):
    assert set(compiled) == {*tpu_programs.REPLICATED, *tpu_programs.SHARDED}
    assert sum(map(len, compiled.values())) > 60
    assert [program for programs in compiled.values() for program in programs if program.host_transfers] == []


@pytest.mark.parametrize("name", EXPECTED)
def test_a_step_has_one_all_reduce_and_donates_its_buffers(compiled, name):
    programs = compiled[name]
    all_reduces, donated = EXPECTED[name]
    assert [program.count("all-reduce") for program in programs] == all_reduces
    assert [program.donated for program in programs] == donated
    others = {kind for program in programs for kind, _ in program.collectives} - {"all-reduce"}
    assert others == ({"all-gather"} if name == "weighted linear" else set())


def test_the_second_all_reduce_at_the_start_has_the_hashes_of_the_settings(compiled):
    starts = [program for name in EXPECTED for program in compiled[name] if program.count("all-reduce") == 2]
    sizes = {program.collectives[0][1] for program in starts}
    # 12 bytes for each setting, of which a rule that measures has one more; and as many for BatchNorm's counter
    settings = min(sizes)
    assert sizes == {settings, settings + 12, settings + 24}
    assert settings % 12 == 0
    assert 20 < settings // 12 < 50


def test_no_tensor_has_64_bit_floats_except_for_the_total_weight_of_an_epoch(compiled):
    doubles = {name: [program for program in programs if program.doubles] for name, programs in compiled.items()}
    assert {name for name, programs in doubles.items() if programs} == {"weighted linear"}
    (program,) = doubles["weighted linear"]  # three numbers; the compiler gathers pairs of floats to sum them
    assert program.collectives == [["all-gather", 48], ["all-gather", 48]]


@pytest.mark.parametrize("name", tpu_programs.SHARDED)
def test_sharded_programs_donate_their_buffers_and_communicate(compiled, name):
    assert all(program.donated and program.collectives for program in compiled[name])


# ------------------------------------------------------------------------------------------------------------- command

SCRIPT = """
import torch, torch_xla
import variable_batch_size as vbs

def train(size=8):
    model = torch.nn.Linear(6, 3).to(torch_xla.device())
    sampler = vbs.CustomSampler(dataset_size=1_000_000, trace=[4 * size, size, 6 * size] * 5, minibatch_size=size)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=size, model=model)
    for indices in sampler:
        model(torch.ones(len(indices), 6).to(torch_xla.device())).square().mean().backward()
        optimizer.step()

def on_the_host():
    torch.nn.Linear(6, 3)(torch.ones(2, 6)).sum().backward()

def broken():
    raise KeyError("no such layer")
"""


@pytest.fixture
def command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(SCRIPT)

    def run(function, *options):
        arguments = ["tpu", f"script.py:{function}", "--topology", "v5e:2x2", "--python", PYTHON, "--cache", "cache"]
        status = main([*arguments, *options])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def test_command_prints_a_table_and_writes_a_page_from_a_cache_the_second_time(command):
    status, out, _ = command("train", "--out", "page.html")
    assert not status, out
    assert "programs for v5e:2x2, 4 devices with 16 GiB each" in out
    assert "all compile and fit" in out
    assert "Programs on v5e:2x2" in Path("page.html").read_text()
    times = {path: path.stat().st_mtime_ns for path in Path("cache").iterdir()}
    assert command("train")[1] == out
    assert {path: path.stat().st_mtime_ns for path in Path("cache").iterdir()} == times


def test_command_refuses_what_does_not_fit_and_finds_the_largest_minibatch(command, monkeypatch):
    _, out, _ = command("train", "--minibatch-size", "8", "--json")
    needed = max(program["needed"] for program in json.loads(out)["programs"])
    monkeypatch.setitem(CHIPS, "v5e", CHIPS["v5e"]._replace(memory=needed + 60_000))
    status, out, err = command("train", "--minibatch-size", "512", "--largest-minibatch", "4096")
    assert "minibatches of 4096: program" in err
    assert "the largest minibatch that fits: " in out
    status, out, err = command("train", "--minibatch-size", "4096")
    assert status
    assert "GiB more than the" in err


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("missing", "script.py has no function 'missing'"),
        ("broken", "no such layer"),
        ("on_the_host", "compiled no program: it must train on torch_xla.device()"),
    ],
)
def test_command_explains_what_is_wrong_with_a_script(command, function, message):
    status, _, err = command(function)
    assert status
    assert message in err


def test_command_refuses_a_mesh_that_libtpu_does_not_know_before_it_trains(command):
    status, _, err = command("train", "--topology", "v5e:3x5")
    assert status
    assert "libtpu does not support the topology 'v5e:3x5'" in err
