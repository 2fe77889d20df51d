"""vbs profile, vbs fit, vbs simulate and vbs advise."""

import csv
import json
import os
import re
import shlex
from pathlib import Path

import forked
import pytest
import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

import variable_batch_size as vbs
from variable_batch_size.lab.command.main import main
from variable_batch_size.lab.comparison import measure as profile
from variable_batch_size.lab.comparison.workload import load_workload

PROFILE = """machines,cores,minibatch_size,seconds_accumulating,seconds_updating
1,1,32,0.01,0.012
1,2,32,0.01,0.02
1,4,32,0.011,0.03
"""
SIMULATE = (
    "vbs simulate 256 autoscale:max_batch_size=4096 --profile profile.csv --minibatch-size 32 --ref-batchsize 128"
)
SECONDS_PER_LAYER, SECONDS_PER_UPDATE = 0.001, 0.002


class Work:
    """A clock that advances with the work of its process: only layers and updates take time."""

    seconds = 0.0
    handles = ()

    @classmethod
    def spend(cls, seconds):
        cls.seconds += seconds

    @classmethod
    def clock(cls):
        cls.handles = cls.handles or (
            register_module_forward_hook(lambda *_: cls.spend(SECONDS_PER_LAYER)),
            register_optimizer_step_post_hook(
                lambda optimizer, *_: cls.spend(SECONDS_PER_UPDATE * isinstance(optimizer, torch.optim.SGD))
            ),
        )
        return cls.seconds

    @classmethod
    def stop(cls):
        for handle in cls.handles:
            handle.remove()
        cls.handles = ()


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(profile.measure.__kwdefaults__, "clock", Work.clock)
    monkeypatch.chdir(tmp_path)
    Path("profile.csv").write_text(PROFILE)

    def run(command):
        code = main(shlex.split(command)[1:])
        out, err = capsys.readouterr()
        return code, out, err

    yield run
    Work.stop()


def test_profile_reports_that_nothing_could_be_measured(run, monkeypatch):
    monkeypatch.setitem(profile.measure.__kwdefaults__, "clock", lambda: 0.0)
    code, _, err = run("vbs profile digits --cores 1 --minibatch-sizes 8 --steps 6 --out measured.csv")
    assert code == 1
    assert "steps of 3 minibatches of 8 took no longer than those of 1: the machine is busy with other work, or " in err
    assert not Path("measured.csv").exists()


def test_simulate_accepts_the_output_of_profile(run):
    code, out, err = run("vbs profile digits --cores 1 --minibatch-sizes 8 16 --steps 6 --out measured.csv")
    assert (code, err) == (0, "")
    assert len(out.splitlines()) == 3
    rows = vbs.planning.Profile.read("measured.csv").rows
    assert [(row.machines, row.cores, row.minibatch_size) for row in rows] == [(1, 1, 8), (1, 1, 16)]
    num_modules = len(list(load_workload("digits", None).model().modules()))
    for row in rows:
        assert row.seconds_accumulating == pytest.approx(num_modules * SECONDS_PER_LAYER)
        assert row.seconds_updating == pytest.approx(row.seconds_accumulating + SECONDS_PER_UPDATE)
    assert Path("measured.csv").read_text().startswith("# made by: vbs profile digits --cores 1")
    options = "--noise 500 --cores 1 --minibatch-size 16 --ref-batchsize 16 --samples 14400"
    code, out, _ = run(f"vbs simulate 64 --profile measured.csv {options}")
    assert code == 0
    assert "64" in out


def seconds_on_core_0():
    """A clock that does not advance on the other cores."""
    return Work.clock() if dist.get_rank() == 0 else 0.0


def test_profile_of_several_cores_uses_the_clock_of_the_first(run, monkeypatch):
    monkeypatch.setitem(profile.measure.__kwdefaults__, "clock", seconds_on_core_0)
    with forked.launches():
        code, _, _ = run("vbs profile digits --cores 2 --steps 5")
    assert code == 0
    assert [row.cores for row in vbs.planning.Profile.read("profile.csv").rows] == [2]


