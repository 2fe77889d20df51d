"""The vbs command, run in this process through its main function and, where processes matter, in a new process."""

import contextlib
import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import variable_batch_size as vbs
from variable_batch_size.lab.command.main import COMMANDS, main
from variable_batch_size.plugins import registered

ROOT = Path(__file__).parents[3]
TRACES = ["demo", "ramp", "stages", "spot", "shrink", "mnist"]


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Runs a command line in an empty directory and returns its exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(command):
        try:
            code = main(shlex.split(command)[1:])
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return code, out, err

    return run


def write(name, text):
    Path(name).write_text(text)


PLAN = "vbs plan trace.csv --dataset-size 300 --minibatch-size 32 --cores 4"
CONVERT = "vbs convert devices.csv --samples-per-device 48 --minibatch-size 32 --when-empty skip --round nearest"

# ---------------------------------------------------------------------------------------------------------------- plan


@pytest.mark.parametrize("command", ["show", "plan"])
def test_open_opens_the_picture(run, monkeypatch, command):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    write("trace.csv", "step,batchsize\n0,64\n1,96\n2,32\n3,256\n")
    shown = PLAN if command == "plan" else "vbs show trace.csv zoo:nanogpt-speedrun"
    assert run(f"{shown} --open")[0] == 0
    assert run(f"{shown} --plot picture.png --open")[0] == 0
    temporary, chosen = [Path(url.removeprefix("file://")) for url in opened]
    assert "<svg" in temporary.read_text() and temporary.suffix == ".svg"
    assert chosen == Path("picture.png").absolute() and chosen.stat().st_size > 1000
    if command == "plan":
        assert json.loads(run(f"{shown} --open --json")[1])["dataset_size"] == 300


def test_plan_prints_the_results_of_the_functions(run):
    write("trace.csv", "step,batchsize\n0,64\n1,96\n2,32\n3,256\n")
    schedule = vbs.Schedule(vbs.Trace.read("trace.csv"), dataset_size=300, minibatch_size=32, num_replicas=4)
    plan = vbs.planning.Plan.of(schedule)
    assert run(PLAN) == (0, vbs.planning.plan_report(plan) + "\n", "")
    code, out, err = run(f"{PLAN} --json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {**json.loads(json.dumps(plan.as_dict())), "comment": ""}


def test_plan_of_stages_is_that_of_a_run_with_them(run):
    options = "--dataset-size 300 --minibatch-size 32 --cores 4 --epochs 3 --json"
    code, out, _ = run(f"vbs plan '0:32 3:64 6:96' {options}")
    plan = json.loads(out)
    assert (code, plan["on_end"], plan["num_steps"]) == (0, "hold", 3 + 3 + 3 + 3)  # 288 of 300 samples in each epoch
    code, _, err = run("vbs plan '0:32 3:64' --dataset-size 300 --minibatch-size 32 --cores 4")
    assert code == 1 and "the number of epochs must be given" in err
    assert run(f"vbs plan '0:32 3:64' {options} --on-end stop")[0] == 1


def test_plan_accepts_all_its_options(run):
    write("trace.csv", "# recorded by run 7\nstep,batchsize\n0,64\n1,96\n2,32\n3,256\n")
    options = "--epochs 5 --on-end cycle --rule root --rule linear --ref-batchsize 128 --checkpoint-every 2"
    code, out, _ = run(f"{PLAN} {options} --noise-scale 1000 --tokens-per-sample 4096 --json")
    plan = json.loads(out)
    assert code == 0
    assert (plan["num_epochs"], plan["on_end"], plan["ref_batchsize"]) == (5, "cycle", 128)
    assert plan["rules"] == ["root", "linear", "adascale@1000"]
    assert plan["checkpoints"][0] == {"epoch": 0, "epoch_step": 2, "steps_done": 2, "samples_done": 160}
    assert plan["comment"] == "recorded by run 7"
    assert plan["num_tokens"] == 4096 * plan["num_samples"]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("cubic", "`rule` must be one of 'linear', 'root', "),
        ("legw", "`rule` legw needs warmup_samples, as in legw:5000, got 'legw'\n"),
        ("surge", "the rule surge depends on the gradient noise: pass --noise-scale to plan it\n"),
    ],
)
def test_plan_names_missing_rule_parameters(run, rule, message):
    write("trace.csv", "step,batchsize\n0,64\n")
    code, out, err = run(f"{PLAN} --rule {rule}")
    assert (code, out) == (1, "")
    assert err.startswith(f"vbs: {message}")


