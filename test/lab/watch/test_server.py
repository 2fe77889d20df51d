"""The server of vbs watch: what it answers, and to whom."""

import http.client
import json
import socket
import threading
from contextlib import contextmanager, suppress

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from watched_runs import line, write_log

from variable_batch_size.lab.watch import server as server_module
from variable_batch_size.lab.watch.server import Server, Watcher


@contextmanager
def serving(*directories, host="127.0.0.1", forecast=None):
    watcher = Watcher([str(directory) for directory in directories], {})
    server = Server(watcher, forecast or (lambda directory, query: {"lead": directory}), host=host, port=0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        watcher.close()
        thread.join()


def get(server, path, *, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    connection.request(method, path, headers={name.replace("_", "-"): text for name, text in headers.items()})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content, answer


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(server_module, "_LONGEST_WAIT", 0.1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (folder / "secret.txt").write_text("secret")
    return write_log(folder / "a", range(1, 5)), write_log(folder / "b", range(1, 3))


@pytest.fixture(scope="module")
def server(runs):
    with serving(*runs) as server:
        yield server


def test_the_page_and_its_parts_are_served_from_the_package(server):
    assert server.url == f"http://127.0.0.1:{server.server_address[1]}/"
    status, page, answer = get(server, "/")
    assert (status, b"<title>Runs</title>" in page) == (200, True)
    assert "default-src 'self'" in answer.getheader("Content-Security-Policy")
    for name, kind in (("page.js", "text/javascript"), ("page.css", "text/css"), ("plotly.js", "text/javascript")):
        status, content, answer = get(server, f"/{name}")
        assert (status, answer.getheader("Content-Type"), len(content) > 500) == (200, kind, True)
    assert get(server, "/plotly.js", Accept_Encoding="gzip")[2].getheader("Content-Encoding") == "gzip"


def test_data_are_sent_once_for_each_version(server, runs):
    status, content, _ = get(server, "/data?seen=-1")
    found = json.loads(content)
    assert status == 200
    assert [run["name"] for run in found["runs"]] == [str(run) for run in runs]
    assert found["runs"][0]["log"]["step"] == [1, 2, 3, 4]
    assert get(server, f"/data?seen={found['version']}")[:2] == (204, b"")
    for seen in ("x", "--5", "-", "9" * 5000, ""):
        assert get(server, f"/data?seen={seen}")[0] == 200


def test_invalid_addresses_are_refused(server, capfd):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    connection.putrequest("GET", "http://[/", skip_host=True)
    connection.putheader("Host", "localhost")
    connection.endheaders()
    assert connection.getresponse().status == 400
    connection.close()
    assert capfd.readouterr().err == ""


def test_the_page_of_an_earlier_server_gets_the_data_of_this_one(runs):
    seen = []
    for run in runs:
        with serving(run) as server:
            seen.append(json.loads(get(server, f"/data?seen={seen[-1] if seen else ''}")[1])["version"])


def test_a_store_that_does_not_answer_is_reported_and_stops_no_other_run(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "_LONGEST_LOOK", 0.1)
    answers, files = threading.Event(), fsspec.filesystem("memory")
    files.pipe_file(f"{tmp_path}/log.jsonl", line(1).encode())
    look = MemoryFileSystem.info

    def wait(self, path, **options):
        answers.wait()
        return look(self, path, **options)

    monkeypatch.setattr(MemoryFileSystem, "info", wait)
    try:
        with serving(f"memory://{tmp_path}", write_log(tmp_path / "here", range(1, 5))) as server:
            found = {"runs": [{"why": ""}], "version": ""}
            while "have not answered" not in found["runs"][0]["why"]:
                content = get(server, f"/data?seen={found['version']}")[1]
                found = json.loads(content) if content else found
                assert found["runs"][1]["latest"]["step"] == 4
            assert found["runs"][0]["state"] == "waiting"
            answers.set()
            while (found["runs"][0]["state"], found["runs"][0]["why"]) != ("running", ""):
                content = get(server, f"/data?seen={found['version']}")[1]
                found = json.loads(content) if content else found
            assert found["runs"][0]["latest"]["step"] == 1
    finally:
        answers.set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_reader_that_has_failed_is_reported(tmp_path, monkeypatch):
    def fail():
        raise RuntimeError("a bug")

    with serving(write_log(tmp_path, range(1, 5))) as server:
        seen = json.loads(get(server, "/data")[1])["version"]
        monkeypatch.setattr(server.watcher.runs[0], "poll", fail)
        server.watcher._readers[0].join()
        assert get(server, f"/data?seen={seen}")[:2] == (
            500,
            b"vbs watch has failed to read the runs, and has printed why\n",
        )


@pytest.mark.parametrize(
    "path",
    ["/secret.txt", "/../secret.txt", "/a/log.jsonl", "//etc/passwd", "/%2e%2e/secret.txt", "/page.html", "/data/../x"],
)
def test_nothing_else_is_served(server, path):
    status, content, _ = get(server, path)
    assert (status, b"secret" in content) == (404, False)
    assert get(server, "/data", method="POST")[0] == 501


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "localhost:1:1",
        "1",
        "evil.example:8765",
        "127.0.0.1.evil.example:80",
        "",
    ],
)
def test_names_that_lead_to_this_machine_are_refused(server, host):
    assert get(server, "/data", Host=host)[0] == 403
    for own in ("localhost:1", "127.0.0.1:8765", "[::1]:1", "127.0.0.1"):  # without a port, which is 80
        assert get(server, "/data", Host=own)[0] == 200


def test_another_address_needs_the_token(runs):
    with serving(*runs, host="0.0.0.0") as server:
        token = server.url.partition("?token=")[2]
        assert len(token) > 15
        for path in ("/", "/data", "/plotly.js", "/data?token=", "/data?token=wrong", "/forecast?run=0"):
            assert get(server, path)[0] == 403
        name = f"vbs-token-{server.server_address[1]}"
        assert get(server, "/data", Cookie=f"{name}=wrong")[0] == 403
        assert get(server, "/data", Cookie="\x01=;;")[0] == 403
        status, _, answer = get(server, f"/?token={token}", Host="example.org")
        cookie = answer.getheader("Set-Cookie")
        assert status == 200 and "HttpOnly" in cookie and "SameSite=Strict" in cookie
        assert cookie.startswith(f"{name}={token};")  # of this port: a host has one set of cookies
        others = 'a={"b": 1}; vbs-token-1=other; '
        assert get(server, "/data", Cookie=others + cookie.partition(";")[0])[0] == 200


def test_a_silent_client_is_disconnected(server, monkeypatch, capfd):
    assert 10 < server.RequestHandlerClass.timeout < 600
    monkeypatch.setattr(server.RequestHandlerClass, "timeout", 0.05)
    # an error if the server was faster than this client
    with socket.create_connection(server.server_address) as client, suppress(ConnectionError):
        client.sendall(b"GET / HTTP/1.1\r\nHost: loc")
        client.settimeout(60)
        assert client.recv(10) == b""
    assert capfd.readouterr().err == ""


def test_a_forecast_is_of_a_run_by_its_number(server, runs):
    assert json.loads(get(server, "/forecast?run=1")[1]) == {"lead": str(runs[1])}
    for number in ("2", "-1", "x", ""):
        error = json.loads(get(server, f"/forecast?run={number}")[1])["error"]
        assert error == f"`run` must be the number of a run, below 2, got {number!r}"


def test_errors_of_a_forecast_are_answers(runs):
    def fail(directory, query):
        raise ValueError(f"<b>{query['samples']}</b>")

    with serving(*runs, forecast=fail) as server:
        assert json.loads(get(server, "/forecast?run=0&samples=5")[1]) == {"error": "<b>5</b>"}


def test_new_records_arrive_without_a_request(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "_SECONDS_BETWEEN_LOOKS", 0.01)
    write_log(tmp_path, range(1, 5))
    with serving(tmp_path) as server:
        seen = json.loads(get(server, "/data")[1])["version"]
        with (tmp_path / "log.jsonl").open("a") as file:
            file.write(line(5))
        while (answer := get(server, f"/data?seen={seen}"))[0] == 204:
            pass
        assert json.loads(answer[1])["runs"][0]["latest"]["step"] == 5