def test_fit_prints_the_model_and_its_times(run):
    code, out, _ = run("vbs fit profile.csv --cores 4 8")
    assert code == 0
    assert "updating with it on 8 cores:" in out
    assert "gamma     1 (fixed)" in out  # two all-reduces determine no more than two parameters of the network
    assert [line.split()[:3] for line in out.splitlines()[8:11]] == [["1", cores, "32"] for cores in "124"]
    code, out, _ = run("vbs fit profile.csv --json")
    model = vbs.policies.Throughput(**json.loads(out))
    assert model.updating(1, 4, 32) == pytest.approx(0.03, rel=0.05)


def test_simulate_writes_a_report_a_table_a_plot_and_the_traces(run):
    often = "--arrive .1 --leave .1"
    run(f"vbs make spot --devices 4 --at-least 1 {often} --samples-per-device 1 --steps 50 --seed 0 --out m.csv")
    code, out, err = run(
        f"{SIMULATE} --noise 2000 --market m.csv --samples 200K --price 2 --restart-seconds 3 --out out"
    )
    assert (code, err) == (0, "")
    assert out.splitlines()[0].split() == [
        *("policy", "cores", "time", "device", "time", "cost", "updates", "samples", "progress", "restarts"),
        *("lost", "batch", "sizes", "times"),
    ]
    page = Path("out/simulation.html").read_text()
    verdict = out.splitlines()[-2]
    assert verdict.startswith("Fastest")
    assert f"<h1>Simulated policies</h1>\n<p>{verdict}</p>" in page
    assert "<svg" in page
    assert "autoscale:max_batch_size=4096" in page
    assert "http" not in page.partition("<svg")[0]
    assert Path("out/simulation.png").stat().st_size > 1000
    rows = Path("out/table.csv").read_text().splitlines()
    assert len(rows) == 3
    updates = {row.split(",")[0]: int(row.split(",")[5]) for row in rows[1:]}
    assert len(vbs.Trace.read("out/traces/256.csv")) == updates["256"]
    trace = vbs.Trace.read("out/traces/autoscale-max_batch_size=4096.csv")
    assert len(trace) == updates["autoscale:max_batch_size=4096"]
    assert "made by: vbs simulate" in trace.comment


def test_simulate_makes_a_row_for_each_number_of_cores(run):
    # progress of 200 steps at 128; gain of 256 at φ = 128 is 2 / 1.5, so 150 updates. On 1 core 8 minibatches of 32:
    # 7·0.01 + 0.012 = 0.082 s; on 2 cores 3·0.01 + 0.02 = 0.05 s; on 4 cores 0.011 + 0.03 = 0.041 s
    options = "--profile profile.csv --minibatch-size 32 --ref-batchsize 128 --samples 25600 --noise 128 --price 3600"
    code, out, err = run(f"vbs simulate 256 {options} --cores 1 2 4 --out out")
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()[1:4]]
    assert [row[1] for row in rows] == ["4", "2", "1"]
    assert [" ".join(row[2:8]) for row in rows] == [
        "6.15 s 24.6 s 24.60 150",
        "7.5 s 15 s 15.00 150",
        "12.3 s 12.3 s 12.30 150",
    ]
    fastest, cheapest = "batch size 256 on 4 cores, 6.15 s, cost 24.60", "batch size 256 on 1 core, 12.3 s, cost 12.30"
    assert out.splitlines()[4] == f"Fastest: {fastest}. Cheapest: {cheapest}."
    with open("out/table.csv", newline="") as file:
        first = next(csv.DictReader(file))
    assert (first["cores"], float(first["device-hours"]), first["times"]) == (
        "4",
        pytest.approx(24.6 / 3600, rel=1e-5),
        "measured",
    )
    assert sorted(path.name for path in Path("out/traces").iterdir()) == [
        *("256-on-1-core.csv", "256-on-2-cores.csv", "256-on-4-cores.csv")
    ]


