"""The page: what ran, every text by who wrote it, the numbers, and a place to look at rounds."""

import base64
import hashlib
import importlib.resources
import string
from collections.abc import Sequence
from typing import Any

from eagle3_jax.live import token_depths
from eagle3_jax.reports import data, numbers
from eagle3_jax.reports.compare import Pair
from eagle3_jax.reports.counts import count, stats_of
from eagle3_jax.reports.markup import escape, number
from eagle3_jax.reports.spans import legend, span
from eagle3_jax.reports.summary import Summary
from eagle3_jax.reports.texts import labels, last_words, pieces
from eagle3_jax.tokenizer import Tokenizer
from eagle3_jax.trace import Trace
from eagle3_jax.version import __version__

SCRIPTS = ("tree.js", "pane.js", "page.js")


class Page:
    """One report of one trace, or of two whose sequences are paired.

    Attributes:
      names: of the traces, as shown. models: (what, name) of what the caller knows of them.
    """

    def __init__(
        self,
        traces: Sequence[Trace],
        pairs: Sequence[Pair],
        names: Sequence[str],
        tokenizer: Tokenizer | None,
        models: Sequence[tuple[str, str]],
    ):
        self.traces, self.pairs, self.names = traces, pairs, list(names)
        self.models = models
        self.tokenizer = tokenizer
        self.labels = labels(tokenizer, data.token_ids(traces))
        self.sides = ["A", "B"][: len(traces)]
        self.summary = Summary(traces, pairs, self.names, self.sides, self.labels)

    def html(self) -> str:
        """The whole page."""
        folder = importlib.resources.files("eagle3_jax.reports")
        read = {n: (folder / n).read_text("utf-8") for n in ("page.html", "page.css", *SCRIPTS)}
        script = "\n".join(read[name] for name in SCRIPTS)
        style = read["page.css"]
        policy = (
            f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
            "base-uri 'none'; form-action 'none'"
        )
        known = data.document(self.traces, self.pairs, self.sides, self.labels)
        words = " beside ".join(self.names)
        return string.Template(read["page.html"]).substitute(
            policy=policy,
            title=escape(f"EAGLE-3 trace: {words}"),
            heading="Two EAGLE-3 traces" if len(self.traces) > 1 else "EAGLE-3 trace",
            style=style,
            ran=self.summary.ran(self.models),
            body=self._all()
            + self._picker()
            + "".join(map(self._sequence, range(len(self.pairs)))),
            footer=f"Written by eagle3_jax {escape(__version__)}. One file, nothing is loaded.",
            data=data.script_json(known),
            script=script,
        )

    def _all(self) -> str:
        found = self.summary.verdict() if len(self.traces) > 1 else ""
        if len(self.pairs) > 1:
            counts = [count(t, range(len(t.prompts))) for t in self.traces]
            found += (
                f'<section aria-labelledby="all"><h2 id="all">All {len(self.pairs)} prompts</h2>'
                + numbers.key_numbers(counts, self.sides)
                + "<details><summary>Histogram and positions of all prompts</summary>"
                + numbers.charts(counts, self.sides)
                + "</details></section>"
            )
        return found

    def _picker(self) -> str:
        if len(self.pairs) < 2:
            return ""
        items = ""
        for k, pair in enumerate(self.pairs):
            lengths = [
                number(None if c is None else c.mean_accept_length, 2) for c in self._counts(pair)
            ]
            mark = ' <span class="apart">differs</span>' if pair.text or pair.rounds else ""
            items += (
                f'<li><a href="#p{k}"><b>{k}</b> <span>{escape(self._preview(pair))}</span> '
                f"<em>{' | '.join(lengths)}</em>{mark}</a></li>"
            )
        return f'<nav class="picker" aria-label="Prompts"><ol>{items}</ol></nav>'

    def _counts(self, pair: Pair) -> list[Any]:
        sequences = (pair.a, pair.b)
        return [
            None if i is None else count(trace, [i])
            for trace, i in zip(self.traces, sequences, strict=False)
        ]

    def _prompt(self, pair: Pair) -> list[int]:
        if pair.a is not None:
            return self.traces[0].prompts[pair.a]
        assert pair.b is not None
        return self.traces[1].prompts[pair.b]

    def _preview(self, pair: Pair) -> str:
        """The prompt's last words; a chat template opens all prompts alike."""
        return last_words(self.tokenizer, self._prompt(pair))

    def _sequence(self, k: int) -> str:
        pair, counts = self.pairs[k], self._counts(self.pairs[k])
        sequences = (pair.a, pair.b)[: len(self.traces)]
        prompt = self._prompt(pair)
        stats = [
            None if i is None else stats_of(trace, i)
            for trace, i in zip(self.traces, sequences, strict=True)
        ]
        deepest = max(max(c.accept_lengths, default=1) - 1 for c in counts if c is not None)
        texts = "".join(self._text(side, i, counts[side]) for side, i in enumerate(sequences))
        difference = ""
        if pair.text is not None or pair.rounds is not None:
            difference = f'<p class="verdict warn">{self.summary.difference(pair)}</p>'
        elif len(self.traces) > 1 and None not in sequences:
            difference = '<p class="verdict good">The same text.</p>'
        lengths = "".join(
            f"<p>{self._side(side)}<code>{' '.join(map(str, c.accept_lengths))}</code></p>"
            for side, c in enumerate(counts)
            if c is not None and c.accept_lengths
        )
        return (
            f'<section class="sequence" id="p{k}" aria-labelledby="p{k}-title">'
            f'<h2 id="p{k}-title" tabindex="-1">Prompt {k}</h2>'
            f'<details class="prompt"><summary>{len(prompt)} prompt tokens '
            f"<span>{escape(self._preview(pair))}</span></summary>"
            f'<pre dir="auto">{escape("".join(pieces(self.tokenizer, prompt)))}</pre></details>'
            + numbers.key_numbers(counts, self.sides, explained=len(self.pairs) == 1)
            + difference
            + legend(deepest)
            + f'<div class="texts of{len(self.traces)}">{texts}</div>'
            + '<div class="slot"></div>'
            + numbers.charts(counts, self.sides)
            + numbers.statistics(stats, self.sides)
            + (
                "<details><summary>accept_lengths, round by round</summary>"
                f'<div class="lengths">{lengths}</div></details>'
                if lengths
                else ""
            )
            + "</section>"
        )

    def _side(self, side: int) -> str:
        return f'<b class="s{side}">{self.sides[side]}</b> ' if len(self.sides) > 1 else ""

    def _text(self, side: int, sequence: int | None, counts: Any) -> str:
        name = f"{self._side(side)}{escape(self.names[side])}"
        if sequence is None:
            missing = '<p class="note">not in this trace</p>'
            return f"<figure><figcaption>{name}</figcaption>{missing}</figure>"
        tokens = self.traces[side].tokens[sequence]
        depths = token_depths(counts.accept_lengths, len(tokens))
        between = "" if self.tokenizer is not None else " "
        spans = between.join(
            span(piece.strip() if between else piece, depth, first=i == 0)
            for i, (piece, depth) in enumerate(
                zip(pieces(self.tokenizer, tokens), depths, strict=True)
            )
        )
        caption = f"<figcaption>{name}</figcaption>" if len(self.sides) > 1 else ""
        what = f"Text of {self.sides[side]}" if len(self.sides) > 1 else "Text"
        ids = "" if self.tokenizer is not None else " ids"
        return (
            f'<figure>{caption}<div class="tokens{ids}" data-side="{side}" tabindex="0" '
            f'role="region" aria-label="{what}, {len(tokens)} tokens">{spans}</div></figure>'
        )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
