"""The output of the TPU compiler: read, summed up and cached, without the compiler."""

import configparser
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from variable_batch_size.experimental.tpu import tpu_compiler
from variable_batch_size.experimental.tpu.report import programs_summary, programs_table
from variable_batch_size.experimental.tpu.tpu import (
    CHIPS,
    GIB,
    Chip,
    Program,
    Programs,
    compile_programs,
    largest_that_fits,
    parse_topology,
)
from variable_batch_size.lab.planning.reports import table_page

ROOT = Path(__file__).parents[3]
HLO = """\
HloModule SyncTensorsGraph.185, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %add.1 = f32[] add(%x, %y)
}

ENTRY %main (p0: f32[16,10]) -> (f32[16,10], f32[3]) {
  %p0 = f32[16,10]{1,0:T(8,128)} parameter(0), sharding={replicated}
  %all-reduce.1 = (f32[16,10]{1,0:T(8,128)}, bf16[3]{0}) all-reduce(%p0, %c), replica_groups={{0,1,2,3}}, to_apply=%add
  %all-gather-start = (s32[2]{0}, s32[8]{0}) all-gather-start(%i), dimensions={0}
  %all-gather-done = s32[8]{0} all-gather-done(%all-gather-start)
  ROOT %tuple = (f32[16,10]{1,0}, bf16[3]{0}) tuple(%all-reduce.1)
}
"""


def test_collectives_are_counted_once_with_the_bytes_of_their_results():
    assert tpu_compiler.collectives_in(HLO) == [
        ("all-reduce", 16 * 10 * 4 + 3 * 2),
        ("all-gather", 8 * 4),
    ]
    assert tpu_compiler.host_transfers_in(HLO) == 0


@pytest.mark.parametrize(
    "line",
    [
        "  %infeed = ((f32[4]{0}), token[]) infeed(%token)",
        "  %send.1 = (f32[4]{0}, u32[], token[]) send(%x, %token), channel_id=1, is_host_transfer=true",
        '  %custom-call = f32[4]{0} custom-call(%x), custom_call_target="MoveToHost"',
    ],
)
def test_transfers_from_and_to_the_host_are_counted(line):
    assert tpu_compiler.host_transfers_in(HLO.replace("  ROOT %tuple", f"{line}\n  ROOT %tuple")) == 1


def test_operations_on_tensors_of_64_bit_floats_are_counted():
    text = "%0 = stablehlo.add %a, %b : tensor<3x4xf64>\n%1 = stablehlo.constant dense<1.0> : tensor<f64>\n"
    text += "%2 = stablehlo.add %c, %d : tensor<1x1xf64>\n%3 = stablehlo.add %e, %f : tensor<1x10xf64>\n"
    assert tpu_compiler.doubles_in(text + "func @main(%a: tensor<3xf64>)\n") == 2


def field(number, value):
    """A field of a protocol buffer: a number, or bytes."""
    if isinstance(value, int):
        return bytes([number * 8, value])
    length = len(value)
    return varint(number * 8 + 2) + varint(length) + value


def varint(number):
    parts = []
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


def test_donated_parameters_are_read_from_a_dump():
    # entries of buffer_donor: the first parameter, whose number 0 is not written, and the third
    donors = field(1, b"") + field(1, field(1, 2))
    module = field(1, b"SyncTensorsGraph") + field(5, 7) + field(18, donors) + field(2, bytes(300))
    assert tpu_compiler.module_of(field(3, b"buffers") + field(1, module)) == module
    assert tpu_compiler.donated_of(module) == [0, 2]


def test_dumps_are_in_the_order_of_their_numbers(tmp_path):
    for name in ("module_0010.A.3", "module_0009.B.20", "module_0002.C.1"):
        (tmp_path / f"{name}.before_optimizations.hlo.pb").touch()
        (tmp_path / f"{name}.cpu_after_optimizations.hlo.pb").touch()
    names = [path.name.split(".")[1] for path in tpu_compiler.dumped_in(tmp_path)]
    assert names == ["C", "B", "A"]


def test_a_record_is_made_once_for_each_program_topology_and_version(tmp_path):
    made = []

    def make():
        made.append(None)
        return {"flops": float(len(made))}

    parts = ("program", "v5e:2x2", "0.10.2")
    assert tpu_compiler.cached(tmp_path / "cache", parts, make) == {"flops": 1.0, "is_cached": False}
    assert tpu_compiler.cached(tmp_path / "cache", parts, make) == {"flops": 1.0, "is_cached": True}
    for other in (("another", *parts[1:]), ("program", "v6e:2x2", "0.10.2"), (*parts[:2], "0.10.3")):
        assert not tpu_compiler.cached(tmp_path / "cache", other, make)["is_cached"]
    assert len(made) == 4
    assert all(path.suffix == ".json" for path in (tmp_path / "cache").iterdir())