def test_simulate_marks_times_that_were_not_measured(run):
    code, out, _ = run(f"{SIMULATE} --noise 500 --cores 2 3 8 --samples 100K")
    assert code == 0
    found = {(line.split()[0], line.split()[1]): line.split()[-1] for line in out.splitlines()[1:-1]}
    assert {found["256", cores] for cores in ("2",)} == {"measured"}
    assert found["256", "3"] == "interpolated"
    assert found["256", "8"] == "extrapolated"
    assert "on 8 cores" in out.splitlines()[-1]
    assert "(extrapolated)" in out.splitlines()[-1]


def test_a_negative_price_is_refused(run):
    for price in ("-1", "nan"):
        code, out, err = run(f"{SIMULATE} --noise 500 --cores 2 --samples 100K --price {price}")
        assert (code, out, err) == (1, "", f"vbs: `price` must be a non-negative number, got {float(price)}\n")


def test_simulate_accepts_recorded_devices_and_the_noise_of_a_log(run):
    Path("devices.csv").write_text("time,devices\n0,4\n100,2\n200,0\n250,4\n300,0\n")
    Path("log.jsonl").write_text('{"progress": 0, "noise_scale": 100}\n{"progress": 900, "noise_scale": 9000}\n')
    code, out, _ = run(f"{SIMULATE} --noise log.jsonl --recording devices.csv --samples 200K")
    assert code == 0
    assert "cost" not in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--noise x --cores 2",
            "--noise must be the log of a run, a CSV file, a positive number, or one for a batch size, as in",
        ),
        ("100 --noise 5 --cores 2", "`policy` must be a multiple of 32 (the minibatch size), got 100"),
        ("512 --dataset-size 300 --noise 5 --cores 2", "`policy` must be at most 288 (the capacity of an epoch), got"),
        ("on_plateau --noise 5 --cores 2", "a simulation has no loss, which the policy OnPlateau needs"),
        ("--noise 5 --cores 9", "profile.csv was measured with 1 to 4 cores, got 9"),
        ("slow --noise 5 --cores 2", "`policy` must be one of 'autoscale'"),
        (
            "autoscale --noise 5 --cores 2",
            "`policy` autoscale needs settings, as in autoscale:max_batch_size=…, got 'autoscale'",
        ),
        ("norm_test:eta --noise 5 --cores 2", "a policy setting must be name=number, got 'eta'"),
        ("per_core:pace=3 --noise 5 --cores 2", "got an unexpected keyword argument 'pace', got 'per_core:pace=3'"),
    ],
)
def test_simulate_raises_with_a_reason_for_unsupported_inputs(run, options, message):
    code, _, err = run(
        f"vbs simulate 256 {options} --profile profile.csv --minibatch-size 32 --ref-batchsize 128 --samples 9K"
    )
    assert code == 1
    assert message in err


def test_simulate_extrapolates_if_requested(run):
    assert run(f"{SIMULATE} --noise 500 --cores 64 --samples 100K --extrapolate")[0] == 0


def test_profile_needs_enough_steps_for_a_median(run):
    code, _, err = run("vbs profile digits --cores 1 --steps 4")
    assert code == 1
    assert "`steps` must be at least 5, for a meaningful median, got 4" in err


def test_fit_prints_the_errors_of_the_model_in_each_row(run):
    # one core: the model has the same time for both kinds of minibatches, between those of 10 and 12.1 ms
    Path("one.csv").write_text("\n".join([*PROFILE.splitlines()[:1], "1,1,32,0.01,0.0121"]) + "\n")
    code, out, err = run("vbs fit one.csv")
    assert (code, err) == (0, "")
    table = out.splitlines()[7:9]
    assert table[0].split() == [
        *("machines", "cores", "minibatch", "accumulating", "model", "error", "updating", "model", "error")
    ]
    numbers = [float(cell) for cell in table[1].replace("%", " ").replace("ms", " ").split()]
    accumulating, model, error, updating, same_model, other_error = numbers[3:]
    assert (accumulating, updating, same_model) == (10, 12.1, model)
    assert 10 <= model <= 12.1
    assert [error, other_error] == pytest.approx([100 * (model / 10 - 1), 100 * (model / 12.1 - 1)], abs=0.5)


