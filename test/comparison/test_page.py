"""report.html in a real browser: it draws, asks nobody for anything, and says what results.csv says."""

import csv
import json
import shutil
import statistics
from contextlib import contextmanager

import pytest
from comparisons import vbs_compare
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from variable_batch_size.command.main import main

pytestmark = pytest.mark.browser

DESKTOP, PHONE = (1280, 900), (390, 800)
ROWS = 6  # batch size, learning rate, loss, metric, gain, noise scale


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    directory = tmp_path_factory.mktemp("page")
    options = ["--workload", "comparisons:troubled", "--rules", "linear,adascale,constant"]
    vbs_compare(*options, "--seeds", 3, "--out", directory, check=False)  # some runs fail, as they should
    return directory


@contextmanager
def browser(size, *, is_dark=False):
    """Chromium without a window, as wide and high as that."""
    programs = [shutil.which("chromium"), shutil.which("chromedriver")]
    assert all(programs), "needs chromium and chromedriver: apt-get install chromium chromium-driver"
    options = Options()
    options.binary_location = programs[0]
    options.add_argument("--headless=new")
    options.add_argument("--no-sandbox")  # which root may not have
    options.add_argument("--disable-background-networking")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(programs[1]))
    try:
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == PHONE}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        yield driver
    finally:
        driver.quit()


def show(driver, directory):
    driver.get((directory / "report.html").as_uri())
    WebDriverWait(driver, 60).until(lambda driver: driver.find_elements(By.CSS_SELECTOR, ".chart .legendtoggle"))


def requests(driver):
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


@pytest.mark.parametrize(("size", "is_dark"), [(DESKTOP, False), (PHONE, True)])
def test_it_draws_at_any_width_without_errors_and_without_the_network(results, size, is_dark):
    with browser(size, is_dark=is_dark) as driver:
        show(driver, results)
        for chart in driver.find_elements(By.CSS_SELECTOR, ".chart"):
            assert len(chart.find_elements(By.CSS_SELECTOR, ".cartesianlayer > .subplot")) == ROWS
            assert len(chart.find_elements(By.CSS_SELECTOR, ".legendtoggle")) == 4
            lines = chart.find_elements(By.CSS_SELECTOR, ".scatterlayer .js-line")
            assert sum(len(line.get_attribute("d") or "") > 20 for line in lines) >= 12
            assert chart.size["width"] <= size[0]
        assert len(driver.find_elements(By.CSS_SELECTOR, ".chart")) == 2
        assert driver.execute_script("return document.documentElement.scrollWidth") <= size[0]  # nothing sticks out
        colour = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert colour == ("rgb(20, 24, 29)" if is_dark else "rgb(255, 255, 255)")
        assert driver.get_log("browser") == []
        assert requests(driver) == [(results / "report.html").as_uri()]


def test_a_click_changes_the_axis(results):
    with browser(DESKTOP) as driver:
        show(driver, results)

        def axes():
            return [title.text for title in driver.find_elements(By.CSS_SELECTOR, ".chart .xtitle")]

        assert axes() == ["samples", "samples"]
        for axis in ("progress", "step"):
            driver.find_element(By.CSS_SELECTOR, f"button[data-axis={axis}]").click()
            shown = {"step": "steps"}.get(axis, axis)
            WebDriverWait(driver, 60).until(lambda _, shown=shown: axes() == [shown, shown])
        assert driver.get_log("browser") == []


def test_its_numbers_are_those_of_results_csv(results):
    with open(results / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    with browser(DESKTOP) as driver:
        show(driver, results)
        text = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)"
        for trace in ("ramp", "spot"):
            table = f"#trace-{trace} table.results"
            columns = driver.execute_script(text, f"{table} th")
            cells = driver.execute_script(text, f"{table} td")
            shown = [
                dict(zip(columns, cells[i : i + len(columns)], strict=True)) for i in range(0, len(cells), len(columns))
            ]
            assert len(shown) == 4
            reference = [float(r["final_metric"]) for r in rows if r["trace"] == "reference" and r["status"] == "done"]
            for row in shown:
                key = ("reference", "constant") if "yardstick" in row["rule"] else (trace, row["rule"])
                of_arm = [r for r in rows if (r["trace"], r["rule"]) == key]
                done = [r for r in of_arm if r["status"] == "done"]
                ended = {status: sum(r["status"] == status for r in of_arm) for status in ("diverged", "failed")}
                words = ", ".join(f"{number} of 3 {status}" for status, number in ended.items() if number)
                assert row["runs"] == words
                if not done:
                    assert (row["final"], row["updates"]) == ("–", "–")
                    continue
                final = [float(r["final_metric"]) for r in done]
                best = [float(r["best_metric"]) for r in done]
                assert row["final"] == f"{statistics.mean(final):.2f} ± {statistics.stdev(final):.2f} u"
                assert row["best"] == f"{statistics.mean(best):.2f} ± {statistics.stdev(best):.2f} u"
                assert row["updates"] == f"{statistics.mean(int(r['updates']) for r in done):,.0f}"
                assert row["samples"] == f"{statistics.mean(int(r['samples']) for r in done):,.0f}"
                gap = f"{statistics.mean(final) - statistics.mean(reference):+.2f}".replace("-", "−")
                assert row["against the yardstick"] == ("–" if key[0] == "reference" else gap)
        runs = driver.execute_script(text, "table.runs td")
        assert len(runs) == 10 * len(rows)
        for row, cells in zip(rows, [runs[i : i + 10] for i in range(0, len(runs), 10)], strict=True):
            assert cells[:4] == [row["trace"], row["rule"], row["seed"], row["status"]]
            assert cells[7] == (f"{float(row['final_metric']):.2f}" if row["final_metric"] else "–")
            assert cells[9] == row["reason"]
        verdict = driver.execute_script(text, "#verdict p")[0]
        assert verdict.startswith("ramp: ")
        assert "linear: 2 of 3 diverged, 1 of 3 failed." in verdict
        classes = driver.execute_script("return [...document.querySelectorAll('table.runs tr')].map(e => e.className)")
        assert [c for c in classes if c] == [row["status"] for row in rows]


def test_report_makes_the_page_anew(results, capsys):
    page = (results / "report.html").read_bytes()
    (results / "report.html").unlink()
    (results / "results.csv").unlink()
    assert main(["report", str(results)]) == 0
    assert (results / "report.html").read_bytes() == page
    assert capsys.readouterr().out.splitlines()[-1] == str(results / "report.html")
    assert (results / "results.csv").exists()


@pytest.mark.parametrize("options", [[], ["--rules", "linear", "--log-steps", 1000]])
def test_report_draws_a_picture(results, tmp_path, capsys, options):
    directory = results
    if options:  # neither the yardstick's rule among the others, nor a record of any step
        directory = tmp_path / "results"
        vbs_compare("--workload", "comparisons:line", "--seeds", 1, *options, "--out", directory)
    assert main(["report", str(directory), "--plot", str(tmp_path / "curves.svg")]) == 0
    text = (tmp_path / "curves.svg").read_text()
    assert "<svg" in text
    assert main(["report", str(tmp_path)]) == 1
    assert f"{tmp_path} holds no results of vbs compare" in capsys.readouterr().err