def test_plan_shows_rules_with_their_parameters(run):
    write("trace.csv", "step,batchsize\n0,64\n1,256\n")
    _, out, _ = run(f"{PLAN} --rule legw:128 --rule adam:half-life --rule surge --noise-scale 64 --json")
    last = json.loads(out)["moments"][-1]
    # at twice the scale of the first step, in the last of two steps of warm-up; gain/√S is 2 · 2/5 at V/G² = B0
    assert last["factors"] == {"legw:128": 2.0, "adam:half-life": 2.0, "surge@64": pytest.approx(0.8)}


def test_plan_of_a_token_budget_shows_padding_and_shapes(run):
    lengths = [5, 2, 8, 2, 3, 7, 2, 2]
    Path("lengths.txt").write_text("\n".join(map(str, lengths)))
    np.save("lengths.npy", lengths)
    options = "--tokens 16 --max-shapes 3 --cores 2 --epochs 1"
    code, out, _ = run(f"vbs plan 16 --lengths lengths.txt {options}")
    budget = vbs.TokenBudget(lengths, 16, tokens=16, max_shapes=3, num_replicas=2, rank=0)
    assert code == 0
    assert "tokens        48 in 1 epoch of 48\n" in out
    assert "in an epoch   8 samples of 31 tokens\n" in out
    assert "padded        to 3 minibatches of 3 shapes; 10 without padding in a minibatch, which counts as 16\n" in out
    assert f"padding       {100 * budget.plan.padding:.1f} % of the tokens in minibatches\n" in out
    assert "rows  tokens  minibatches of an epoch\n   5       3                        1\n" in out
    code, out, _ = run(f"vbs plan 16 --lengths lengths.npy {options} --packed --too-long drop --json")
    plan = json.loads(out)
    assert (plan["unit"], plan["dataset_size"]) == ("tokens", 16 * plan["token_plan"]["num_minibatches"])
    assert plan["token_plan"]["shapes"] == [{"rows": 1, "length": 16, "num_minibatches": 2}]


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ("", 2, "required: --dataset-size, --minibatch-size, --cores (or --lengths and --tokens, for a token budget)"),
        ("--lengths lengths.txt", 2, "the following arguments are required: --tokens, --cores\n"),
        ("--cores 2 --lengths a.npy --tokens 16 --dataset-size 4", 2, "--tokens replace --dataset-size"),
        ("--cores 2 --lengths a.npy --tokens 16 --tokens-per-sample 4", 2, "--tokens replace --tokens-per-sam"),
        (
            "--cores 2 --lengths lengths.txt --tokens 16",
            1,
            "lengths.txt: a file of lengths must be .npy, or have one int",
        ),
        ("--cores 2 --lengths none.npy --tokens 16", 1, "none.npy"),
    ],
)
def test_plan_of_a_token_budget_raises_in_a_sentence(run, options, code, message):
    Path("lengths.txt").write_text("length\n3\n")
    found, out, err = run(f"vbs plan 16 {options}")
    assert (found, out) == (code, "")
    assert message in err


def test_plan_of_a_number_is_a_constant_batch_size(run):
    code, out, _ = run("vbs plan 128 --dataset-size 50K --minibatch-size 32 --cores 8 --epochs 200 --json")
    plan = json.loads(out)
    assert code == 0
    assert (plan["num_steps"], plan["num_left_over"]) == (78_000, 200 * 80)


