"""README and docs: their Python runs, their shell commands exist, their links lead somewhere."""

import re
import shlex
import urllib.parse
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def blocks(page: Path, language: str) -> list[str]:
    return [
        code for kind, code in FENCE.findall(page.read_text(encoding="utf-8")) if kind == language
    ]


def with_python() -> list[Path]:
    return [page for page in PAGES if blocks(page, "python")]


@pytest.mark.parametrize("page", with_python(), ids=lambda p: p.name)
def test_python_blocks_run(page, sglang_models, converted):
    """In page order, in one namespace; TARGET and DRAFT are the tiny pair's folders."""
    target = sglang_models / "target"
    draft = converted(sglang_models / "draft", "--target", str(target))
    names = {"TARGET": str(target), "DRAFT": str(draft)}
    for code in blocks(page, "python"):
        exec(compile(code, str(page), "exec"), names)


def test_there_is_python_to_run():
    assert {p.name for p in with_python()} >= {"README.md", "index.md", "statistics.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        parts = urllib.parse.urlsplit(link)
        if parts.scheme in ("http", "https"):
            continue
        path = page.parent / parts.path if parts.path else page
        assert path.exists(), f"{page.name}: {link}"


def commands() -> list[list[str]]:
    found = []
    for page in PAGES:
        for code in blocks(page, "console"):
            for line in code.splitlines():
                if line.startswith("$ "):
                    found.append(shlex.split(line.removeprefix("$ "), comments=True))
    return found


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    wanted = [words[1] for words in commands() if words[0] == "make"]
    assert wanted
    for target in wanted:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_options_exist(capsys):
    """Every option that a page shows is one its command knows."""
    from convert import from_gguf, from_torch, to_torch
    from eagle3_jax.cli import main as eagle3

    seen = 0
    for words in commands():
        if words[0] == "eagle3":
            nested = 2 if words[1] == "record" else 1
            run, argv = eagle3, [*words[1 : 1 + nested], "--help"]
        elif words[:2] == ["python", "-m"] and words[2].startswith("convert."):
            modules = {"from_torch": from_torch, "from_gguf": from_gguf, "to_torch": to_torch}
            run, argv = modules[words[2].removeprefix("convert.")].main, ["--help"]
        else:
            continue
        with pytest.raises(SystemExit):
            run(argv)
        text = capsys.readouterr().out
        for option in (w for w in words if w.startswith("--")):
            assert option in text, f"{shlex.join(words)}: {option}"
            seen += 1
    assert seen >= 5


def test_file_map_is_true():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.split("## Where things are")[1]
    for cell in re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE):
        folder = ROOT
        for name in re.findall(r"`([^`]+)`", cell):
            place = next((p for p in (ROOT / name, folder / name) if p.exists()), None)
            assert place is not None, name
            folder = place.parent if place.is_file() else folder