def test_fit_refuses_more_parameters_than_rows(run):
    Path("few.csv").write_text("\n".join([*PROFILE.splitlines()[:1], "1,4,32,0.011,0.03", "1,4,32,0.012,0.03"]) + "\n")
    code, out, err = run("vbs fit few.csv")
    what = "at least 3 different combinations of cores and minibatch size to fit 3 parameters (beta_c, alpha_r, beta_r)"
    assert (code, out, err) == (1, "", f"vbs: `rows` must have {what}, got 1: measure more with vbs profile\n")


def test_fit_warns_of_a_busy_machine(run):
    Path("busy.csv").write_text("\n".join([*PROFILE.splitlines()[:2], "1,2,32,0.021,0.03"]) + "\n")
    code, out, err = run("vbs fit busy.csv --json")
    assert (code, set(json.loads(out))) == (0, set(vbs.policies.Throughput._fields))
    slower = "takes 21 ms on 2 cores, 2.1 times the 10 ms on 1 core, so 2 cores train no faster"
    assert err.startswith(f"vbs: warning: accumulating a minibatch of 32 {slower}: the machine is busy with other work")
    Path("slow.csv").write_text("\n".join([*PROFILE.splitlines()[:2], "1,2,32,0.016,0.03"]) + "\n")
    assert "1.6 times the 10 ms on 1 core: the machine is busy" in run("vbs fit slow.csv")[2]
    Path("fast.csv").write_text("\n".join([*PROFILE.splitlines()[:2], "1,2,32,0.004,0.03"]) + "\n")
    assert "0.4 times the 10 ms on 1 core: the machine was busy" in run("vbs fit fast.csv")[2]


ADVISE = "vbs advise digits --steps 5 --noise-steps 30 --seeds 2"


def test_advise_measures_and_ends_with_a_choice(run, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with forked.launches():
        code, out, err = run(f"{ADVISE} --max-cores 4 --price 3600")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [["1", "16"], ["2", "16"]]
    rows = [line.split() for line in lines[4:7]]
    assert {row[1]: row[-1] for row in rows} == {"1": "measured", "2": "measured", "4": "extrapolated"}
    text = " ".join(" ".join(lines[7:]).split())
    assert re.match(
        r"The noise scale is \S+ samples \(95 % interval \S+ to \S+\) after \d+ of 900 steps at the ref", text
    )
    assert "Times on 1 and 2 cores were measured, for training steps alone. Times on 4 cores are a guess" in text
    assert re.search(r" (Fastest|Fastest and cheapest): batch size \d+ on . cores?, .* Take batch size \d+ on ", text)


def test_advise_on_one_core_has_no_guess(run, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.75, 0.0, 0.0))
    code, out, _ = run(f"{ADVISE} --max-batch-size 64")
    assert code == 0
    text = " ".join(out.split())
    assert "guess" not in text
    assert "The times are doubtful: the load was 0.8 on 1 CPU before. One run" in text
    assert "One run: batch size" in text
    assert "product of time and device time" in text


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ("digits --price -1", 1, "vbs: `price` must be a non-negative number, got -1.0"),
        ("digits --max-cores 0", 2, "argument --max-cores: expected at least 1, got 0"),
        ("digits --seeds 1", 1, "vbs: --seeds must be at least 2, because a single seed gives no interval, got 1"),
        ("digit", 1, "vbs: `workload` must be digits, mnist or module:function, got 'digit': did you mean digits?"),
        ("cifar", 1, "vbs: `workload` must be digits, mnist or module:function, got 'cifar'"),
    ],
)
def test_advise_rejects_wrong_input_before_it_measures(run, capsys, options, code, message):
    if code == 2:
        with pytest.raises(SystemExit, match="2"):
            run(f"vbs advise {options}")
        assert message in capsys.readouterr().err
        return
    assert run(f"vbs advise {options}")[::2] == (code, f"{message}\n")


