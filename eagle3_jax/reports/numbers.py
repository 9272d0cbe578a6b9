"""The numbers of a page as HTML: key figures, accept-length histogram, acceptance by position."""

from collections.abc import Sequence
from typing import Any

from eagle3_jax.reports.counts import REASONS, Counts
from eagle3_jax.reports.markup import bar, cards, escape, number, percent, table

MEANINGS = {
    "accept length": "mean of accept_lengths: committed per round, bonus included, before any cut",
    "spec_accept_length": "new tokens / rounds: SGLang's, with the prefill's token and the cut",
    "spec_accept_rate": "accepted / proposed draft tokens",
    "spec_verify_ct": "rounds",
    "new tokens": "the prefill's token included",
}


def key_numbers(
    counts: Sequence[Counts | None], names: Sequence[str], *, explained: bool = True
) -> str:
    """Accept length under both its names, accept rate, rounds and tokens."""

    def of(read: Any) -> list[str]:
        return ["–" if c is None else read(c) for c in counts]

    values = {
        "accept length": of(lambda c: number(c.mean_accept_length)),
        "spec_accept_length": of(lambda c: number(c.spec_accept_length)),
        "spec_accept_rate": of(lambda c: percent(c.spec_accept_rate)),
        "spec_verify_ct": of(lambda c: number(len(c.accept_lengths)) if c.num_steps else "–"),
        "new tokens": of(lambda c: number(c.tokens)),
    }
    return cards(((k, MEANINGS[k] * explained, v) for k, v in values.items()), names)


def charts(counts: Sequence[Counts | None], names: Sequence[str]) -> str:
    """Histogram, acceptance by position and the ends of rounds; empty without a round."""
    shown = [(i, c) for i, c in enumerate(counts) if c is not None and c.accept_lengths]
    if not shown:
        return '<p class="note">No round was drafted: plain decoding, or one new token.</p>'
    many = len(names) > 1
    suffix = [f" {names[i]}" if many else "" for i, _ in shown]
    return (
        f'<div class="charts of{len(shown)}">'
        + _histogram(shown, suffix)
        + _positions(shown, suffix)
        + _reasons(shown, suffix)
        + "</div>"
    )


def statistics(
    stats: Sequence[tuple[dict[str, Any], list[str]] | None], names: Sequence[str]
) -> str:
    """SGLang's statistics under SGLang's names; those that the rounds contradict are marked."""
    keys = list(dict.fromkeys(k for s in stats if s is not None for k in s[0]))
    apart = sorted({k for s in stats if s is not None for k in s[1]})
    keys += [k for k in apart if k not in keys]
    rows = [
        [f"<code>{escape(key)}</code>", *("–" if s is None else _stat(s, key) for s in stats)]
        for key in keys
    ]
    note = ""
    if apart:
        note = f"≠ recorded so, and the rounds of this trace do not give it: {', '.join(apart)}."
    heads = ["", *(names if len(names) > 1 else ["value"])]
    return table("Statistics, SGLang's names", heads, rows, note=note, kind="wide")


def _stat(found: tuple[dict[str, Any], list[str]], key: str) -> str:
    stats, apart = found
    value = stats.get(key)
    if isinstance(value, float):
        text = f"{value:.6g}"
    elif isinstance(value, dict):
        text = ", ".join(f"{k} {v}" for k, v in value.items())
    else:
        text = "–" if value is None else str(value)
    return escape(text) + (" <strong>≠</strong>" if key in apart else "")


def _histogram(shown: list[tuple[int, Counts]], suffix: list[str]) -> str:
    size = max(len(c.histogram) for _, c in shown)
    most = max(n / len(c.accept_lengths) for _, c in shown for n in c.histogram)
    rows = []
    for k in range(size):
        counts = [c.histogram[k] if k < len(c.histogram) else 0 for _, c in shown]
        shares = [n / len(c.accept_lengths) for n, (_, c) in zip(counts, shown, strict=True)]
        bars = "".join(bar(s / most, i) for s, (i, _) in zip(shares, shown, strict=True))
        cells = [x for n, s in zip(counts, shares, strict=True) for x in (number(n), percent(s))]
        rows.append([str(k + 1), bars, *cells])
    head = ["accept length", "", *(f"{x}{s}" for s in suffix for x in ("rounds", "share"))]
    return table(
        "Accept-length histogram", head, rows, note="Tokens a round commits, bonus included."
    )


def _positions(shown: list[tuple[int, Counts]], suffix: list[str]) -> str:
    rows = []
    for k in range(max(len(c.cumulative) for _, c in shown)):
        cells: list[str] = []
        bars = ""
        for i, c in shown:
            inside = k < len(c.cumulative)
            cumulative = c.cumulative[k] if inside else None
            conditional = c.conditional[k] if inside else None
            reached = c.reached[k] if inside else 0
            bars += bar(cumulative, i)
            cells += [percent(cumulative), percent(conditional), number(reached)]
        rows.append([str(k + 1), bars, *cells])
    head = ["position", ""]
    head += [f"{x}{s}" for s in suffix for x in ("cumulative", "conditional", "tried")]
    return table(
        "Acceptance by draft position",
        head,
        rows,
        note="Cumulative: share of rounds whose first i drafts were accepted; 1 + their sum is the "
        "accept length. Conditional: of the rounds that accepted the i - 1 before it (tried).",
    )


def _reasons(shown: list[tuple[int, Counts]], suffix: list[str]) -> str:
    rows = []
    for code, words in REASONS.items():
        counts = [c.reasons[code] for _, c in shown]
        if any(counts):
            rows.append([escape(words), *map(number, counts)])
    head = ["why the path ended", *(f"rounds{s}" for s in suffix)]
    return table("Where rounds stopped", head, rows, kind="wide")
