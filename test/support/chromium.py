"""Headless Chromium, for tests of pages."""

import json
import shutil
from contextlib import contextmanager

from selenium import webdriver

DESKTOP, PHONE = (1280, 900), (390, 800)
MOST_SECONDS = 600  # exceeded only by a hang, even on a busy machine


@contextmanager
def chromium():
    """A running browser."""
    programs = [shutil.which("chromium"), shutil.which("chromedriver")]
    assert all(programs), "needs chromium and chromedriver: apt-get install chromium chromium-driver"
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    options.add_argument("--headless=new")
    options.add_argument("--no-sandbox")  # not available to root
    options.add_argument("--disable-background-networking")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(programs[1]))
    driver.set_page_load_timeout(MOST_SECONDS)
    driver.set_script_timeout(MOST_SECONDS)
    try:
        yield driver
    finally:
        driver.quit()


@contextmanager
def new_tab(driver, size, *, is_dark=False):
    """The browser with a new tab on a screen of this size, and without what earlier tabs have stored and logged."""
    before = driver.current_window_handle
    driver.switch_to.new_window("tab")
    driver.execute_cdp_cmd("Storage.clearDataForOrigin", {"origin": "*", "storageTypes": "all"})
    for log in ("browser", "performance"):
        driver.get_log(log)
    try:
        set_screen(driver, size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        yield driver
    finally:
        driver.close()
        driver.switch_to.window(before)


def set_screen(driver, size):
    width, height = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == PHONE}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def requested_by(driver):
    """The URLs requested by pages since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
