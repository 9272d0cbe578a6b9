"""`pytest --check-skips`: a test that skips must be on the list in allowed_skips.txt."""

import fnmatch
from pathlib import Path

import pytest

ALLOWED = Path(__file__).with_name("allowed_skips.txt")
PASSING = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


def add_option(parser: pytest.Parser):
    parser.addoption(
        "--check-skips",
        action="store_true",
        help="fail if a test skips that tests/allowed_skips.txt does not list",
    )


class SkipCheck:
    """Fails the session for skips outside the list."""

    def __init__(self, allowed: list[tuple[str, str]]):
        self.allowed = allowed
        self.unlisted: list[str] = []

    def note(self, report: pytest.TestReport | pytest.CollectReport):
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        for node, why in self.allowed:
            if fnmatch.fnmatchcase(report.nodeid, node) and fnmatch.fnmatchcase(reason, why):
                return
        self.unlisted.append(f"{report.nodeid} ({reason})")

    def pytest_runtest_logreport(self, report: pytest.TestReport):
        self.note(report)

    def pytest_collectreport(self, report: pytest.CollectReport):
        self.note(report)

    def pytest_sessionfinish(self, session: pytest.Session):
        if self.unlisted and session.exitstatus in PASSING:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        if not self.unlisted:
            return
        terminalreporter.section("skipped tests that tests/allowed_skips.txt does not list")
        for line in self.unlisted:
            terminalreporter.line(line, red=True)


def read_allowed_skips(path: Path) -> list[tuple[str, str]]:
    """Lines `node id pattern | reason pattern`; `#` starts a comment."""
    pairs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = line.split("#", 1)[0].strip()
        if not text:
            continue
        node, bar, why = text.partition("|")
        if not bar or not node.strip() or not why.strip():
            raise pytest.UsageError(f"{path}, line {number}: expected 'node id | reason'")
        pairs.append((node.strip(), why.strip()))
    return pairs


def register(config: pytest.Config):
    worker = hasattr(config, "workerinput")
    if config.getoption("--check-skips") and not worker:
        allowed = read_allowed_skips(ALLOWED)
        config.pluginmanager.register(SkipCheck(allowed), "check-skips")
