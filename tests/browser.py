"""A headless Chromium for tests, where Playwright (the `browser` extra) and a browser are."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def executable() -> str:
    """The first Chromium on PATH; skips when there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no Chromium on PATH", allow_module_level=True)
    return found


class Watched:
    """A page of one file: what it asked for, what it complained about.

    Attributes:
      page: Playwright's. requests: URLs asked for. complaints: errors, warnings, dialogs.
    """

    def __init__(self, context, file: Path):
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.file = file
        self.page = context.new_page()
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(dialog.message))

    def open(self, anchor: str = "") -> "Watched":
        self.page.goto("about:blank")
        self.page.goto(self.file.as_uri() + anchor)
        return self

    def key(self, *names: str) -> "Watched":
        for name in names:
            self.page.keyboard.press(name)
        return self

    @property
    def round(self) -> int:
        return int(self.page.input_value("#round"))


@contextlib.contextmanager
def watched(browser, file: Path, anchor: str = "", **options) -> Iterator[Watched]:
    """An offline page of a file; every request must be the file's own, and nothing may complain."""
    settings = {"viewport": {"width": 1280, "height": 900}, "offline": True, **options}
    context = browser.new_context(**settings)
    context.set_default_timeout(20_000)
    seen = Watched(context, file).open(anchor)
    try:
        yield seen
    finally:
        context.close()
    assert {url.split("#")[0] for url in seen.requests} <= {file.as_uri(), "about:blank"}
    assert seen.complaints == []
