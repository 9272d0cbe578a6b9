"""Tokens of a text as spans: by who wrote them, accepted ones with their depth."""

from eagle3_jax.reports.markup import escape

COLOURS = 8
"""Depths with a colour of their own; deeper ones share the last and keep their number."""


def span(piece: str, depth: int, *, first: bool) -> str:
    """One token: `p` for the prefill's, `b` for a bonus, `d1`.. for an accepted draft token."""
    kind = "p" if first else f"d{min(depth, COLOURS)}" if depth else "b"
    number = f' data-d="{depth}"' if depth else ""
    line = " n" if "\n" in piece else ""
    return f'<span class="{kind}{line}"{number}>{escape(piece)}</span>'


def legend(deepest: int) -> str:
    """How to read the spans."""
    items = [
        f"<li>{span('prefill', 0, first=True)} the prompt pass’s own token</li>",
        f"<li>{span('bonus', 0, first=False)} the target’s own token that ends a round</li>",
    ]
    if deepest > 0:
        shown = "".join(span("depth", depth, first=False) for depth in range(1, deepest + 1))
        items.append(f"<li>{shown} accepted draft tokens and their depth in the tree</li>")
    return f'<ul class="legend" aria-label="Legend">{"".join(items)}</ul>'
