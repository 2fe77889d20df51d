"""vbs traces: lists the zoo, and writes an entry."""

import pytest

import variable_batch_size as vbs
from variable_batch_size.lab.command.main import main
from variable_batch_size.traces import zoo


def test_the_list_has_a_line_for_every_entry(capsys):
    assert main(["traces"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == zoo.names()
    found = {line.split()[0]: line for line in lines}
    assert "3 d 17 h, up to 16 devices" in found["bamboo-p2"]
    assert "  MIT  " in found["bamboo-p2"]
    assert "109,154 steps, 16 to 1,568 samples" in found["gpt-3"]


@pytest.mark.parametrize("name", ["gpt-3", "bamboo-p2"])
def test_get_writes_a_file_that_reads_as_the_entry(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["traces", "get", name]) == 0
    out = capsys.readouterr().out
    assert zoo.entry(name).source in out and zoo.entry(name).licence in out
    if zoo.entry(name).is_recording:
        read = vbs.traces.Recording.read
        assert read(f"{name}.csv").counts.tolist() == read(f"zoo:{name}").counts.tolist()
    else:
        assert vbs.Trace.of(f"{name}.csv") == vbs.Trace.of(f"zoo:{name}")
    assert main(["traces", "get", f"zoo:{name}", "--out", "other.csv"]) == 0
    assert (tmp_path / "other.csv").read_bytes() == (tmp_path / f"{name}.csv").read_bytes()


def test_get_refuses_an_unknown_name(capsys):
    assert main(["traces", "get", "gpt3"]) == 1
    assert "did you mean 'gpt-3'?" in capsys.readouterr().err


def test_commands_take_names(capsys, tmp_path):
    plan = ["--dataset-size", "100K", "--minibatch-size", "32", "--cores", "4"]
    assert main(["plan", "zoo:bamboo-g4dn-1d:32", *plan]) == 0
    assert main(["show", "zoo:seesaw"]) == 0
    convert = ["--samples-per-device", "32", "--minibatch-size", "32", "--seconds-per-step", "60"]
    assert main(["convert", "zoo:bamboo-p2", *convert, "--when-empty", "skip", "--round", "down"]) == 0
    assert "3 d 17 h" in capsys.readouterr().out
