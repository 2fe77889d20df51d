"""The server of the page: a thread that reads each run, and HTTP for a browser, by default on this machine only."""

import gzip
import hmac
import json
import math
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, urlsplit

from variable_batch_size.checks import import_extra
from variable_batch_size.lab.watch.run import WatchedRun

LOOPBACK = "127.0.0.1"
_NAMES_OF_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_SECONDS_BETWEEN_LOOKS = 0.1
_SECONDS_BETWEEN_READS = 0.005  # of a long file; requests are answered in between
_LONGEST_LOOK = 10.0  # seconds after which the page shows that files do not answer
_MOST_VERSIONS = 2**40  # of all runs
_LONGEST_WAIT = 5.0  # seconds after which a request for news is answered with none
_TYPES = {"html": "text/html; charset=utf-8", "js": "text/javascript", "css": "text/css", "json": "application/json"}
_MOST_SECONDS_OF_SILENCE = 60.0  # of a client that has not sent its request, or does not read its answer
# Plotly sets the styles of elements; everything else must come from this server
_POLICY = "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; frame-ancestors 'none'"

Forecast = Callable[[str, Mapping[str, str]], Any]  # of a directory, with the options of a query


class _Reader(threading.Thread):
    """Polls a run. A store that does not answer blocks this thread, but no other."""

    def __init__(self, run: WatchedRun, goal: Mapping[str, float], news: threading.Condition) -> None:
        super().__init__(daemon=True)
        self.watched, self.has_ended = run, threading.Event()
        self._goal, self._news, self._lock = goal, news, threading.Lock()
        self._began = math.inf  # when the current look began
        self._shown = run.as_dict(goal)

    def look(self) -> bool:
        """Read what is new, and return whether there may be more."""
        before, self._began = self.watched.version, time.monotonic()
        with self._lock:
            has_more = self.watched.poll()
        self._began = math.inf
        if self.watched.version != before:
            with self._news:
                self._news.notify_all()
        return has_more

    def run(self) -> None:
        while not self.has_ended.is_set():
            self.has_ended.wait(_SECONDS_BETWEEN_READS if self.look() else _SECONDS_BETWEEN_LOOKS)

    @property
    def is_late(self) -> bool:
        """Whether its files do not answer."""
        return time.monotonic() - self._began > _LONGEST_LOOK

    def as_dict(self) -> dict[str, Any]:
        """What the page shows; if the files do not answer, what it showed before."""
        is_late = self.is_late
        if self._lock.acquire(timeout=0.0 if is_late else _LONGEST_LOOK):
            self._shown = self.watched.as_dict(self._goal)
            self._lock.release()
        return (
            {**self._shown, "why": f"its files have not answered for {_LONGEST_LOOK:g} s"} if is_late else self._shown
        )


class Watcher:
    """Polls the runs, each in a thread, and has what the page asks for."""

    def __init__(self, directories: Sequence[str], goal: Mapping[str, float]) -> None:
        self.runs = [WatchedRun(directory) for directory in directories]
        self.is_closed, self._news, self._making = False, threading.Condition(), threading.Lock()
        self._first_version = time.time_ns() // 1_000_000  # a page of an earlier server may still be open
        self._made: tuple[int, bytes] = (-1, b"")
        self._readers = [_Reader(run, goal, self._news) for run in self.runs]
        for reader in self._readers:
            if not reader.watched.is_remote:
                reader.look()
                reader.as_dict()  # what is shown from the start
            reader.start()

    @property
    def _version(self) -> int:
        num_late = sum(reader.is_late for reader in self._readers)
        return self._first_version + sum(run.version for run in self.runs) + num_late * _MOST_VERSIONS

    def data(self, seen: int) -> bytes | None:
        """All runs as JSON, as soon as something has changed since the version that was seen; None if nothing has."""
        with self._news:
            self._news.wait_for(lambda: self._version != seen or self.is_closed, _LONGEST_WAIT)
        if not all(reader.is_alive() for reader in self._readers) and not self.is_closed:
            raise RuntimeError("vbs watch has failed to read the runs, and has printed why")
        with self._making:
            version = self._version
            if version == seen:
                return None
            if version != self._made[0]:
                runs = [reader.as_dict() for reader in self._readers]
                text = json.dumps({"version": version, "runs": runs}, allow_nan=False)
                self._made = version, text.encode()
            return self._made[1]

    def close(self) -> None:
        """End the threads, and answer all waiting requests."""
        self.is_closed = True
        for reader in self._readers:
            reader.has_ended.set()
        with self._news:
            self._news.notify_all()
        for reader in self._readers:
            reader.join(timeout=_LONGEST_LOOK if not reader.watched.is_remote else 0.0)


