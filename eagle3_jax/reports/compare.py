"""Two traces: which prompts they share, and where they part first, in text and in rounds."""

import dataclasses
from collections.abc import Iterator

from eagle3_jax.comparison import NEAR_TIE, first_difference
from eagle3_jax.findings import ConvertError
from eagle3_jax.reports.reading import UNKNOWN
from eagle3_jax.trace import Round, Trace

KINDS = {
    "prefill": "the prefill's own token differs",
    "draft": "a node is drafted in one of them only",
    "target": "the target's own token after the same text differs",
    "acceptance": "the accepted paths differ",
    "cut": "the same path, cut at different places",
    "end": "one of them ends here",
    "text": "the text differs",
}
"""What differs, by code, in causal order."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one trace is when two part.

    Attributes:
      token: index of the new token, None past the end; for rounds, of the first one it writes.
      id: what stands there; for rounds, what the target chose or the draft proposed.
      round: its round; None for the prefill's token and past the end.
      node: the node of that round at which they part: a drafted one, or the one after which the
        target chose. margin: the target's best logit minus its second best there.
      score: of a drafted node.
    """

    token: int | None = None
    id: int | None = None
    round: int | None = None
    node: int | None = None
    margin: float | None = None
    score: float | None = None


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first one of its sort.

    Attributes:
      kind: of `KINDS`. a, b: where each is. near_tie: the margins recorded are what rounding may
        choose by, for the coarser dtype of both; None when no margin is recorded.
    """

    kind: str
    a: Place
    b: Place
    near_tie: bool | None = None


@dataclasses.dataclass(frozen=True)
class Pair:
    """One prompt of both traces.

    Attributes:
      a, b: its sequence in each, None where a trace lacks it.
      text: the first different token. rounds: the first different round; None for none, and when
        the trees are of other sizes (`compared` is False then), when rounds can't be equal.
    """

    a: int | None
    b: int | None
    text: Difference | None = None
    rounds: Difference | None = None
    compared: bool = True


def align(a: Trace, b: Trace) -> list[Pair]:
    """Pairs of sequences with the same prompt ids, in a's order; then what only one of them has.

    Raises:
      ConvertError: `TRACE`: no prompt is in both, there is nothing to compare.
    """
    left: dict[tuple[int, ...], list[int]] = {}
    for j, prompt in enumerate(b.prompts):
        left.setdefault(tuple(prompt), []).append(j)
    pairs = []
    for i, prompt in enumerate(a.prompts):
        others = left.get(tuple(prompt))
        pairs.append(compare(a, i, b, others.pop(0)) if others else Pair(i, None))
    if not any(p.b is not None for p in pairs):
        raise ConvertError(
            "TRACE",
            f"the two traces share no prompt ({len(a.prompts)} and {len(b.prompts)} of them): "
            "compare traces of the same prompt ids, or make a report of each",
        )
    return pairs + [Pair(None, j) for j in sorted(j for rest in left.values() for j in rest)]


def compare(a: Trace, i: int, b: Trace, j: int) -> Pair:
    """One sequence of each, of the same prompt."""
    comparable = a.tree == b.tree and a.tree is not None
    text = _text(a, i, b, j)
    rounds = _rounds(a, i, b, j) if comparable else None
    return Pair(i, j, text, rounds, comparable)


def starts(trace: Trace, sequence: int) -> list[int]:
    """Index of the first new token that each round of the sequence writes."""
    found, at = [], 1
    for item in trace.of(sequence):
        found.append(at)
        at += len(item.emitted)
    return found


def _text(a: Trace, i: int, b: Trace, j: int) -> Difference | None:
    at = first_difference(a.tokens[i], b.tokens[j])
    if at is None:
        return None
    places = _place_of_token(a, i, at), _place_of_token(b, j, at)
    kind = "text" if None not in (places[0].id, places[1].id) else "end"
    if at == 0 and kind == "text":
        kind = "prefill"
    return Difference(kind, *places, _near_tie(a, b, *places) if kind == "text" else None)


def _place_of_token(trace: Trace, sequence: int, at: int) -> Place:
    tokens = trace.tokens[sequence]
    if at >= len(tokens):
        return Place()
    begins = starts(trace, sequence)
    for number, item in enumerate(trace.of(sequence)):
        if begins[number] <= at < begins[number] + len(item.emitted):
            node = item.accepted[at - begins[number]]
            return Place(at, tokens[at], number, node, _margin(item, node))
    return Place(at, tokens[at])


def _rounds(a: Trace, i: int, b: Trace, j: int) -> Difference | None:
    ours, theirs = a.of(i), b.of(j)
    begins = starts(a, i), starts(b, j)
    if a.tokens[i][:1] != b.tokens[j][:1]:
        places = _place_of_token(a, i, 0), _place_of_token(b, j, 0)
        return Difference("prefill", *places)
    for number, (x, y) in enumerate(zip(ours, theirs, strict=False)):
        for kind, node, other in _apart(x, y):
            places = (
                _place_in_round(kind, x, begins[0][number], number, node),
                _place_in_round(kind, y, begins[1][number], number, other),
            )
            tie = _near_tie(a, b, *places) if kind == "target" else None
            return Difference(kind, *places, tie)
    if len(ours) != len(theirs):
        last = min(len(ours), len(theirs))
        places = [
            Place(begins[k][last], None, last, 0) if len(rounds) > last else Place()
            for k, rounds in enumerate((ours, theirs))
        ]
        return Difference("end", places[0], places[1])
    return None


def _place_in_round(kind: str, item: Round, token: int, number: int, node: int | None) -> Place:
    if node is None:
        return Place(token, None, number)
    if kind == "draft":
        score = item.scores[node] if item.scores else None
        return Place(token, item.tokens[node], number, node, score=score)
    chosen = item.predicted[node] if item.predicted and kind == "target" else None
    return Place(token, chosen, number, node, _margin(item, node))


def _apart(x: Round, y: Round) -> Iterator[tuple[str, int | None, int | None]]:
    """Kind and nodes of what differs in two rounds of the same text, the cause before its effect.

    Nodes are matched by the tokens on their way from the root, not by number: scores that rounding
    swaps number the same nodes in another order.
    """
    ways, others = paths(x), paths(y)
    missing = next((n for way, n in ways.items() if way not in others), None)
    extra = next((n for way, n in others.items() if way not in ways), None)
    if missing is not None or extra is not None:
        yield "draft", missing, extra
    for way, n in ways.items():
        m = others.get(way)
        if m is not None and x.predicted and y.predicted:
            chosen = x.predicted[n], y.predicted[m]
            if UNKNOWN not in chosen and chosen[0] != chosen[1]:
                yield "target", n, m
    accepted = [tuple(r.tokens[n] for n in r.accepted) for r in (x, y)]
    if accepted[0] != accepted[1]:
        at = min(map(len, accepted)) - 1
        at = min(at, first_difference(*accepted) or 0)
        yield "acceptance", x.accepted[at], y.accepted[at]
    if x.emitted != y.emitted:
        at = min(len(x.emitted), len(y.emitted), len(x.accepted) - 1, len(y.accepted) - 1)
        yield "cut", x.accepted[at], y.accepted[at]


def paths(item: Round) -> dict[tuple[int, ...], int]:
    """Nodes by the tokens on their way from the root, in order of their number."""
    ways: list[tuple[int, ...]] = []
    found: dict[tuple[int, ...], int] = {}
    for node, token in enumerate(item.tokens):
        ways.append((*ways[item.parents[node]], token) if node else (token,))
        found.setdefault(ways[node], node)
    return found


def _margin(item: Round, node: int | None) -> float | None:
    return item.margins[node] if item.margins and node is not None else None


def _near_tie(a: Trace, b: Trace, *places: Place) -> bool | None:
    margins = [p.margin for p in places if p.margin is not None]
    if not margins:
        return None
    dtypes = [t.dtype.get("target", "float32") for t in (a, b)]
    return min(margins) < max(NEAR_TIE.get(d, NEAR_TIE["float32"]) for d in dtypes)
