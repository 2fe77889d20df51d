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

import variable_batch_size as vbs
from variable_batch_size.runs.remote import ObjectStore

HERE = Path(__file__).parent.parent
NUM_STEPS = len(bucket_run.SIZES)

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:botocore", "ignore::DeprecationWarning:aiobotocore")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """An S3 server, in a process of its own, by its address: it listens at a port that is free, and prints that."""
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
    """A bucket that this process and those that it starts can use."""
    import s3fs

    for name, value in {**KEYS, "AWS_ENDPOINT_URL": server}.items():
        monkeypatch.setenv(name, value)
    files = s3fs.S3FileSystem(skip_instance_cache=True)
    if not files.exists("bucket"):
        files.mkdir("bucket")
    return "s3://bucket"


def test_killed_at_random_instants_of_an_upload_a_run_goes_on_from_the_last_whole_checkpoint(bucket):
    command = [sys.executable, HERE / "bucket_run.py", f"{bucket}/run", "20", "3"]
    variables = {**os.environ, "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}"}
    done = subprocess.run([str(part) for part in command], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])  # gloo says something, too
    assert found["stopped"] == 23
    assert found["difference"] < 1e-6
    assert found["names"][0] == "executed.csv"
    assert found["names"][2:] == [f"step-{NUM_STEPS:09d}.pt"]


def records(store, name, folder):
    store.download(name, folder / name)
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_a_log_goes_on_where_its_object_was(bucket, tmp_path):
    for first in (1, 3):
        sink = vbs.JsonLines(f"{bucket}/log/steps.jsonl")
        for step in range(first, first + 4):
            sink({"step": step, "session": first})
        sink.close()
    found = records(ObjectStore(f"{bucket}/log"), "steps.jsonl", tmp_path)
    assert [(record["step"], record["session"]) for record in found] == [(1, 1), (2, 1), *((n, 3) for n in range(3, 7))]


def test_records_that_nobody_closed_are_uploaded_when_the_sink_is_dropped(bucket, tmp_path):
    sink = vbs.JsonLines(f"{bucket}/dropped/steps.jsonl")
    sink({"step": 1})
    sink._file.close()
    del sink
    gc.collect()
    assert records(ObjectStore(f"{bucket}/dropped"), "steps.jsonl", tmp_path) == [{"step": 1}]


def test_a_sink_that_was_closed_does_not_take_back_what_another_has_added(bucket, tmp_path):
    first, second = (vbs.JsonLines(f"{bucket}/added/steps.jsonl") for _ in range(2))
    for step, sink in enumerate((first, second)):
        sink({"step": step})
        sink.close()
    del first, sink
    gc.collect()
    assert records(ObjectStore(f"{bucket}/added"), "steps.jsonl", tmp_path) == [{"step": 0}, {"step": 1}]


def test_a_process_that_ends_uploads_what_is_left_through_new_connections(bucket, server, tmp_path):
    program = f"""
import time
from pathlib import Path
import variable_batch_size as vbs
from variable_batch_size.runs.remote import ObjectStore
from variable_batch_size.runs.async_writer import AsyncWriter

def write():
    time.sleep(0.5)  # until the process is ending
    ObjectStore("{bucket}/ended").upload(Path("{tmp_path}/written"), "written")

writer = AsyncWriter()
writer.start(write)
sink = vbs.JsonLines("{bucket}/ended/steps.jsonl")
sink({{"step": 1}})
"""
    (tmp_path / "written").write_text("whole")
    # with a name to be looked up, as real ones have
    variables = {**os.environ, "AWS_ENDPOINT_URL": server.replace("127.0.0.1", "localhost")}
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert ObjectStore(f"{bucket}/ended").names() == ["steps.jsonl", "written"]


class Faltering(MemoryFileSystem):
    """A store that is not always there."""

    protocol = "faltering"
    is_there = True

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("faltering://", "memory://"))

    def put_file(self, *args, **kwargs):
        if not Faltering.is_there:
            raise ConnectionError("not there")
        super().put_file(*args, **kwargs)


def test_a_checkpoint_that_could_not_be_uploaded_is_none_of_those_that_stay():
    fsspec.register_implementation("faltering", Faltering, clobber=True)
    model = torch.nn.Linear(2, 1)
    sampler = vbs.CustomSampler(dataset_size=8, trace=2, minibatch_size=2)
    optimizer = vbs.ConstantOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sampler, model=model)
    checkpoint = vbs.Checkpoint("faltering://run", model=model, optimizer=optimizer, keep=2)
    for step in range(4):
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
        Faltering.is_there = step not in (1, 2)
        with nullcontext() if Faltering.is_there else pytest.raises(OSError, match="not there"):
            checkpoint.save()
    names = ObjectStore("faltering://run").names()
    assert names == ["executed.csv", "step-000000001.pt", "step-000000004.pt"]


def test_a_log_whose_store_is_away_for_a_while_warns_and_catches_up(monkeypatch, tmp_path, caplog):
    fsspec.register_implementation("faltering", Faltering, clobber=True)
    monkeypatch.setattr("variable_batch_size.runs.remote._SECONDS_BETWEEN_UPLOADS", 0.0)
    sink = vbs.JsonLines("faltering://log/steps.jsonl")
    for step, is_there in enumerate([True, False, False, True]):
        monkeypatch.setattr(Faltering, "is_there", is_there)
        sink({"step": step})
    store = ObjectStore("faltering://log")
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
    assert len(ObjectStore(f"{bucket}/board/steps").names()) == 2
    assert len(ObjectStore(f"{bucket}/board/samples").names()) == 2


def test_a_bucket_that_is_not_there_is_refused_at_the_start(bucket):
    with pytest.raises(ValueError, match="`directory` must be one that can be written to, got s3://nowhere/run: "):
        bucket_run.train("s3://nowhere/run")


def test_a_checkpoint_that_does_not_load_is_named_by_its_address(bucket, tmp_path):
    (tmp_path / "broken").write_text("broken")
    for steps in (8, 9):
        ObjectStore(f"{bucket}/broken").upload(tmp_path / "broken", f"step-{steps:09d}.pt")
    message = "s3://bucket/broken/step-000000009.pt does not load, .*; move it away to go on from step-000000008.pt"
    with pytest.raises(ValueError, match=message):
        bucket_run.train(f"{bucket}/broken")


def test_what_is_no_address_of_objects_is_refused(tmp_path):
    with pytest.raises(ImportError, match=r"gs://bucket/run needs gcsfs: pip install gcsfs"):
        bucket_run.train("gs://bucket/run")
    with pytest.raises(ValueError, match="nothing://run is no address that fsspec knows: Protocol not known: nothing"):
        bucket_run.train("nothing://run")
    with pytest.raises(ValueError, match="an address must be a text, as a path has lost a slash of it"):
        bucket_run.train(Path("s3://bucket/run"))
    with pytest.raises(
        ValueError, match="an address must begin with the protocol of the objects, as s3://bucket/run, "
    ):
        bucket_run.train("filecache::s3://bucket/run")


def test_a_file_address_is_a_directory_of_this_machine(tmp_path):
    bucket_run.train(f"file://{tmp_path}/run")
    assert (tmp_path / "run" / "executed.csv").exists()
