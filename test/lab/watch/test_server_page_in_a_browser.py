"""The page of vbs watch in a real browser: it draws growing runs at any width, and nothing in them can attack it."""

import json

import pytest
from chromium import DESKTOP, MOST_SECONDS, requested_by
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait
from test_server import serving
from watched_runs import line, write_log

from variable_batch_size.lab.command.watch import answer_forecast
from variable_batch_size.lab.watch import server as server_module
from variable_batch_size.lab.watch.server import _SECONDS_BETWEEN_LOOKS

pytestmark = pytest.mark.browser

PHONE = (400, 850)
HOSTILE = '<img src=x onerror="window.isAttacked=1"><script>window.isAttacked=1</script>\'&amp;'
SHOWN = """
const cards = [...document.querySelectorAll(".run")];
return Object.fromEntries(cards.map(card => [card.querySelector("h3").textContent, card.textContent]))
"""
# the largest step that has a point in the line of the loss, by what Plotly has drawn
DRAWN = """
const chart = document.querySelector("#chart"), lines = chart.querySelectorAll(".scatterlayer .js-line");
return chart.data && lines.length ? Math.max(...chart.data.flatMap(line => line.x || []).filter(x => x !== null)) : null
"""


def wait(driver, condition):
    return WebDriverWait(driver, MOST_SECONDS, poll_frequency=0.02).until(condition)


def until_drawn(driver, value):
    wait(driver, lambda driver: driver.execute_script(DRAWN) == value)


def seconds_without_work(driver):
    """The longest time from a record to its pixels in which neither the server nor the page does anything."""
    return _SECONDS_BETWEEN_LOOKS + driver.execute_script("return MILLISECONDS_BETWEEN_LOOKS") / 1000


def texts(driver, selector):
    script = "return [...document.querySelectorAll(arguments[0])].map(element => element.textContent)"
    return driver.execute_script(script, selector)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    first = write_log(folder / "first", range(1, 101))
    decision = {"step": 20, "from_step": 24, "batch_size": 64, "cores": 2, "noise_scale": 200.0, "why": HOSTILE}
    (first / "decisions.jsonl").write_text(json.dumps(decision) + "\n")
    hostile = write_log(folder / "<b onclick=alert(1)>", range(1, 51), loss=1.0)
    (hostile / "executed.csv").write_text("step,batchsize\n0,64\n1,128\n")  # and no lock
    return first, hostile


@pytest.mark.parametrize(("size", "is_dark"), [(DESKTOP, False), (PHONE, True)])
def test_page_draws_growing_runs_at_any_width_without_errors_or_network(
    browser, runs, tmp_path, monkeypatch, size, is_dark
):
    monkeypatch.setattr(server_module, "_LONGEST_WAIT", 2 * MOST_SECONDS)  # a request is answered by a record only
    growing = write_log(tmp_path / "growing", range(1, 11))
    with serving(growing, *runs) as server, browser(size, is_dark=is_dark) as driver:
        driver.get(server.url)
        until_drawn(driver, 6400)
        assert len(driver.find_elements(By.CSS_SELECTOR, "#chart .cartesianlayer > .subplot")) == 11
        assert driver.execute_script("return document.documentElement.scrollWidth") <= size[0]  # nothing overflows
        assert driver.find_element(By.CSS_SELECTOR, "#chart").size["width"] <= size[0]
        assert len(texts(driver, "#chart .legendtext")) == 3

        assert seconds_without_work(driver) <= 0.5
        for step in range(200, 206):
            with (growing / "log.jsonl").open("a") as file:
                file.write(line(step)[:30])
                file.flush()
                file.write(line(step)[30:])
            until_drawn(driver, 64 * step)

        cards = driver.execute_script(SHOWN)
        assert "running" in cards[str(growing)] and "step205" in cards[str(growing)]
        assert "stopped: it has ended, or was stopped and saved" in cards[str(runs[1])]
        assert driver.execute_script("return window.isAttacked") is None
        assert HOSTILE in texts(driver, "#decisions td")
        assert texts(driver, "#chart .legendtext") == [str(growing), *map(str, runs)]

        for axis, title in (("seconds", "hours"), ("progress", "progress"), ("step", "steps")):
            driver.find_element(By.CSS_SELECTOR, f"button[data-axis={axis}]").click()
            wait(driver, lambda driver, title=title: texts(driver, "#chart .xtitle") == [title])
        assert not driver.find_element(By.CSS_SELECTOR, "button[data-axis=tokens]").is_displayed()
        until_drawn(driver, 205)
        assert driver.get_log("browser") == []
        assert {url.rpartition("/")[0] + "/" for url in requested_by(driver) if not url.startswith("data:")} == {
            server.url
        }


