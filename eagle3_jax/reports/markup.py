"""Small pieces of HTML; whatever comes from a trace goes through `escape`."""

import html
from collections.abc import Iterable, Sequence

from eagle3_jax.reports.texts import readable


def escape(value: object) -> str:
    """Text for an element or a quoted attribute."""
    return html.escape(readable(str(value)), quote=True)


def number(value: float | int | None, digits: int = 3) -> str:
    """A number as shown; a dash for none."""
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A share as shown; a dash for none."""
    return "–" if value is None else f"{100 * value:.1f}%"


def bar(share: float | None, side: int = 0) -> str:
    """A bar of that share of its cell."""
    width = 0.0 if share is None else 100 * max(0.0, min(1.0, share))
    return (
        f'<svg class="bar s{side}" aria-hidden="true"><rect width="{width:.2f}%" height="100%"/>'
        "</svg>"
    )


def table(
    caption: str,
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    note: str = "",
    kind: str = "",
) -> str:
    """A table whose first column names its rows; cells are HTML, empty heads are drawings."""
    columns = "".join(
        f'<th scope="col">{escape(h)}</th>' if h else '<td class="drawn"></td>' for h in head
    )
    body = "".join(
        f'<tr><th scope="row">{first}</th>' + "".join(f"<td>{c}</td>" for c in rest) + "</tr>"
        for first, *rest in rows
    )
    below = f'<p class="note">{escape(note)}</p>' if note else ""
    return (
        f'<div class="block {kind}"><table><caption>{escape(caption)}</caption><thead><tr>{columns}'
        f"</tr></thead><tbody>{body}</tbody></table>{below}</div>"
    )


def cards(items: Iterable[tuple[str, str, Sequence[str]]], names: Sequence[str]) -> str:
    """Key numbers: (name, what it means, one value a trace)."""
    found = []
    for name, meaning, values in items:
        shown = "".join(
            f'<dd class="s{i}">'
            + (f"<b>{escape(names[i])}</b> " if len(names) > 1 else "")
            + f"{v}</dd>"
            for i, v in enumerate(values)
        )
        told = f"<dd>{escape(meaning)}</dd>" if meaning else ""
        found.append(f"<div><dt>{escape(name)}</dt>{shown}{told}</div>")
    return f'<dl class="cards">{"".join(found)}</dl>'
