"""A plugin of pytest that runs chosen tests in a given order, and a plugin of coverage that names the current test.

Every process that a test starts inherits the environment, and with it the name of the file that contains the test's
name. `patch = subprocess, fork` of coverage starts it in each of them, and this plugin then sets its context.

coverage imports it before pytest does, which would warn that it cannot rewrite its assertions: PYTEST_DONT_REWRITE.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from coverage import Coverage
from coverage.plugin import CoveragePlugin
from coverage.types import TConfigurable

#: A file with one line for each test that ended: its name, seconds, and whether it failed.
JOURNAL = "MUTATION_JOURNAL"
#: A file with the names of the tests to run and their timeouts in seconds, in their order.
SELECTION = "MUTATION_SELECTION"
#: A folder for the files that contain the name of the current test, and the file of this process.
CURRENT_TESTS, CURRENT_TEST = "MUTATION_CURRENT_TESTS", "MUTATION_CURRENT_TEST"


class CurrentTest(CoveragePlugin):
    """Sets the context of a process to the test that started it."""

    def configure(self, config: TConfigurable) -> None:
        """Read the name of the test, while coverage starts."""
        path = os.environ.get(CURRENT_TEST)
        if path is not None:
            config.set_option("run:context", Path(path).read_text(encoding="utf-8"))


def coverage_init(reg: Any, options: object) -> None:  # coverage calls it so
    """Register the plugin of coverage."""
    reg.add_configurer(CurrentTest())


def pytest_configure() -> None:
    """Choose the file for the current test of this process, which is one of several with xdist."""
    if CURRENT_TESTS in os.environ:
        path = Path(os.environ[CURRENT_TESTS], str(os.getpid()))
        path.write_text("", encoding="utf-8")
        os.environ[CURRENT_TEST] = str(path)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the chosen tests, in their order, each with its timeout."""
    if SELECTION not in os.environ:
        return
    seconds = json.loads(Path(os.environ[SELECTION]).read_text(encoding="utf-8"))
    order = {name: number for number, name in enumerate(seconds)}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in order])
    items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])
    for item in items:
        item.add_marker(pytest.mark.timeout(seconds[item.nodeid]), append=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Record the lines that a test runs under its name."""
    coverage = Coverage.current() if CURRENT_TEST in os.environ else None
    if coverage is None:
        return (yield)
    current = Path(os.environ[CURRENT_TEST])
    current.write_text(item.nodeid, encoding="utf-8")
    coverage.switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        coverage.switch_context("")
        current.write_text("", encoding="utf-8")


class Journal:
    """Writes a line for each test that ended, in the process that reports."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the set-up, the call or the teardown of a test."""
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.add(report.nodeid)
        if report.when == "teardown":
            line = json.dumps([report.nodeid, self.seconds[report.nodeid], report.nodeid in self.failed])
            with Path(self.path).open("a", encoding="utf-8") as file:
                file.write(line + "\n")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Keep the journal, except in the processes of xdist, whose reports the first process gets."""
    if JOURNAL in os.environ and not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(Journal(os.environ[JOURNAL]))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Save what a process of xdist has recorded, before xdist ends it."""
    coverage = Coverage.current()
    if coverage is not None and hasattr(session.config, "workerinput"):
        coverage.stop()
        coverage.save()
