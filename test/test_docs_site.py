"""The documentation site: no build warnings, no broken links, nothing loaded from the network."""

import html
import json
import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote_plus, unquote, urlsplit

import pytest
from chromium import DESKTOP, MOST_SECONDS, PHONE, requested_by, set_screen
from documents import ROOT
from selenium.webdriver.support.ui import WebDriverWait

import variable_batch_size as vbs


def build(directory, *, config="mkdocs.yml"):
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        config,
        "--site-dir",
        str(directory),
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # a notice of the theme about its successor
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    directory = tmp_path_factory.mktemp("site")
    done = build(directory)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return directory


class Page(HTMLParser):
    """The links, loaded resources and anchors of a page, and its text outside of code."""

    def __init__(self, path):
        super().__init__()
        self.links, self.loads, self.places, self.text = [], [], [], ""
        self._open = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self._open.append(tag)
        self.places += [values[name] for name in ("id", "name") if values.get(name)]
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and values["rel"] not in ("canonical", "prev", "next"):
            self.loads.append(values["href"])
        elif tag in ("img", "script", "iframe", "source") and "src" in values:
            self.loads.append(values["src"])

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if not {"code", "pre", "script", "style"} & set(self._open):
            self.text += data


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}


def is_elsewhere(address):
    return bool(urlsplit(address).netloc)


def test_every_link_and_anchor_exists(pages):
    followed = 0
    for path, page in pages.items():
        for address in (*page.links, *page.loads):
            parts = urlsplit(address)
            if parts.netloc or parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.exists(), f"{path.name}: {address}"
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].places, f"{path.name}: {address}"
            followed += 1
    assert followed > 1000


def test_no_page_loads_anything_from_the_network(site, pages):
    for path, page in pages.items():
        assert not [address for address in page.loads if is_elsewhere(address)], path.name
    for sheet in site.rglob("*.css"):
        addresses = re.findall(r"(?:url\(|@import)\s*[\"']?([^\"')]+)", sheet.read_text(encoding="utf-8"))
        for address in addresses:
            assert address.startswith("data:") or (sheet.parent / address).exists(), f"{sheet.name}: {address}"


def test_every_public_name_is_in_the_reference_once(pages):
    headings = [place for path, page in pages.items() if path.parent.name == "reference" for place in page.places]
    submodules = {name: name for name in ("policies", "rules", "traces")} | {"planning": "lab.planning"}
    places = {name: f"variable_batch_size.{name}" for name in {*vbs.__all__} - {"__version__", *submodules}}
    for submodule, home in submodules.items():  # some names are also at the top level
        names = {*getattr(vbs, submodule).__all__} - {*vbs.__all__}
        places |= {f"{submodule}.{name}": f"variable_batch_size.{home}.{name}" for name in names}
    for name, place in places.items():
        assert headings.count(place) == 1, name


# private names in the reference, until the code that shows them is fixed
LEAKED: set[str] = set()


def test_the_reference_shows_no_private_name_and_no_address(pages):
    shown = set()
    for path in pages:
        if path.parent.name == "reference":
            for code in re.findall(r"<code[^>]*>(.*?)</code>", path.read_text(encoding="utf-8"), re.DOTALL):
                text = html.unescape(re.sub(r"<[^>]+>", "", code))
                shown |= set(re.findall(r"(?<!\w)_[A-Za-z]\w*| at 0x\w+", text))
    assert shown <= LEAKED


def test_equations_roles_and_examples_are_rendered(pages):
    for path, page in pages.items():
        assert not re.search(r"\$|\\\(|\\\[|:(class|meth|func|data):|>>>", page.text), path.name
    equations = {
        path.stem: path.read_text(encoding="utf-8").count("<math") for path in pages if path.parent.name != "reference"
    }
    assert all(equations[name] > 15 for name in ("rules", "adascale", "adam", "weight-decay"))


@pytest.mark.parametrize(
    ("latex", "is_known"), [(r"\frac{a}{b}", True), (r"\begin{aligned} a &= b \end{aligned}", False)]
)
def test_latex_that_cannot_be_rendered_fails_the_build(tmp_path, latex, is_known):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# One page\n\n$$\n{latex}\n$$\n")
    hook = ROOT / "docs" / "plugins" / "equations.py"
    config = {
        "site_name": "x",
        "hooks": [str(hook)],
        "markdown_extensions": [{"pymdownx.arithmatex": {"generic": True}}],
    }
    (tmp_path / "mkdocs.yml").write_text(json.dumps(config))
    done = build(tmp_path / "site", config=str(tmp_path / "mkdocs.yml"))
    assert (done.returncode == 0) == is_known, done.stderr