def test_the_end_of_a_run_and_of_the_server_are_shown(browser, tmp_path):
    (write_log(tmp_path, range(1, 11)) / "run.lock").write_text("{}")  # of no process
    with browser(DESKTOP) as driver:
        with serving(tmp_path) as server:
            driver.get(server.url)
            until_drawn(driver, 640)
            assert texts(driver, ".run .state") == ["died"]
        wait(driver, lambda driver: "vbs watch does not answer" in texts(driver, "#problem")[0])


def test_records_and_decisions_of_other_kinds_are_drawn_as_far_as_they_are_numbers(browser, tmp_path):
    write_log(tmp_path, range(1, 11), epoch="<b>", batch_size=["x"], samples_per_second={})
    decisions = [{"from_step": "x", "batch_size": "y", "cores": []}, {"from_step": 2, "batch_size": "z", "why": 5}]
    (tmp_path / "decisions.jsonl").write_text("".join(json.dumps(decision) + "\n" for decision in decisions))
    with serving(tmp_path) as server, browser(DESKTOP) as driver:
        driver.get(server.url)
        until_drawn(driver, 640)
        assert "step10" in driver.execute_script(SHOWN)[str(tmp_path)]
        assert driver.execute_script("return document.querySelector('#problem').hidden")
        assert driver.get_log("browser") == []


def test_the_form_forecasts_the_rest(browser, runs):
    directory = runs[0].parent / "forecast"
    write_log(directory, range(10, 110, 10), seconds_accumulating=0.02, seconds_updating=0.03)
    settings = {"minibatch_size": 32, "ref_batchsize": 32, "dataset_size": 6400}
    described = {"settings": settings, "trace": "200 steps, sha256 0123", "policy": None, "changes": []}
    (directory / "run.json").write_text(json.dumps(described))
    with serving(directory, forecast=answer_forecast) as server, browser(PHONE) as driver:
        driver.get(server.url)
        until_drawn(driver, 6400)
        for name, text in (("samples", "12800"), ("policies", "32 <b>"), ("cores", "1 2"), ("price", "3.6")):
            driver.find_element(By.CSS_SELECTOR, f"input[name={name}]").send_keys(text)
        button = driver.find_element(By.CSS_SELECTOR, "#what-if form button")
        button.click()
        wait(driver, lambda driver: "`policy` must be one of" in texts(driver, "#answer")[0])
        assert "'<b>'" in texts(driver, "#answer")[0]
        field = driver.find_element(By.CSS_SELECTOR, "input[name=policies]")
        field.clear()
        field.send_keys("32")
        button.click()
        wait(driver, lambda driver: "Fastest" in texts(driver, "#answer")[0])
        rows = driver.find_elements(By.CSS_SELECTOR, "#forecast tbody tr")
        assert sorted(row.text.split()[0] for row in rows) == ["32", "32", "64", "64"]
        assert "cost" in texts(driver, "#forecast th")
        assert driver.execute_script("return document.documentElement.scrollWidth") <= PHONE[0]
        assert driver.get_log("browser") == []