def test_the_extra_has_the_versions_of_the_compiler():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert tuple(setup["options.extras_require"]["tpu"].split()) == tpu_compiler.PACKAGES


# ------------------------------------------------------------------------------------------------------------ programs

RECORD = {
    "name": "module_0002.SyncTensorsGraph.185",
    "memory": 5 * GIB,
    "arguments": 2 * GIB,
    "flops": 394e9,
    "bytes_accessed": 819e6,
    "collectives": [["all-reduce", 100_000_000], ["all-gather", 2048]],
    "host_transfers": 0,
    "donated": 3,
    "doubles": 0,
    "seconds_compiling": 1.5,
    "is_cached": False,
}
FAILED = {"name": "a", "seconds_compiling": 1.0, "donated": 0, "doubles": 0, "is_cached": True}


def found(*records, topology="v5e:2x4"):
    return Programs(topology, 8, {"jax": "0.10.2", "libtpu": "0.0.51"}, [Program(**record) for record in records])


def test_memory_of_a_program_counts_a_donated_buffer_once():
    sizes = {"argument": 2, "output": 1, "temp": 3, "alias": 1, "generated_code": 0}
    memory = {f"{name}_size_in_bytes": size for name, size in sizes.items()}

    def record(peak):
        stats = SimpleNamespace(peak_memory_in_bytes=peak, **memory)
        module = SimpleNamespace(to_string=lambda: HLO)
        return tpu_compiler.record_of(
            SimpleNamespace(
                get_compiled_memory_stats=lambda: stats,
                cost_analysis=lambda: [{"flops": -1.0, "bytes accessed": 7.0}],
                hlo_modules=lambda: [module],
            )
        )

    assert (record(4)["memory"], record(6)["memory"]) == (5, 6)  # arguments and temporary memory
    assert (record(4)["flops"], record(4)["bytes_accessed"], record(4)["arguments"]) == (0.0, 7.0, 2)


def test_collectives_of_a_program_are_counted_by_kind():
    program = Program(**RECORD)
    assert [program.count(kind) for kind in ("all-reduce", "all-gather", "all-to-all")] == [1, 1, 0]


