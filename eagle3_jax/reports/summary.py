"""What ran, and where two traces part, in words."""

import dataclasses
from collections.abc import Mapping, Sequence

from eagle3_jax.reports.compare import KINDS, Difference, Pair, Place
from eagle3_jax.reports.markup import escape
from eagle3_jax.trace import Trace


@dataclasses.dataclass(frozen=True)
class Summary:
    """The page's head.

    Attributes:
      names: the traces' own, sides: "A" and "B". labels: of ids, where a tokenizer is known.
    """

    traces: Sequence[Trace]
    pairs: Sequence[Pair]
    names: Sequence[str]
    sides: Sequence[str]
    labels: Mapping[int, str]

    def ran(self, models: Sequence[tuple[str, str]]) -> str:
        """What ran, one entry a fact; both values where two traces differ."""
        facts = [facts_of(trace) for trace in self.traces]
        rows = [("trace", list(self.names))]
        rows += [(what, [name]) for what, name in models]
        rows += [(key, [f[key] for f in facts]) for key in facts[0]]
        found = ""
        for key, values in rows:
            if len(set(values)) == 1:
                shown = f"<dd>{escape(values[0])}</dd>"
            else:
                shown = "".join(
                    f'<dd><b class="s{i}">{self.sides[i]}</b> {escape(value)}</dd>'
                    for i, value in enumerate(values)
                )
            apart = len(set(values)) > 1 and key != "trace"
            mark = ' <span class="apart">differs</span>' if apart else ""
            found += f"<div><dt>{escape(key)}{mark}</dt>{shown}</div>"
        return f'<dl class="ran" aria-label="What ran">{found}</dl>'

    def verdict(self) -> str:
        """Two traces: what is equal, and the first differences of every prompt."""
        both = [p for p in self.pairs if p.a is not None and p.b is not None]
        text = [p for p in both if p.text is not None]
        rounds = [p for p in both if p.rounds is not None]
        words = f"The same text in {len(both) - len(text)} of {len(both)} common prompts. "
        if both[0].compared:
            words += f"The same rounds in {len(both) - len(rounds)} of {len(both)}. "
        else:
            words += "Rounds are not compared: other trees, or plain decoding. "
        alone = (sum(p.b is None for p in self.pairs), sum(p.a is None for p in self.pairs))
        for side, number in zip(self.sides, alone, strict=True):
            if number:
                words += f"{number} {'prompts are' if number > 1 else 'prompt is'} only in {side}. "
        links = "".join(
            f'<li><a href="#p{k}">prompt {k}</a>: {self.difference(p)}</li>'
            for k, p in enumerate(self.pairs)
            if p.text is not None or p.rounds is not None
        )
        kind = "warn" if text or rounds or any(alone) else "good"
        return (
            f'<section class="verdict {kind}" aria-labelledby="both"><h2 id="both">Beside each '
            f"other</h2><p>{escape(words)}</p>"
            + (f"<ul>{links}</ul>" if links else "")
            + "</section>"
        )

    def difference(self, pair: Pair) -> str:
        """The first differences of a pair, as HTML; empty when it has none."""
        found = []
        if pair.rounds is not None and pair.rounds.kind != "prefill":
            found.append(f"first different round: {self._words(pair.rounds)}")
        if pair.text is not None:
            found.append(f"first different token: {self._words(pair.text)}")
        return escape("; ".join(found))

    def _words(self, found: Difference) -> str:
        places = zip(self.sides, (found.a, found.b), strict=True)
        shown = "; ".join(f"{side}: {self._place(place)}" for side, place in places)
        tie = {None: "", True: ", a near tie", False: ", no near tie"}[found.near_tie]
        return f"{KINDS[found.kind]} ({shown}){tie}"

    def _place(self, place: Place) -> str:
        parts = []
        if place.token is not None:
            parts.append(f"token {place.token}")
        if place.round is not None:
            parts.append(f"round {place.round}")
        elif place.token is not None:
            parts.append("the prefill")
        if place.node is not None:
            parts.append(f"node {place.node}")
        if place.id is not None:
            label = self.labels.get(place.id)
            parts.append(f"id {place.id}" if label is None else f"“{label}” (id {place.id})")
        for name, value in (("margin", place.margin), ("score", place.score)):
            if value is not None:
                parts.append(f"{name} {value:.3g}")
        return ", ".join(parts) or "nothing there"


def facts_of(trace: Trace) -> dict[str, str]:
    """What a trace's header says, as shown."""
    tree = "none: plain decoding"
    if trace.tree is not None:
        names = ("num_steps", "topk", "num_draft_tokens")
        kind = "chain" if trace.tree["topk"] == 1 else "tree"
        tree = f"{kind}, " + ", ".join(f"{name} {trace.tree[name]}" for name in names)
    return {
        "drafted as": tree,
        "rule": str(trace.rule),
        "draft attention": str(trace.draft_attention or "none"),
        "dtype": ", ".join(f"{who} {kind}" for who, kind in trace.dtype.items()) or "not recorded",
        "engine profile": str(trace.engine or "none: as trained"),
        "versions": ", ".join(f"{n} {v}" for n, v in trace.versions.items()) or "not recorded",
        "prompts": str(len(trace.prompts)),
    }