def test_plan_shows_the_source_of_a_trace(run):
    run("vbs make constant 64 --steps 3 --out trace.csv")
    assert run(PLAN)[1].startswith("made by: vbs make constant 64 --steps 3 --out trace.csv\nsteps         3\n")
    assert run("vbs show trace.csv")[1].startswith("made by: vbs make constant 64 --steps 3 --out trace.csv\n3 steps")


def test_plan_makes_a_plot(run):
    write("trace.csv", "step,batchsize\n0,64\n1,96\n")
    assert run(f"{PLAN} --plot plan.png")[0] == 0
    assert Path("plan.png").read_bytes().startswith(b"\x89PNG")
    assert run(f"{PLAN} --plot plan.svg")[0] == 0
    assert "<svg" in Path("plan.svg").read_text()
    assert run(f"{PLAN} --plot plan.pdf") == (
        1,
        "",
        "vbs: the file name of a plot must end in .png or .svg, got 'plan.pdf'\n",
    )


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (
            "step,batchsize\n0,64\n# so\n1,100\n2,50\n",
            "",
            "trace.csv:4: batchsize must be a multiple of 32 (the minibatch size), got 100",
        ),
        (
            "step,batchsize\n0,64\n1,320\n",
            "",
            "trace.csv:3: batchsize must be at most 288 (all full minibatches in 300 samples), got 320",
        ),
        ("step,batchsize\n0,64\n1,-32\n", "", "trace.csv:3: batchsize must be a positive integer, got -32"),
        ("step,batchsize\n0,64\n2,32\n", "", "trace.csv:3: step must be 1 (or 0, to start again), got 2"),
        (
            "step,batchsize\n0,64\n",
            "--epochs 2",
            "trace.csv holds 1 epoch of 300 samples, got epoch 1 (counting from 0): "
            'train for fewer epochs, or pass on_end="hold" or "cycle" to continue after the last row',
        ),
        (
            "step,batchsize\n0,64\n",
            "--on-end hold",
            "trace.csv is endless: the number of epochs must be given",
        ),
    ],
)
def test_invalid_trace_is_reported_on_stderr_and_by_the_exit_code(run, text, options, message):
    write("trace.csv", text)
    assert run(f"{PLAN} {options}") == (1, "", f"vbs: {message}\n")
    assert run(f"{PLAN} {options} --json") == (1, "", f"vbs: {message}\n")


def test_missing_file_is_reported(run):
    code, out, err = run(PLAN)
    assert (code, out) == (1, "")
    assert "trace.csv" in err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("vbs", "the following arguments are required: COMMAND"),
        ("vbs paln", "invalid choice: 'paln'"),
        ("vbs plan trace.csv", "the following arguments are required: --dataset-size, --minibatch-size, --cores"),
        (
            "vbs plan trace.csv --dataset-size 1.5 --minibatch-size 32 --cores 4",
            "argument --dataset-size: expected an integer such as 96, 250K, 1.5M or 2B, got '1.5'",
        ),
        ("vbs make", "the following arguments are required: KIND"),
        ("vbs convert x.csv", "required: --samples-per-device, --minibatch-size, --when-empty, --round"),
        (CONVERT, "required: --seconds-per-minibatch, --seconds-per-allreduce (or --seconds-per-step)"),
        (f"{CONVERT} --seconds-per-step 1 --seconds-per-minibatch 1", "--seconds-per-step replaces"),
    ],
)
def test_invalid_command_line_has_its_own_exit_code(run, command, message):
    code, out, err = run(command)
    assert (code, out) == (2, "")
    assert message in err


# ------------------------------------------------------------------------------------------------------- make and show