def test_arguments_of_other_programs_stay_in_memory_meanwhile():
    programs = found(RECORD, {**RECORD, "arguments": GIB // 2, "memory": GIB})
    assert [programs.needed(program) / GIB for program in programs.programs] == [5, 1 + 1.5]


def test_time_is_at_least_that_of_the_roofline_and_the_collectives():
    chip = Chip(GIB, flops=100.0, bandwidth=10.0, interconnect=4.0, source="")
    program = Program("", flops=300.0, bytes_accessed=20.0)
    assert program.seconds(chip, 8) == 3.0  # computing takes longer than 2 s of memory accesses
    assert Program("", flops=300.0, bytes_accessed=50.0).seconds(chip, 8) == 5.0
    # 8 bytes, sent twice except for an eighth: 14 bytes at 4 a second; gathered: 7 bytes
    assert Program("", collectives=(("all-reduce", 8),)).seconds(chip, 8) == 3.5
    assert Program("", collectives=(("all-gather", 8),)).seconds(chip, 8) == 1.75
    assert Program("", collectives=(("all-reduce", 8),)).seconds(chip, 1) == 0.0


def test_numbers_of_the_chips_are_those_of_the_documentation():
    assert {name: chip.memory // GIB for name, chip in CHIPS.items()} == {"v4": 32, "v5e": 16, "v5p": 95, "v6e": 32}
    assert [round(chip.interconnect / 1e9) for chip in CHIPS.values()] == [269, 200, 600, 400]


@pytest.mark.parametrize("text", ["v5e", "v5e:", "v5e:8", "v5e:2x0", "h100:2x4", "v5e:2x4x", ":2x4"])
def test_a_topology_is_a_chip_and_a_mesh(text):
    with pytest.raises(ValueError, match=f"a topology is one of v4, v5e, v5p, v6e with a mesh, .* got '{text}'"):
        parse_topology(text)


def test_a_program_that_does_not_fit_is_a_problem_with_the_missing_memory():
    large = {**RECORD, "memory": int(18.5 * GIB)}
    assert found(RECORD).problems == []
    (problem,) = found(large).problems
    assert problem == "program 1 does not fit: it needs 18.50 GiB, 2.50 GiB more than the 16 GiB of the chip"
    assert found(large, topology="v6e:2x4").problems == []


def test_an_error_of_the_compiler_is_a_problem():
    memory = "RESOURCE_EXHAUSTED: Used 18.22G of 15.75G hbm. Exceeded hbm capacity by 2.47G.\n\nTotal hbm usage"
    programs = found(RECORD, {**FAILED, "error": memory}, {**FAILED, "error": "UNIMPLEMENTED: F8\nmore"})
    assert programs.problems == [
        "program 2 does not fit: the compiler used 18.22 GiB of 15.75 GiB, 2.47 GiB more than there are",
        "program 3 does not compile: UNIMPLEMENTED: F8",
    ]
    assert json.loads(json.dumps(programs.as_dict()))["problems"] == programs.problems


def test_table_and_summary():
    programs = found({**RECORD, "doubles": 4}, {**RECORD, "collectives": [], "flops": 0.0})
    all_of = "1 all-reduce of 95.37 MiB, 1 all-gather of 2 KiB"
    assert programs_table(programs) == [
        ["program", "needs (GiB)", "donated", "GFLOP", "GB accessed", "collectives", "at least"],
        ["1", "5.000", "3", "394", "0.819", all_of, "2.88 ms"],
        ["2", "5.000", "3", "0", "0.819", "none", "1 ms"],
    ]
    assert programs_summary(programs).splitlines() == [
        "2 programs for v5e:2x4, 8 devices with 16 GiB each",
        "all compile and fit: at most 5.000 GiB, 31.2 % of a v5e",
        "64-bit floats, which TPUs emulate, in program 1",
    ]


def test_a_program_that_failed_has_no_numbers_in_the_table():
    failed = {**FAILED, "error": "no"}
    assert programs_table(found(RECORD, failed))[2] == ["2", *["–"] * 6]
    assert "program 2 does not compile: no" in programs_summary(found(RECORD, failed))


def test_page_has_the_table_the_facts_and_the_command():
    page = table_page("Programs", programs_table(found(RECORD)), facts={"chip": "16 GiB"}, command="vbs tpu <a>")
    assert "<title>Programs</title>" in page
    assert "<td>1 all-reduce of 95.37 MiB, 1 all-gather of 2 KiB</td>" in page
    assert "<td>chip</td><td>16 GiB</td>" in page
    assert "<pre>vbs tpu &lt;a&gt;</pre>" in page


# ----------------------------------------------------------------------------------------------------------- compiling


def test_missing_packages_are_named_with_the_way_to_install_them(tmp_path):
    empty = tmp_path / "python"
    empty.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without site-packages
    empty.chmod(0o755)
    message = r"needs jax==0.10.2 and libtpu==0.0.51, which .*python does not have: python -m venv .venv-tpu && "
    with pytest.raises(
        ValueError, match=f"{message}.venv-tpu/bin/pip install 'jax==0.10.2' 'libtpu==0.0.51' \\(on Linux"
    ):
        compile_programs([], "v5e:2x2", python=str(empty), cache=tmp_path)


def test_a_compiler_that_cannot_be_started_or_dies_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="missing/python is not a Python to run the TPU compiler with"):
        compile_programs([], "v5e:2x2", python="missing/python", cache=tmp_path)
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\necho out of luck >&2\nexit 3\n")
    dying.chmod(0o755)
    with pytest.raises(ValueError, match="the TPU compiler ended with exit code 3:\nout of luck"):
        compile_programs([], "v5e:2x2", python=str(dying), cache=tmp_path)


def test_records_of_the_compiler_become_programs(tmp_path):
    """A compiler that prints records like the real one, and a topology that it does not know."""
    python = tmp_path / "python"
    head = {"devices": 4, "kind": "TPU v5 lite", "versions": {"jax": "1", "libtpu": "2"}}
    (tmp_path / "out").write_text(f"{json.dumps(head)}\n{json.dumps(RECORD)}\n")
    python.write_text(f"#!/bin/sh\ncat {tmp_path}/out\n")
    python.chmod(0o755)
    programs = compile_programs([], "v5e:2x2", python=str(python), cache=tmp_path)
    assert (programs.devices, programs.programs) == (4, [Program(**RECORD)])
    (tmp_path / "out").write_text('{"refused": "no such mesh"}\n')
    with pytest.raises(ValueError, match="libtpu does not support the topology 'v5e:3x3': no such mesh"):
        compile_programs([], "v5e:3x3", python=str(python), cache=tmp_path)


@pytest.mark.parametrize("largest", [0, 1, 2, 3, 7, 8, 100, 127, 128, 129, 500])
@pytest.mark.parametrize(("multiple_of", "limit"), [(1, 128), (8, 128), (8, 100), (8, 7)])
def test_largest_that_fits_is_found_with_few_trials(largest, multiple_of, limit):
    trials = []

    def fits(size):
        trials.append(size)
        return size <= largest

    assert (
        largest_that_fits(fits, multiple_of=multiple_of, limit=limit)
        == min(largest, limit) // multiple_of * multiple_of
    )
    assert len(trials) == len(set(trials)) <= 14
    assert all(0 < size <= limit for size in trials)