def test_fit_does_not_predict_unmeasured_network_configurations(run):
    code, _, err = run("vbs fit profile.csv --cores 8 --machines 2")
    assert code == 1
    assert "profile.csv must have a row with several cores on several machines" in err
    assert (
        "`machines` must be at most the number of cores, which is 2, got 4"
        in run("vbs fit profile.csv --cores 2 --machines 4")[2]
    )


def test_measurements_before_a_failure_are_kept(run, monkeypatch):
    measured = profile.Measured(1, 1, 8, 0.01, 0.02)

    def fails_later(*_, **__):
        yield measured
        raise ValueError("no second core")

    monkeypatch.setattr(profile, "measure", fails_later)
    code, _, err = run("vbs profile digits --cores 1 2 --out measured.csv")
    assert (code, err) == (1, "vbs: no second core\n")
    assert vbs.planning.Profile.read("measured.csv").rows == (measured,)


def test_simulation_table_keeps_the_names_of_policies(run):
    policy = "autoscale:max_batch_size=4096,threshold=1.1"
    run(f"{SIMULATE.replace('256', policy)} --noise 2000 --cores 2 --samples 200K --out out")
    with open("out/table.csv", newline="") as file:
        rows = {row["policy"]: row for row in csv.DictReader(file)}
    assert int(rows[policy]["updates"]) == len(
        vbs.Trace.read("out/traces/autoscale-max_batch_size=4096-threshold=1.1.csv")
    )


def test_simulate_reads_a_recording_in_the_given_unit(run):
    Path("seconds.csv").write_text("time,devices\n0,4\n60,2\n120,0\n180,4\n")
    Path("minutes.csv").write_text("zone,minute,devices\na,0,4\na,1,2\na,2,0\na,3,4\n")
    told = "--time-column minute --count-column devices --time-unit min"
    found = [
        run(f"{SIMULATE} --noise 500 --samples 200K --recording {recording}")
        for recording in ("seconds.csv", f"minutes.csv {told}")
    ]
    assert found[0] == found[1]
    code, _, err = run(f"{SIMULATE} --noise 500 --samples 200K --cores 2 --time-unit min")
    assert (code, err) == (1, "vbs: --time-unit is for a --recording, got min without one\n")


ACROSS = PROFILE + "2,8,32,0.01,0.05\n"
SIMULATE_256 = "vbs simulate 256 --minibatch-size 32 --ref-batchsize 128 --samples 25600"


def test_simulate_places_cores_on_machines(run):
    Path("across.csv").write_text(ACROSS)
    code, _, err = run(f"{SIMULATE_256} --profile across.csv --noise 128 --cores 8")
    where = "across.csv has times on several machines, but the placement of 8 cores is unknown: set `cores_per_machine`"
    assert (code, err.startswith(f"vbs: {where}")) == (1, True)
    # 150 updates, as above: of 50 ms on two machines
    code, out, err = run(f"{SIMULATE_256} --profile across.csv --noise 128 --cores 8 --cores-per-machine 4 --out out")
    assert (code, err, out.splitlines()[1].split()[2:4]) == (0, "", ["7.5", "s"])
    assert "of 4 cores" in Path("out/simulation.html").read_text()
    Path("devices.csv").write_text("time,devices\n0,8\n1000,4\n2000,8\n")
    options = "--noise 128 --recording devices.csv --cores-per-machine 4"
    assert run(f"{SIMULATE_256} --profile across.csv {options}")[1].splitlines()[1].split()[2] == "7.5"