WITH_WIDE_TABLES = {
    "benchmarks",
    "cluster",
    "long-tests",
    "reproduced",
    "token-budgets",
}  # of numbers, on a phone: they scroll by themselves
# once the page has the width of the screen: the width of what it shows, and the right end of its tables
WIDTHS = """
    const [width, done] = arguments;
    const measure = () => {
        if (!matchMedia(`(width: ${width}px)`).matches) return setTimeout(measure, 5);
        const tables = [...document.querySelectorAll(".md-typeset table:not([class])")];
        const ends = tables.map(table => table.getBoundingClientRect().right);
        done([document.documentElement.scrollWidth, Math.max(0, ...ends)]);
    };
    measure();
"""
SCHEME = "return document.body.getAttribute('data-md-color-scheme')"


@pytest.mark.browser
@pytest.mark.parametrize("size", [PHONE, pytest.param(DESKTOP, marks=pytest.mark.long)])
def test_no_page_is_wider_than_the_screen_or_sends_requests(browser, pages, size):
    with browser(size) as driver:
        for path in pages:
            driver.get(path.as_uri())
            # what does not fit a desktop does not fit a phone, except for tables that may scroll on one
            for screen in (size, DESKTOP) if path.stem in WITH_WIDE_TABLES else (size,):
                set_screen(driver, screen)
                page_width, right_of_tables = driver.execute_async_script(WIDTHS, screen[0])
                assert page_width <= screen[0], path.name
                assert path.stem in WITH_WIDE_TABLES or right_of_tables <= screen[0], path.name
            set_screen(driver, size)
            assert driver.execute_script(SCHEME) == "default", path.name
        assert {urlsplit(address).scheme for address in requested_by(driver)} <= {"file", "data", "blob"}


@pytest.mark.browser
def test_pages_are_dark_on_a_dark_screen(browser, site):
    with browser(PHONE, is_dark=True) as driver:
        for name in ("index.html", "reference/training.html"):
            driver.get((site / name).as_uri())
            assert driver.execute_script(SCHEME) == "slate", name


FOUND_FIRST = {
    "checkpoint": "checkpoints",
    "CustomSampler": "reference/training",
    "DDP": "loop",
    "deterministic": "exact",
    "EMA": "learning-rate-schedules",
    "float16": "mixed-precision",
    "FSDP": "large-models",
    "GAN": "several-models",
    "gradient accumulation": "loop",
    "install": "getting-started",
    "policy": "policies",
    "preemption": "spot",
    "resume": "checkpoints",
    "rules": "rules",
    "SLURM": "clusters",
    "spot": "spot",
    "tokens": "language-models",
    "torchrun": "cores",
    "TPU": "tpus",
    "trace": "traces",
    "warmup": "learning-rate-schedules",
    "weight decay": "weight-decay",
}


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@contextmanager
def served(directory):
    """The address of a site: the search of a page on the disk has no index."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=directory)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


# results that are shown already are marked as old when other words are typed
FIRST_RESULT = "return document.querySelector('.md-search-result__item:first-child:not([data-old]) a')?.href"
TYPE = """
    document.querySelectorAll(".md-search-result__item").forEach(item => item.setAttribute("data-old", ""));
    const field = document.querySelector(".md-search__input");
    field.value = arguments[0];
    field.dispatchEvent(new Event("keyup"));
"""


@pytest.mark.browser
def test_search_finds_the_page_of_a_word_first(browser, site):
    first_words, *others = FOUND_FIRST
    with served(site) as address, browser(DESKTOP) as driver:

        def found():
            link = WebDriverWait(driver, MOST_SECONDS).until(lambda page: page.execute_script(FIRST_RESULT))
            return urlsplit(link).path.removeprefix("/").removesuffix(".html")

        driver.get(f"{address}/index.html?q={quote_plus(first_words)}")
        pages = {first_words: found()}
        for words in others:  # on the same page, which has made its index
            driver.execute_script(TYPE, words)
            pages[words] = found()
    assert pages == FOUND_FIRST
