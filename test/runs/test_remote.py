"""Checkpoints and logs as objects, through a real S3 server."""

import gc
import json
import os
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import bucket_run
import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from small_runs import sgd

import variable_batch_size as vbs
from variable_batch_size.runs.remote import RemoteDirectory

ROOT = Path(__file__).parents[2]
NUM_STEPS = len(bucket_run.SIZES)

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:botocore", "ignore::DeprecationWarning:aiobotocore")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The URL of an S3 server in a separate process, which listens on a free port and prints it."""
    output = tmp_path_factory.mktemp("server") / "output.txt"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with open(output, "w") as file:
        running = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        while not (found := re.search(r"Running on (http://127\.0\.0\.1:\d+)\s", output.read_text())):
            assert running.poll() is None, output.read_text()
            time.sleep(0.1)
        yield found[1]
    finally:
        running.kill()
        running.wait()


@pytest.fixture
def bucket(server, monkeypatch):
    """A bucket for this process and its children."""
    import s3fs

    for name, value in {**KEYS, "AWS_ENDPOINT_URL": server}.items():
        monkeypatch.setenv(name, value)
    files = s3fs.S3FileSystem(skip_instance_cache=True)
    if not files.exists("bucket"):
        files.mkdir("bucket")
    return "s3://bucket"


@pytest.mark.parametrize(("kills", "exceptions"), [(4, 1), pytest.param(20, 3, marks=pytest.mark.long)])
def test_run_killed_during_uploads_resumes_from_the_last_complete_checkpoint(bucket, kills, exceptions):
    run = f"{bucket}/run-{kills}"
    command = [sys.executable, ROOT / "test" / "support" / "bucket_run.py", run, kills, exceptions]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([str(part) for part in command], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])  # gloo also prints something
    assert found["stopped"] == kills + exceptions
    assert found["difference"] < 1e-6
    assert found["names"][:2] == ["executed.csv", "run.json"]
    assert found["names"][3:] == [f"step-{NUM_STEPS:09d}.pt"]


def records(store, name, folder):
    store.download(folder / name)
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_log_resumes_from_its_object(bucket, tmp_path):
    for first in (1, 3):
        sink = vbs.JsonLines(f"{bucket}/log/steps.jsonl")
        for step in range(first, first + 4):
            sink({"step": step, "session": first})
        sink.close()
    found = records(RemoteDirectory(f"{bucket}/log"), "steps.jsonl", tmp_path)
    assert [(record["step"], record["session"]) for record in found] == [(1, 1), (2, 1), *((n, 3) for n in range(3, 7))]


def test_unclosed_sink_uploads_its_records_when_garbage_collected(bucket, tmp_path):
    sink = vbs.JsonLines(f"{bucket}/dropped/steps.jsonl")
    sink({"step": 1})
    sink._file.close()
    del sink
    gc.collect()
    assert records(RemoteDirectory(f"{bucket}/dropped"), "steps.jsonl", tmp_path) == [{"step": 1}]


def test_closed_sink_does_not_overwrite_lines_of_another(bucket, tmp_path):
    first, second = (vbs.JsonLines(f"{bucket}/added/steps.jsonl") for _ in range(2))
    for step, sink in enumerate((first, second)):
        sink({"step": step})
        sink.close()
    del first, sink
    gc.collect()
    assert records(RemoteDirectory(f"{bucket}/added"), "steps.jsonl", tmp_path) == [{"step": 0}, {"step": 1}]


def test_a_process_that_ends_uploads_what_is_left_through_new_connections(bucket, server):
    program = f"""
import threading
import variable_batch_size as vbs
from variable_batch_size.runs.remote import RemoteDirectory
from variable_batch_size.runs.store import AsyncWriter

is_ending = threading.Event()

def write():
    is_ending.wait()
    remote = RemoteDirectory("{bucket}/ended")
    (remote.folder / "written").write_text("whole")
    remote.upload()

writer = AsyncWriter()
writer.start(write)
sink = vbs.JsonLines("{bucket}/ended/steps.jsonl")
sink({{"step": 1}})
threading._register_atexit(is_ending.set)  # called first
"""
    # with a name to be looked up, as real ones have
    variables = {**os.environ, "AWS_ENDPOINT_URL": server.replace("127.0.0.1", "localhost")}
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert RemoteDirectory(f"{bucket}/ended").names() == ["steps.jsonl", "written"]