@pytest.mark.parametrize(
    ("command", "trace"),
    [
        ("constant 1K --steps 5", vbs.traces.constant_trace(1000, num_steps=5)),
        (
            "linear 32 512 --steps 9 --minibatch-size 32",
            vbs.traces.linear_ramp(32, 512, num_steps=9, minibatch_size=32),
        ),
        (
            "doubling 512 32 --every 3 --minibatch-size 32 --steps 20",
            vbs.traces.doubling_ramp(512, 32, every=3, num_steps=20, minibatch_size=32),
        ),
        (
            "stages '0:768 250K:1536 500K:3072' --unit samples --until 1M",
            vbs.traces.Stages.parse("0:768 250K:1536 500K:3072", until=10**6, unit="samples").trace(),
        ),
        (
            "stages '0:768 250B:1536' --unit tokens --tokens-per-sample 4096 --until 1T --change after",
            vbs.traces.Stages((0, 25 * 10**10), (768, 1536), 10**12, "tokens", 4096).trace(change="after"),
        ),
        ("rampup 16 16 960 --final 64", vbs.traces.rampup(16, 16, 960, final=64)),
        ("rampup 16 16 960 --final 64 --until 10K", vbs.traces.rampup(16, 16, 960, final=64, until=10_000)),
        (
            "decay 640 --factor 5 --at 60 120 160 --epochs 200 --dataset-size 50K --minibatch-size 32 --cap 5120",
            vbs.traces.growth_for_decay(
                640,
                factor=5,
                at_epochs=[60, 120, 160],
                num_epochs=200,
                dataset_size=50_000,
                minibatch_size=32,
                cap=5120,
            ),
        ),
        (
            "seesaw 256 --samples 1M --minibatch-size 32 --factor 1.1 --cap 4096",
            vbs.traces.seesaw(256, num_samples=10**6, minibatch_size=32, factor=1.1, cap=4096),
        ),
        ("seesaw 256 --samples 1M --minibatch-size 32", vbs.traces.seesaw(256, num_samples=10**6, minibatch_size=32)),
        (
            "spot --devices 9 --at-least 2 --arrive 0.1 --leave 0.2 --samples-per-device 8 --steps 50 --seed 5",
            vbs.traces.spot_market(
                num_devices=9, at_least=2, arrive=0.1, leave=0.2, samples_per_device=8, num_steps=50, seed=5
            ),
        ),
    ],
)
def test_make_gives_the_traces_of_the_functions(run, command, trace):
    code, out, err = run(f"vbs make {command} --out made.csv")
    assert (code, err) == (0, "")
    assert vbs.Trace.read("made.csv") == trace
    assert out == vbs.planning.trace_report(trace, width=80) + "\n"
    assert run("vbs show made.csv")[1].endswith(out)


def test_make_without_a_file_only_prints(run, tmp_path):
    code, out, _ = run("vbs make constant 32 --steps 4")
    assert code == 0
    assert "over steps    ████" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", TRACES)
def test_command_stored_with_a_trace_reproduces_its_bytes(run, name):
    made = (ROOT / "traces" / f"{name}.csv").read_bytes()
    command = made.decode().splitlines()[0].removeprefix("# made by: ")
    assert f"`{command}`" in (ROOT / "traces" / "README.md").read_text()
    Path("traces").mkdir()
    assert run(command)[0] == 0
    assert Path(f"traces/{name}.csv").read_bytes() == made


def test_the_mnist_trace_fills_twelve_epochs(run):
    options = "--dataset-size 60000 --minibatch-size 32 --cores 8 --json"
    plan = json.loads(run(f"vbs plan {ROOT / 'traces' / 'mnist.csv'} {options}")[1])
    assert (plan["num_epochs"], plan["num_steps"]) == (12, 799)
    assert (plan["sizes"][0]["batch_size"], plan["sizes"][-1]["batch_size"]) == (32, 2048)
    assert plan["epochs"][-1]["num_left_over"] == 0


# ------------------------------------------------------------------------------------------------------------- convert