def test_simulate_says_how_far_the_noise_is_extrapolated(run):
    Path("noise.csv").write_text("progress,noise_scale,batch_size\n0,128,128\n50,128,128\n")
    code, _, err = run(f"{SIMULATE_256} --profile profile.csv --noise noise.csv --cores 2")
    assert (code, err.splitlines()) == (
        0,
        [
            "vbs: warning: the noise was measured for 50 of 200 steps at the reference batch size, and is assumed to "
            "stay as it was at the end of these",
            "vbs: warning: the noise was measured at batch size 128, and used at 256: beyond, it is assumed to be "
            "that at the nearest measured one",
        ],
    )
    Path("old.jsonl").write_text('{"progress": 0, "noise_scale": 100}\n{"progress": 900, "noise_scale": 100}\n')
    _, _, err = run(f"{SIMULATE_256} --profile profile.csv --noise old.jsonl --cores 2")
    assert err == "vbs: warning: the noise has no batch sizes, and is assumed to be the same at all of them\n"


def test_simulate_takes_the_noise_of_several_batch_sizes(run):
    # 256 is in the middle of 64 and 1024, where φ is 128: 150 updates of 50 ms on two cores
    code, out, err = run(f"{SIMULATE_256} --profile profile.csv --noise 64:32 --noise 1024:512 --cores 2")
    assert (code, err, out.splitlines()[1].split()[2]) == (0, "", "7.5")
    code, _, err = run(f"{SIMULATE_256} --profile profile.csv --noise 64:32 --noise 512 --cores 2")
    assert (code, err) == (1, "vbs: with several --noise, each must have a batch size, got '512' without one\n")


def test_simulate_takes_a_policy_from_a_file(run):
    Path("own.py").write_text(
        "import variable_batch_size as vbs\n"
        "def double(situation):\n    return 64 * situation.cores\n"
        "always = vbs.policies.PerCore(128)\n"
    )
    policies = "128 own.py:double 256 own.py:always"
    code, out, _ = run(
        f"{SIMULATE_256.replace('256', policies, 1)} --profile profile.csv --noise 128 --cores 2 --out out"
    )
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()[1:5]}
    assert (code, rows["own.py:double"], rows["own.py:always"]) == (0, rows["128"], rows["256"])
    assert set(vbs.Trace.read("out/traces/own.py-double.csv")) == {128}
    code, _, err = run(f"{SIMULATE_256.replace('256', 'own.py:none', 1)} --profile profile.csv --noise 128 --cores 2")
    message = "own.py must have a policy, or a function of the situation, named 'none', got None"
    assert (code, err) == (1, f"vbs: {message}\n")