class Faltering(MemoryFileSystem):
    """A store that is sometimes unreachable."""

    protocol = "faltering"
    is_there = True

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("faltering://", "memory://"))

    def put_file(self, *args, **kwargs):
        if not Faltering.is_there:
            raise ConnectionError("not there")
        super().put_file(*args, **kwargs)


def run_in(url, keep):
    model = torch.nn.Linear(2, 1)
    sampler = vbs.CustomSampler(dataset_size=8, trace=2, minibatch_size=2)
    optimizer = vbs.ConstantOptimizer(sgd(model), sampler, model=model)
    return model, optimizer, vbs.Checkpoint(url, model=model, optimizer=optimizer, keep=keep)


def test_checkpoint_that_failed_to_upload_does_not_count_toward_keep():
    fsspec.register_implementation("faltering", Faltering, clobber=True)
    model, optimizer, checkpoint = run_in("faltering://run", keep=2)
    for step in range(4):
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
        Faltering.is_there = step not in (1, 2)
        with nullcontext() if Faltering.is_there else pytest.raises(OSError, match="not there"):
            checkpoint.save()
    names = RemoteDirectory("faltering://run").names()
    assert names == ["executed.csv", "run.json", "step-000000001.pt", "step-000000004.pt"]


def test_a_run_that_resumes_does_not_touch_the_checkpoints_before_its_own(tmp_path):
    sizes = []
    for _ in range(2):
        model, optimizer, checkpoint = run_in("memory://untouched", keep=9)
        (checkpoint._store.folder / "unfinished.tmp").touch()
        for _ in range(2):
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()
            checkpoint.save()
        sizes.append({entry["name"]: entry["size"] for entry in MemoryFileSystem().ls("/untouched", detail=True)})
    first, second = sizes
    steps = [f"/untouched/step-00000000{step}.pt" for step in range(1, 5)]
    assert sorted(second) == ["/untouched/executed.csv", "/untouched/run.json", *steps]
    assert [first[name] for name in steps[:2]] == [second[name] for name in steps[:2]]
    assert min(second[name] for name in steps) > 1000


def test_a_log_whose_store_is_away_for_a_while_warns_and_catches_up(monkeypatch, tmp_path, caplog):
    fsspec.register_implementation("faltering", Faltering, clobber=True)
    monkeypatch.setattr("variable_batch_size.runs.remote._SECONDS_BETWEEN_UPLOADS", 0.0)
    sink = vbs.JsonLines("faltering://log/steps.jsonl")
    for step, is_there in enumerate([True, False, False, True]):
        monkeypatch.setattr(Faltering, "is_there", is_there)
        sink({"step": step})
    store = RemoteDirectory("faltering://log")
    assert [record["step"] for record in records(store, "steps.jsonl", tmp_path)] == [0, 1, 2, 3]
    message = "records are not uploaded yet: faltering://log/steps.jsonl could not be written: not there"
    assert caplog.messages == [message] * 2
    monkeypatch.setattr(Faltering, "is_there", False)
    sink({"step": 4})
    with pytest.raises(OSError, match="not there"):
        sink.close()


def test_tensorboard_has_files_of_each_session(bucket):
    for first in (1, 3):
        sink = vbs.TensorBoard(f"{bucket}/board")
        sink({"step": first, "samples": 8 * first, "loss": 0.5})
        sink.close()
    assert len(RemoteDirectory(f"{bucket}/board/steps").names()) == 2
    assert len(RemoteDirectory(f"{bucket}/board/samples").names()) == 2


def test_a_bucket_that_is_not_there_is_refused_at_the_start(bucket):
    with pytest.raises(ValueError, match="`directory` must be writable, got s3://nowhere/run: "):
        bucket_run.train("s3://nowhere/run")


def test_a_damaged_checkpoint_is_named_by_its_address(bucket):
    remote = RemoteDirectory(f"{bucket}/broken")
    for steps in (8, 9):
        (remote.folder / f"step-{steps:09d}.pt").write_text("broken")
    remote.upload()
    message = (
        "^s3://bucket/broken/step-000000008.pt is damaged, truncated or not a checkpoint: File is not a zip file; no "
        "older checkpoint is left: move step-000000009.pt, step-000000008.pt away to start from the beginning$"
    )
    with pytest.raises(ValueError, match=message):
        bucket_run.train(f"{bucket}/broken")