def test_convert_gives_the_traces_of_the_functions(run):
    write("devices.csv", ",when,gpus,price\n0,0,2,1\n1,0.5,0,1\n2,1,3,1\n3,1.5,1,1\n")
    columns = "--time-column when --count-column gpus --time-unit h"
    code, out, err = run(f"{CONVERT} {columns} --seconds-per-step 300 --out made.csv")
    assert (code, err) == (0, "")
    recording = vbs.traces.Recording.read("devices.csv", time_column="when", count_column="gpus", time_unit="h")
    conversion = vbs.traces.convert_recording(
        recording, samples_per_device=48, minibatch_size=32, seconds_per_step=300, when_empty="skip", rounding="nearest"
    )
    assert vbs.Trace.read("made.csv") == conversion.trace
    assert list(conversion.trace) == [96] * 6 + [160] * 6
    assert (
        out
        == f"{vbs.planning.conversion_report(conversion)}\n{vbs.planning.trace_report(conversion.trace, width=80)}\n"
    )
    assert vbs.Trace.read("made.csv").comment.startswith("made by: vbs convert devices.csv ")


def test_convert_uses_the_time_of_minibatches_and_all_reduces(run):
    write("devices.csv", '{"metadata": {"gap_seconds": 300}, "data": [2, 3]}')
    assert run(f"{CONVERT} --seconds-per-minibatch 70 --seconds-per-allreduce 10 --out made.csv")[0] == 0
    assert list(vbs.Trace.read("made.csv")) == [96, 96, 160, 160]  # steps of 2 · 70 + 10 seconds


def test_convert_reads_json_records(run):
    write("devices.csv", '[{"at": 0, "zone": "a", "gpus": 2}, {"at": 600, "gpus": 3}, {"at": 900, "gpus": 3}]')
    columns = "--time-column at --count-column gpus"
    assert run(f"{CONVERT} {columns} --seconds-per-step 300 --out made.csv")[0] == 0
    assert list(vbs.Trace.read("made.csv")) == [96, 96, 160]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("time,a,b\n0,1,2\n", "", "devices.csv:1: pass --time-column and --count-column unless exactly two columns are "
         "named, got ['time', 'a', 'b']"),
        ('[{"time": 0, "a": 1, "b": 2}]', "", "devices.csv:1: pass --time-column and --count-column unless records "
         "have the field 'time' and one other, got ['time', 'a', 'b']"),
        ("time,a,b\n0,1,2\n", "--time-column time", "pass both --time-column and --count-column or neither"),
        ('{"metadata": {"gap_seconds": 5}, "data": [1]}', "--time-column a --count-column b",
         "devices.csv: --time-column is for CSV files and JSON records, got 'a' for JSON counts"),
    ],
)  # fmt: skip
def test_convert_errors_name_the_options(run, text, options, message):
    write("devices.csv", text)
    assert run(f"{CONVERT} {options} --seconds-per-step 5") == (1, "", f"vbs: {message}\n")


def test_convert_errors_name_the_line(run):
    write("devices.csv", "time,n\n0,2\n10,0\n20,1\n")
    command = CONVERT.replace("skip", "error") + " --seconds-per-step 5"
    assert run(command) == (1, "", "vbs: devices.csv:3: no devices available (`when_empty` is 'error')\n")


@pytest.mark.parametrize("unit", ["steps", "samples", "tokens --tokens-per-sample 4096"])
@pytest.mark.parametrize("name", TRACES)
def test_trace_converted_to_stages_and_back_is_the_same(run, name, unit):
    trace = ROOT / "traces" / f"{name}.csv"
    code, stages, hint = run(f"vbs convert {trace} --to stages --unit {unit}")
    assert code == 0
    ending = hint.split("…")[1].strip()
    assert run(f"vbs make stages '{stages.strip()}' {ending} --out made.csv")[0] == 0
    assert vbs.Trace.read("made.csv") == vbs.Trace.read(trace)


# ----------------------------------------------------------------------------------------------------------- processes


def in_a_process(*arguments, **options):
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, cwd=ROOT, timeout=600, **options)


