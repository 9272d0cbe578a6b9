"""One self-contained HTML page on one trace, or on two beside each other."""

import os
from collections.abc import Sequence
from pathlib import Path

from eagle3_jax.files.whole import whole_file
from eagle3_jax.findings import ConvertError
from eagle3_jax.reports.compare import Pair, align
from eagle3_jax.reports.page import Page
from eagle3_jax.reports.reading import check
from eagle3_jax.tokenizer import Tokenizer
from eagle3_jax.trace import Trace


def render(
    traces: Sequence[Trace],
    *,
    names: Sequence[str] = (),
    tokenizer: Tokenizer | None = None,
    models: Sequence[tuple[str, str]] = (),
) -> str:
    """The page as text: no other file, no network, readable without scripts.

    Args:
      traces: one, or two that share at least one prompt (equal ids).
      names: how to call them; "A" and "B" when left out.
      tokenizer: for texts; ids are shown without one.
      models: (what, name) pairs for the header, such as `("target", "SmolLM2-135M")`; a trace does
        not hold them.

    Raises:
      ConvertError: `TRACE`: rounds that contradict each other, or two traces without a common
        prompt. `USAGE`: none or more than two traces, or another number of names.
    """
    if not 1 <= len(traces) <= 2:
        raise ConvertError("USAGE", f"{len(traces)} traces, expected one or two")
    names = list(names) or [f"trace {side}" for side in "AB"[: len(traces)]]
    if len(names) != len(traces):
        raise ConvertError("USAGE", f"{len(names)} names for {len(traces)} traces")
    for trace, name in zip(traces, names, strict=True):
        check(trace, name)
    if len(traces) == 2:
        pairs = align(traces[0], traces[1])
    else:
        pairs = [Pair(i, None) for i in range(len(traces[0].prompts))]
    return Page(traces, pairs, names, tokenizer, models).html()


def write(
    traces: Sequence[Trace],
    path: str | os.PathLike,
    *,
    force: bool = False,
    names: Sequence[str] = (),
    tokenizer: Tokenizer | None = None,
    models: Sequence[tuple[str, str]] = (),
):
    """Writes `render`'s page, all of it or nothing; arguments as there.

    Raises:
      ConvertError: as `render`; `FILE`: the path exists and `force` is not given.
      OSError: it can't be written.
    """
    path = Path(path)
    page = render(traces, names=names, tokenizer=tokenizer, models=models)
    save(page, path, force=force)


def save(page: str, path: Path, *, force: bool = False):
    """Writes text beside the destination, then renames it; as `write`."""
    if path.exists() and not force:
        raise ConvertError("FILE", f"{path}: exists; give another path, or --force to replace it")
    with whole_file(path, public=True, encoding="utf-8", newline="\n") as file:
        file.write(page)