def test_simulate_counts_work_since_the_last_checkpoint(run):
    Path("devices.csv").write_text("time,devices\n0,4\n1,2\n2.02,4\n")
    options = "--profile profile.csv --noise 128 --recording devices.csv --checkpoint-seconds 0.5"
    # 150 updates. On 4 cores 41 ms each: 24 in a second, of which the first 13 are saved, so 0.467 s are lost. On 2
    # cores 50 ms each: 20, saved after 10 and 20, so 0.02 s are lost. In 4 cycles of 2.02 s 132, then 18 in 0.738 s
    code, out, _ = run(f"{SIMULATE_256} {options} --out out")
    with open("out/table.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert (code, row["updates"], row["restarts"]) == (0, "150", "8")
    assert float(row["hours"]) == pytest.approx((4 * 2.02 + 0.738) / 3600, rel=1e-5)
    assert float(row["lost hours"]) == pytest.approx(4 * 0.487 / 3600, rel=1e-5)
    assert " 1.95 s " in out
    assert "every 500 ms" in Path("out/simulation.html").read_text()


def test_fit_warns_of_numbers_far_from_measured_ones(run):
    code, out, err = run("vbs fit profile.csv --cores 8 512")
    assert (code, "updating with it on 512 cores:" in out) == (0, True)
    assert err == "vbs: warning: profile.csv was measured with 1 to 4 cores, got 512: the times are a guess\n"
    assert "with 32 to 32 samples in a minibatch, got 65: the" in run("vbs fit profile.csv --minibatch-size 65")[2]


def test_fit_prints_the_best_split(run):
    code, out, err = run("vbs fit profile.csv --cores 4 --noise-scale 1000 --ref-batchsize 128 --max-batch-size 4096")
    assert (code, err) == (0, "")
    model = vbs.planning.Profile.read("profile.csv").throughput
    best = vbs.policies.best_split(
        model, noise_scale=1000.0, ref_batchsize=128, cores=4, max_batch_size=4096, max_minibatch=32
    )
    split = f"{best.depth} minibatches of {best.minibatch_size} per core and step"
    in_all = f"batch size {4 * best.depth * best.minibatch_size:,}, worth {best.goodput:,.4g} samples per second at the"
    assert out.splitlines()[-1].startswith(f"best split: {split}, {in_all}")
    code, _, err = run("vbs fit profile.csv --noise-scale 1000")
    assert (code, err) == (
        1,
        "vbs: the best split needs --noise-scale, --ref-batchsize and --max-batch-size, got only some\n",
    )


def test_simulate_rents_cores_at_prices_of_a_file(run):
    # 200 of progress: 150 updates of 256, as above. 3,600 an hour for 5 s, then 7,200; 50 ms on 2 cores: 7.5 s
    Path("prices.csv").write_text("time,price\n0,3600\n5,7200\n100,0\n")
    options = "--profile profile.csv --noise 128 --prices prices.csv"
    code, out, err = run(f"{SIMULATE_256} {options} --cores 2")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "One run: batch size 256 on 2 cores, 7.5 s, cost 20.00."
    rentals = "cheapest:max_batch_size=256 by_deadline:hours=0.001,max_batch_size=256"
    code, out, err = run(f"{SIMULATE_256.replace('256', rentals, 1)} {options} --cores 4 --out out")
    assert (code, err) == (0, "")
    with open("out/table.csv", newline="") as file:
        rows = {row["policy"].partition(":")[0]: row for row in csv.DictReader(file)}
    # 3 cores are the fastest: gain(192) = 1.2 in 0.0103 + 0.025 s, against 4/3 in 0.011 + 0.03 s on 4
    assert [rows[name]["cores"] for name in ("cheapest", "by_deadline")] == ["1", "3"]
    assert float(rows["cheapest"]["cost"]) < float(rows["by_deadline"]["cost"])
    assert "Cheapest: cheapest:max_batch_size=256 on 1 core" in out
    assert "prices.csv" in Path("out/simulation.html").read_text()
    code, _, err = run(f"{SIMULATE_256} {options} --cores 2 --price 1")
    assert (code, err) == (1, "vbs: pass --price or --prices, not both\n")
    no_prices = options.removesuffix("--prices prices.csv")
    code, _, err = run(f"{SIMULATE_256.replace('256', 'cheapest:max_batch_size=256', 1)} {no_prices} --cores 2")
    assert (code, err) == (1, "vbs: Cheapest needs a price, to choose the number of cores\n")


def test_simulate_prints_the_interval_of_guessed_times(run):
    code, out, _ = run(f"{SIMULATE_256} --profile profile.csv --noise 128 --cores 2 3 --out out")
    assert (code, "95 % interval" in out.splitlines()[0]) == (0, True)
    with open("out/table.csv", newline="") as file:
        rows = {row["cores"]: row for row in csv.DictReader(file)}
    low, mean, high = (float(rows["3"][name]) for name in ("hours from", "hours", "hours to"))
    assert low < mean < high
    assert mean / low == pytest.approx(high / mean, rel=1e-4)
    assert {rows["2"][name] for name in ("hours from", "hours", "hours to")} == {rows["2"]["hours"]}
    assert re.search(r"batch size 256 on 3 cores, \S+ s \(\S+ s to \S+ s\), ", out)
    assert out.splitlines()[2].split()[4] == "–"
