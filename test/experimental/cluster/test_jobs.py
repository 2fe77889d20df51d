"""JOBS.toml: what is read, and mistakes with their places."""

import pytest
from documents import ROOT, blocks

from variable_batch_size.experimental.cluster.jobs import read_cluster

JOB = '[[job]]\nname = "a"\nscript = "train.py"\ncheckpoint = "runs/a"\n'


@pytest.fixture
def read(tmp_path):
    (tmp_path / "train.py").touch()

    def read(text):
        (tmp_path / "jobs.toml").write_text(text)
        return read_cluster(tmp_path / "jobs.toml")

    return read


def test_paths_are_relative_to_the_file_and_arguments_are_filled_in(read, tmp_path):
    pool, (job,) = read(
        f'[pool]\npolicy = "fifo"\n{JOB}args = ["--to", "{{checkpoint}}", "{{cores}} {{x}}"]\nmax_cores = 2\n'
    )
    assert pool.policy == "fifo" and job.max_cores == 2
    assert job.checkpoint == str(tmp_path / "runs" / "a")
    assert job.arguments(2) == [str(tmp_path / "train.py"), "--to", str(tmp_path / "runs" / "a"), "2 {x}"]


def test_the_file_on_the_page_about_pools_is_read(tmp_path):
    (text,) = blocks(ROOT / "docs" / "cluster.md", "toml")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "jobs.toml").write_text(text)
    pool, (job,) = read_cluster(tmp_path / "jobs.toml")
    assert (pool.policy, pool.interval_seconds, job.name, job.max_cores) == ("goodput", 30, "digits", 8)


def other(name, checkpoint):
    return JOB.replace('"a"', f'"{name}"').replace('"runs/a"', f'"{checkpoint}"')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"jobs.toml: the file must have a \[\[job\]\], got none"),
        ("[[job", "jobs.toml: the file must be TOML"),
        (JOB.replace("name", "nam"), r"\[\[job\]\] 1 must have only the names .*, got 'nam' \(did you mean 'name'\?\)"),
        ('[[job]]\nname = "a"\n', r"\[\[job\]\] 1 must have script and checkpoint"),
        (JOB.replace("train.py", "none.py"), r"\[\[job\]\] 1: script: must be an existing file, got .*none.py"),
        (JOB + "min_cores = 0\n", r"\[\[job\]\] 1: `min_cores` must be a positive integer, got 0"),
        (JOB + "min_cores = 3\nmax_cores = 2\n", "max_cores: must be at least min_cores, which is 3, got 2"),
        (JOB + 'max_cores = "2"\n', "max_cores: must not be a string, got '2'"),
        (JOB + "args = [1]\n", "args: must be a list of strings"),
        (JOB + "arrives = -1\n", "`arrives` must be a non-negative number, got -1"),
        (JOB + "arrives = [1]\n", r"\[\[job\]\] 1: `arrives` must be a non-negative number, got \[1\]"),
        (JOB + "arrives = true\n", "`arrives` must be a non-negative number, got True"),
        ("[pool]\npower = [1]\n" + JOB, r"`power` must be a number from -10 to 1, got \[1\]"),
        ("[pool]\nprice_per_core_hour = [1]\n" + JOB, r"`price_per_core_hour` must be a positive number, got \[1\]"),
        (JOB.replace('"a"', '"a/b"', 1), "name: must have only letters, digits"),
        (JOB + JOB, "each job must have its own name, but a and a have a"),
        (JOB + other("b", "./runs/../runs/a"), "each job must have its own checkpoint, but b and a have .*runs/a"),
        (
            other("a", "s3://x/y/") + other("b", "s3://x/y"),
            "each job must have its own checkpoint, but b and a have s3://x/y",
        ),
        ('[pool]\npolicy = "best"\n' + JOB, r"\[pool\]: `policy` must be one of 'goodput', .*, got 'best'"),
        ("[pool]\npower = 2\n" + JOB, r"\[pool\]: `power` must be a number from -10 to 1, got 2"),
        ("[pool]\npower = -inf\n" + JOB, "`power` must be a number from -10 to 1, got -inf"),
        ("[pool]\npower = nan\n" + JOB, "`power` must be a number from -10 to 1, got nan"),
        ("[pool]\nprice_per_core_hour = 1\n" + JOB, "`worth_per_core_hour` must be a positive number, got None"),
        ("[pool]\nrequest_nodes = 1\n" + JOB, "`request_nodes` must be true or false, got 1"),
        ("[pool]\nfailures = 1.5\n" + JOB, "`failures` must be a positive integer, got 1.5"),
        ("[pool]\nhorizon_seconds = inf\n" + JOB, "`horizon_seconds` must be a positive number, got inf"),
        (JOB.replace("runs/a", ""), "checkpoint: must be a directory or URL, got ''"),
        (JOB + "min_cores = true\n", "`min_cores` must be a positive integer, got True"),
        (JOB + "environment = {RANK = 1}\n", "environment: must be a table of strings"),
        ("job = 3\n", r"the file must have a \[\[job\]\], got none"),
        ("pool = 3\n" + JOB, r"\[pool\]: must be a table, got 3"),
        ("[pool]\ninterval_seconds = 0\n" + JOB, "`interval_seconds` must be a positive number, got 0"),
    ],
)
def test_mistakes_are_refused_with_their_place(read, text, message):
    with pytest.raises(ValueError, match=message):
        read(text)


def test_a_path_and_its_url_are_one_checkpoint_and_marks_of_editors_are_skipped(read, tmp_path):
    with pytest.raises(ValueError, match="each job must have its own checkpoint, but b and a have"):
        read(JOB + other("b", f"file://{tmp_path}/runs/a"))
    assert read("\ufeff" + JOB)[1][0].name == "a"
    (tmp_path / "jobs.toml").write_bytes(JOB.encode("utf-16"))
    with pytest.raises(ValueError, match=r"jobs.toml: the file must be TOML: .*utf-8"):
        read_cluster(tmp_path / "jobs.toml")
