"""The page of ``show --serve`` in a real browser; `nox -s "peers(browser)"` installs what drives it.

Chromium and its driver are those of the system: ``apt-get install chromium chromium-driver``.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.wait import WebDriverWait

from wds_datapipes.testing import build_shard

EVIL = "<img src=x onerror=document.title='run'>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1200,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options=options) as driver:
        yield driver


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve 90 samples: pictures of two classes, and one key that is HTML."""
    folder = tmp_path_factory.mktemp("served")
    for shard in range(3):
        samples: list[dict[str, Any]] = []
        for number in range(30 * shard, 30 * shard + 30):
            pixels = np.full((8 + number, 16, 3), 2 * number, np.uint8)
            path = folder / "x.png"
            Image.fromarray(pixels).save(path)
            samples.append({"__key__": f"k{number:03d}", "png": path.read_bytes(), "cls": ["cat", "dog"][number % 2]})
        build_shard(folder / f"{shard}.tar", samples)
    build_shard(folder / "3.tar", [{"__key__": EVIL.replace(".", "-"), "txt": EVIL * 400}])
    command = [sys.executable, "-W", "ignore", "-m", "wds_datapipes", "show", f"{folder}/{{0..3}}.tar", "--serve"]
    command += ["--port", "0", "--limit", "20", "--label", "cls"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        line = running.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, line
        yield found[0]
        running.terminate()


def keys(browser: Any) -> list[str]:
    return [each.text for each in browser.find_elements(By.CSS_SELECTOR, ".card .key")]


def field(browser: Any, name: str) -> Any:
    return browser.find_element(By.NAME, name)


def follow(browser: Any, action: Any) -> None:
    """Do something that opens another page, and wait for it."""
    before = browser.find_element(By.TAG_NAME, "html")
    action()
    WebDriverWait(browser, 30).until(lambda _: before.id != browser.find_element(By.TAG_NAME, "html").id)


def check_pictures(browser: Any) -> None:
    """Check that all pictures have loaded, and that the browser has reported nothing."""
    script = "return [...document.images].map(each => each.naturalWidth)"
    assert all(width > 0 for width in browser.execute_script(script))
    errors = [entry for entry in browser.get_log("browser") if "favicon" not in entry["message"]]
    assert errors == []


def test_pages_follow_each_other(browser: Any, address: str) -> None:
    browser.get(address)
    found = keys(browser)
    for _ in range(4):
        check_pictures(browser)
        follow(browser, browser.find_element(By.LINK_TEXT, "Next").click)
        found += keys(browser)
    assert found[:90] == [f"k{number:03d}" for number in range(90)]
    assert len(found) == 91
    assert not browser.find_elements(By.LINK_TEXT, "Next")
    follow(browser, browser.find_element(By.LINK_TEXT, "First").click)
    assert keys(browser)[0] == "k000"


def test_filters_by_key_class_and_size(browser: Any, address: str) -> None:
    browser.get(address)
    Select(field(browser, "label")).select_by_visible_text("dog")
    follow(browser, lambda: field(browser, "key").send_keys("k01", Keys.ENTER))
    assert keys(browser) == ["k011", "k013", "k015", "k017", "k019"]
    assert field(browser, "key").get_attribute("value") == "k01"
    assert Select(field(browser, "label")).first_selected_option.text == "dog"
    check_pictures(browser)
    follow(browser, browser.find_element(By.LINK_TEXT, "Show all").click)
    follow(browser, lambda: field(browser, "smallest").send_keys("1 kB", Keys.ENTER))
    assert len(keys(browser)) == 1
    follow(browser, lambda: field(browser, "largest").send_keys("tiny", Keys.ENTER))
    assert "must be a number of bytes" in browser.find_element(By.CSS_SELECTOR, "[role=alert]").text
    assert [entry for entry in browser.get_log("browser") if "400" not in entry["message"]] == []


def test_what_a_shard_contains_is_never_run(browser: Any, address: str) -> None:
    browser.get(f"{address}?key=onerror")
    assert len(keys(browser)) == 1
    assert "onerror" in keys(browser)[0]
    assert browser.title != "run"
    check_pictures(browser)


@pytest.mark.parametrize("width", [400, 1200])
def test_nothing_is_wider_than_the_window(browser: Any, address: str, width: int) -> None:
    browser.set_window_size(width, 900)
    browser.get(address)
    inner, outer = browser.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
    assert inner <= outer


def test_the_written_page_is_complete_without_a_server(browser: Any, tmp_path: Path) -> None:
    build_shard(tmp_path / "a.tar", [{"__key__": "a", "txt": "a cat"}])
    page = tmp_path / "page.html"
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "wds_datapipes",
        "show",
        str(tmp_path / "a.tar"),
        "--html",
        str(page),
    ]
    subprocess.run(command, check=True)
    browser.get(page.as_uri())
    assert keys(browser) == ["a"]
    check_pictures(browser)