def test_the_module_is_the_command():
    done = in_a_process("-m", "variable_batch_size", "show", "traces/ramp.csv", text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "120 steps, 32,640 samples" in done.stdout


def loaded_by(*arguments):
    done = in_a_process("-X", "importtime", "-m", "variable_batch_size", *arguments, text=True)
    assert done.returncode == 0
    return {line.split("|")[-1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}


def test_help_imports_no_large_package():
    for arguments in (["--help"], ["--version"]):
        assert not {"torch", "torch_xla", "numpy", "pandas", "matplotlib"} & loaded_by(*arguments)


def test_no_command_imports_torch_or_pandas_and_only_plots_import_matplotlib():
    options = ["--dataset-size", "1K", "--minibatch-size", "32", "--cores", "4"]
    for arguments in (
        ["plan", "traces/spot.csv", *options],
        ["show", "traces/spot.csv"],
        ["make", "constant", "32", "--steps", "5"],
        ["convert", "traces/spot.csv", "--to", "stages"],
    ):
        assert not {"torch", "torch_xla", "pandas", "matplotlib"} & loaded_by(*arguments)


def test_plot_without_matplotlib_names_the_package_to_install():
    code = "import sys, variable_batch_size.lab.command.main as m; sys.modules['matplotlib'] = None; sys.exit(m.main())"
    options = ["--dataset-size", "1K", "--minibatch-size", "32", "--cores", "4", "--plot", "nothing.png"]
    done = in_a_process("-c", code, "plan", "traces/spot.csv", *options, text=True)
    either = "pip install 'variable_batch_size[report]', or in a clone pip install '.[report]'"
    message = f"vbs: a plot needs matplotlib: {either}\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", message)


def test_output_can_be_captured_in_a_string():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["show", str(ROOT / "traces" / "shrink.csv")]) == 0
    assert "█" in out.getvalue()


@pytest.mark.parametrize("command", [*COMMANDS, *registered("commands")])
def test_every_command_has_help(run, command):
    code, out, _ = run(f"vbs {command} --help")
    assert code == 0
    assert f"usage: vbs {command}" in out


def test_terminal_without_unicode_gets_ascii_output():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = in_a_process("-m", "variable_batch_size", "show", "traces/shrink.csv", env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"over steps    ####" in done.stdout


def test_closed_pipe_is_not_an_error():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "variable_batch_size", "show", "traces/shrink.csv"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, cwd=ROOT)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_show_prints_the_decisions_of_an_executed_trace(run):
    write("executed.csv", "step,batchsize\n0,64\n1,64\n2,128\n")
    assert "noise scale" not in run("vbs show executed.csv")[1]
    start = {"step": 0, "from_step": 0, "batch_size": 64, "cores": 2, "noise_scale": None, "why": "first decision"}
    kept = {**start, "step": 1, "from_step": 1, "why": "goodput +0 %"}
    grown = {**start, "step": 2, "from_step": 2, "batch_size": 128, "noise_scale": 1234.5, "why": "goodput +9 %"}
    write("decisions.jsonl", "".join(json.dumps(record) + "\n" for record in (start, kept, grown)))
    assert run("vbs show executed.csv")[1].endswith(
        "at step  from step  batch size  cores  noise scale  why\n"
        "      0          0          64      2            –  first decision\n"
        "      2          2         128      2        1,234  goodput +9 %\n"
        "(1 more decision without a change)\n"
    )
    write("ramp.csv", "step,batchsize\n0,64\n1,96\n")
    assert "noise scale" not in run("vbs show ramp.csv")[1]  # of another trace
    assert run("vbs show ramp.csv --plot ramp.svg")[0] == 0
    assert "<svg" in Path("ramp.svg").read_text()
    assert run("vbs show executed.csv --plot decided.png")[0] == 0
    assert Path("decided.png").stat().st_size > 1000
    assert "the file name of a plot must end in .png or .svg" in run("vbs show executed.csv --plot decided.txt")[2]
