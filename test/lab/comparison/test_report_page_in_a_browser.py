"""report.html in a real browser: it renders, sends no requests, and agrees with results.csv."""

import statistics

import pytest
from chromium import DESKTOP, MOST_SECONDS, PHONE, requested_by
from comparisons import rows, vbs_compare
from outcomes import HOSTILE, HOSTILE_FOLDER, write_hostile_results
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from variable_batch_size.lab.comparison.report import write_report

pytestmark = pytest.mark.browser

ROWS = 6  # batch size, learning rate, loss, metric, gain, noise scale


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    directory = tmp_path_factory.mktemp("page")
    options = [
        "--workload",
        "comparisons:troubled",
        "--samples",
        2560,
        "--lr",
        0.45,
        "--rules",
        "linear,adascale,constant",
    ]
    vbs_compare(*options, "--seeds", 3, "--out", directory, check=False)  # some runs fail, as they should
    return directory


def show(driver, directory):
    driver.get((directory / "report.html").as_uri())
    WebDriverWait(driver, MOST_SECONDS).until(
        lambda driver: driver.find_elements(By.CSS_SELECTOR, ".chart .legendtoggle")
    )


def texts(driver, selector):
    """The text of all elements that a CSS selector matches, including collapsed ones."""
    return driver.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map(element => element.textContent)", selector
    )


def table(driver, selector):
    """The rows of a table, each as a dictionary by the names of the columns."""
    columns, cells = texts(driver, f"{selector} th"), texts(driver, f"{selector} td")
    rows = [cells[start : start + len(columns)] for start in range(0, len(cells), len(columns))]
    return [dict(zip(columns, row, strict=True)) for row in rows]


@pytest.fixture(scope="module")
def page(browser, results):
    """The browser with the page, loaded once for all tests that do not change it; a click is the last."""
    with browser(DESKTOP) as driver:
        show(driver, results)
        yield driver


def assert_renders(driver, directory, width, colour):
    for chart in driver.find_elements(By.CSS_SELECTOR, ".chart"):
        assert len(chart.find_elements(By.CSS_SELECTOR, ".cartesianlayer > .subplot")) == ROWS
        assert len(chart.find_elements(By.CSS_SELECTOR, ".legendtoggle")) == 4
        lines = chart.find_elements(By.CSS_SELECTOR, ".scatterlayer .js-line")
        assert sum(len(line.get_attribute("d") or "") > 20 for line in lines) >= 12
        assert chart.size["width"] <= width
    assert len(driver.find_elements(By.CSS_SELECTOR, ".chart")) == 2
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width  # nothing overflows
    assert driver.execute_script("return getComputedStyle(document.body).backgroundColor") == colour
    assert driver.get_log("browser") == []
    assert requested_by(driver) == [(directory / "report.html").as_uri()]


def test_page_renders_on_a_desktop_without_errors_or_network(page, results):
    assert_renders(page, results, DESKTOP[0], "rgb(255, 255, 255)")


def test_page_renders_on_a_dark_phone_without_errors_or_network(browser, results):
    with browser(PHONE, is_dark=True) as driver:
        show(driver, results)
        assert_renders(driver, results, PHONE[0], "rgb(20, 24, 29)")


def test_names_cannot_inject_scripts_and_are_shown_unchanged(browser, tmp_path):
    write_report(write_hostile_results(tmp_path))
    with browser(DESKTOP) as driver:
        show(driver, tmp_path)
        assert driver.execute_script("return window.isAttacked") is None
        assert texts(driver, ".chart .legendtext") == [HOSTILE_FOLDER, "reference"]
        assert f"test {HOSTILE}{HOSTILE}, after the first quarter" in texts(driver, ".chart .annotation-text")
        assert driver.get_log("browser") == []
        assert requested_by(driver) == [(tmp_path / "report.html").as_uri()]


def finals(directory, trace, rule):
    found = [row for row in rows(directory) if (row["trace"], row["rule"], row["status"]) == (trace, rule, "done")]
    return [float(row["final_metric"]) for row in found]


@pytest.mark.parametrize("trace", ["ramp", "spot"])
def test_table_of_a_trace_agrees_with_results_csv(page, results, trace):
    reference = statistics.mean(finals(results, "reference", "constant"))
    shown = table(page, f"#trace-{trace} table.results")
    assert [row["rule"] for row in shown][-2:] == ["linear", "always 8 (baseline)"]
    assert {row["rule"] for row in shown[:-2]} == {"adascale", "constant"}
    for row in shown:
        is_reference = "baseline" in row["rule"]
        key = ("reference", "constant") if is_reference else (trace, row["rule"])
        of_arm = [r for r in rows(results) if (r["trace"], r["rule"]) == key]
        done = [r for r in of_arm if r["status"] == "done"]
        ended = {status: sum(r["status"] == status for r in of_arm) for status in ("diverged", "failed")}
        assert row["runs"] == ", ".join(f"{number} of 3 {status}" for status, number in ended.items() if number)
        if not done:
            assert (row["final"], row["updates"]) == ("–", "–")
            continue
        final, best = finals(results, *key), [float(r["best_metric"]) for r in done]
        assert row["final"] == f"{statistics.mean(final):.2f} ± {statistics.stdev(final):.2f} u"
        assert row["best"] == f"{statistics.mean(best):.2f} ± {statistics.stdev(best):.2f} u"
        assert row["updates"] == f"{statistics.mean(int(r['updates']) for r in done):,.0f}"
        assert row["samples"] == f"{statistics.mean(int(r['samples']) for r in done):,.0f}"
        gap = f"{statistics.mean(final) - reference:+.2f}".replace("-", "−")
        assert row["against the baseline"] == ("–" if is_reference else gap)


def test_table_of_all_runs_and_summary_agree_with_results_csv(page, results):
    for row, run in zip(table(page, "table.runs"), rows(results), strict=True):
        assert [row[name] for name in ("trace", "rule", "seed", "status")] == list(run.values())[:4]
        assert row["final"] == (f"{float(run['final_metric']):.2f}" if run["final_metric"] else "–")
        assert row["reason"] == run["reason"]
    kinds = page.execute_script("return [...document.querySelectorAll('.runs tbody tr')].map(e => e.className)")
    assert kinds == [run["status"] for run in rows(results)]
    summary = texts(page, "#summary p")[0]
    assert summary.startswith("ramp: ")
    assert "linear: 2 of 3 diverged, 1 of 3 failed." in summary


def test_a_click_changes_the_axis(page):
    assert texts(page, ".chart .xtitle") == ["samples", "samples"]
    for axis, title in (("progress", "progress"), ("step", "steps")):
        page.find_element(By.CSS_SELECTOR, f"button[data-axis={axis}]").click()
        WebDriverWait(page, MOST_SECONDS).until(
            lambda page, title=title: texts(page, ".chart .xtitle") == [title, title]
        )
    assert page.get_log("browser") == []
