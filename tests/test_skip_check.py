import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import skip_check

CONFTEST = """
import sys
sys.path.insert(0, {folder!r})
import skip_check
pytest_addoption = skip_check.add_option
pytest_configure = skip_check.register
"""

TESTS = """
import pytest

def test_runs():
    pass

@pytest.mark.parametrize("size", [1])
def test_skips(size):
    pytest.skip("no torch here")

@pytest.mark.xfail(strict=True)
def test_fails_as_expected():
    assert False
"""


@pytest.fixture
def session(tmp_path):
    """Runs pytest in a folder of its own; returns exit status and output."""
    shutil.copy(skip_check.__file__, tmp_path)
    (tmp_path / "conftest.py").write_text(CONFTEST.format(folder=str(tmp_path)))
    (tmp_path / "test_it.py").write_text(TESTS)

    def run(allowed: str, *arguments: str) -> tuple[int, str]:
        (tmp_path / "allowed_skips.txt").write_text(allowed)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    return run


def test_an_unlisted_skip_fails_the_session(session):
    status, output = session("# none\n", "--check-skips")
    assert status == 1
    assert "test_it.py::test_skips[1] (no torch here)" in output
    assert "test_fails_as_expected" not in output


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.exhaustive)])
def test_a_listed_skip_passes(session, workers):
    allowed = "test_it.py::test_skips* | no torch*  # comment\n"
    status, output = session(allowed, "--check-skips", "-n", workers)
    assert (status, "allowed_skips" in output) == (0, False)


def test_workers_report_to_the_session(session):
    assert session("", "--check-skips", "-n", "2")[0] == 1


@pytest.mark.parametrize(
    "allowed", ["test_it.py::test_skips* | another reason\n", "other.py::* | no torch*\n"]
)
def test_node_and_reason_must_both_match(session, allowed):
    assert session(allowed, "--check-skips")[0] == 1


def test_without_the_option_skips_pass(session):
    assert session("")[0] == 0


def test_a_module_that_skips_whole(session, tmp_path):
    text = "import pytest\npytest.importorskip('no_such_module_at_all')\n"
    (tmp_path / "test_it.py").write_text(text)
    status, output = session("", "--check-skips")
    assert status == 1
    assert "no_such_module_at_all" in output


def test_a_line_that_is_not_a_rule_is_refused(session):
    status, output = session("test_it.py::test_skips\n", "--check-skips")
    assert status == 4
    assert "allowed_skips.txt, line 1: expected 'node id | reason'" in output


def test_the_list_itself_is_readable():
    path = Path(skip_check.__file__).with_name("allowed_skips.txt")
    for node, _ in skip_check.read_allowed_skips(path):
        file = node.split("::")[0]
        assert (path.parent.parent / file).exists(), f"{node} names a file that is gone"