class Server(ThreadingHTTPServer):
    """Serves the page and the data of a watcher, and nothing else. `token` is needed if others can reach it."""

    daemon_threads = True

    def __init__(self, watcher: Watcher, forecast: Forecast, *, host: str, port: int) -> None:
        self.watcher, self.forecast = watcher, forecast
        self.is_local = host in (LOOPBACK, "localhost")
        self.token = None if self.is_local else secrets.token_urlsafe(16)
        library = import_extra("plotly.offline", "vbs watch needs plotly", "compare").get_plotlyjs()
        here = files("variable_batch_size.lab.watch")
        self.files = {name: (here / name).read_bytes() for name in ("page.html", "page.js", "page.css")}
        self.files["plotly.js"] = library.encode()
        self.compressed = gzip.compress(self.files["plotly.js"], 1)
        self.one_forecast = threading.Lock()  # at a time
        super().__init__((host, port), _Handler)
        self.cookie = f"vbs-token-{self.server_address[1]}"  # a browser shares cookies among the ports of a host

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print an error, unless it is only that a browser has closed its connection."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        """The address of the page, with the token."""
        host, port = self.server_address[:2]
        query = "" if self.token is None else f"?token={self.token}"
        return f"http://{host if isinstance(host, str) else host.decode()}:{port}/{query}"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"  # keeps the connection
    timeout = _MOST_SECONDS_OF_SILENCE

    def do_GET(self) -> None:
        """Answer one of the few supported requests."""
        if self.server.watcher.is_closed:
            self.close_connection = True
            return
        try:
            address = urlsplit(self.path)
        except ValueError:  # an invalid host
            self._send(HTTPStatus.BAD_REQUEST, "text/plain", b"there is no such address\n")
            return
        query = {name: values[-1] for name, values in parse_qs(address.query).items()}
        if not self._is_allowed(query):
            self._send(
                HTTPStatus.FORBIDDEN, "text/plain", b"the address must have the token that vbs watch has printed\n"
            )
        elif address.path == "/":
            self._send(HTTPStatus.OK, _TYPES["html"], self.server.files["page.html"])
        elif address.path == "/data":
            seen = query.get("seen", "")
            try:
                text = self.server.watcher.data(int(seen) if seen.isdecimal() and len(seen) < 20 else -1)
            except RuntimeError as error:
                self._send(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", f"{error}\n".encode())
                return
            self._send(HTTPStatus.NO_CONTENT if text is None else HTTPStatus.OK, _TYPES["json"], text or b"")
        elif address.path == "/forecast":
            self._forecast(query)
        elif address.path[1:] in self.server.files and address.path != "/page.html":
            name = address.path[1:]
            self._send(HTTPStatus.OK, _TYPES[name.rpartition(".")[2]], self.server.files[name])
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"there is no such page\n")

    def _forecast(self, query: Mapping[str, str]) -> None:
        number = query.get("run", "")
        runs = self.server.watcher.runs
        try:
            if not number.isdecimal() or int(number) >= len(runs):
                raise ValueError(f"`run` must be the number of a run, below {len(runs)}, got {number!r}")
            with self.server.one_forecast:
                answer = self.server.forecast(runs[int(number)].name, query)
        except (ValueError, OSError, ImportError) as error:
            answer = {"error": str(error)}
        self._send(HTTPStatus.OK, _TYPES["json"], json.dumps(answer, allow_nan=False).encode())

    def _is_allowed(self, query: Mapping[str, str]) -> bool:
        """Whether the request has the token; on this machine, whether it names this machine.

        Another site might make its name resolve to this machine, and its page could then read the answers.
        """
        token = self.server.token
        if token is None:
            return re.sub(r":\d*$", "", self.headers.get("Host", "")) in _NAMES_OF_LOOPBACK
        pairs = [pair.strip().partition("=") for pair in self.headers.get("Cookie", "").split(";")]
        cookies = {name: value for name, _, value in pairs}
        given = query.get("token") or cookies.get(self.server.cookie, "")
        return hmac.compare_digest(given.encode(), token.encode())

    def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        if content is self.server.files["plotly.js"] and "gzip" in self.headers.get("Accept-Encoding", ""):
            content = self.server.compressed
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        if self.server.token is not None and status == HTTPStatus.OK:
            self.send_header(
                "Set-Cookie", f"{self.server.cookie}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
            )
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log each request."""