def test_a_damaged_object_is_renamed_and_the_run_resumes_from_the_one_before(caplog):
    model, optimizer, checkpoint = run_in("memory://damaged", keep=1)
    store, name = MemoryFileSystem(), "/damaged/step-000000002.pt"
    for _ in range(2):
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
        before = store.cat_file("/damaged/step-000000001.pt") if optimizer.steps_done == 2 else None
        checkpoint.save()
    store.pipe_file("/damaged/step-000000001.pt", before)
    content = bytearray(store.cat_file(name))
    content[len(content) // 2] ^= 1
    store.pipe_file(name, bytes(content))
    model, optimizer, checkpoint = run_in("memory://damaged", keep=1)
    assert optimizer.steps_done == 1
    assert re.fullmatch(
        "memory:/" + name + " is damaged.*; resuming from step-000000001.pt instead", caplog.messages[0]
    )
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    checkpoint.save()
    names = RemoteDirectory("memory://damaged").names()
    assert names == ["damaged-step-000000002.pt", "executed.csv", "run.json", "step-000000002.pt"]
    assert store.cat_file("/damaged/damaged-step-000000002.pt") == bytes(content)
    assert run_in("memory://damaged", keep=1)[1].steps_done == 2


def test_a_trace_is_read_from_a_bucket(bucket):
    remote = RemoteDirectory(f"{bucket}/traces")
    (remote.folder / "spot.csv").write_text("# from a bucket\nstep,batchsize\n0,64\n1,96\n")
    remote.upload()
    trace = vbs.Trace.read(f"{bucket}/traces/spot.csv")
    assert (list(trace), trace.name, trace.comment) == ([64, 96], f"{bucket}/traces/spot.csv", "from a bucket")
    with pytest.raises(ValueError, match=r"^s3://bucket/traces/spot\.csv:4: batchsize must be a multiple of 64"):
        vbs.CustomSampler(1000, f"{bucket}/traces/spot.csv", minibatch_size=64)
    with pytest.raises(OSError, match=r"^s3://bucket/traces/none\.csv could not be read: "):
        vbs.Trace.read(f"{bucket}/traces/none.csv")
    with pytest.raises(
        ValueError, match=r"a trace must be written to a path on this machine, got s3://bucket/new\.csv"
    ):
        trace.write(f"{bucket}/new.csv")


def test_a_trace_at_a_url_that_cannot_be_read_names_the_extra():
    with pytest.raises(
        ImportError, match=r"^gs://bucket/a\.csv needs gcsfs: pip install 'variable_batch_size\[gs\]', or"
    ):
        vbs.Trace.read("gs://bucket/a.csv")
    with pytest.raises(ValueError, match='pass remote URLs as str, because pathlib turns "://" into ":/"'):
        vbs.Trace.read(Path("s3://bucket/a.csv"))


def test_unsupported_addresses_are_refused(tmp_path):
    with pytest.raises(ImportError, match=r"^gs://bucket/run needs gcsfs: pip install 'variable_batch_size\[gs\]', or"):
        bucket_run.train("gs://bucket/run")
    with pytest.raises(ImportError, match=r"^git://run: Install pygit2 to browse local git repos$"):
        bucket_run.train("git://run")
    with pytest.raises(
        ValueError, match=r"^nothing://run is not a URL that fsspec supports: Protocol not known: nothing"
    ):
        bucket_run.train("nothing://run")
    with pytest.raises(ValueError, match='pass remote URLs as str, because pathlib turns "://" into ":/", got Po'):
        bucket_run.train(Path("s3://bucket/run"))
    with pytest.raises(
        ValueError, match="a chained URL is not supported: pass one protocol, as in s3://bucket/run, got "
    ):
        bucket_run.train("filecache::s3://bucket/run")


def test_file_url_is_a_local_directory(tmp_path):
    bucket_run.train(f"file://{tmp_path}/run")
    assert (tmp_path / "run" / "executed.csv").exists()
