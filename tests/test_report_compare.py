"""Two traces, wrong traces, and the command: what parts first, what is refused and how."""

import copy
import dataclasses
import random

import pytest
from report_traces import ANCESTORS, BEAM_SLOTS, changed, load, page_data, scripted

from eagle3_jax import report
from eagle3_jax.findings import ConvertError
from eagle3_jax.reports.compare import align, paths
from eagle3_jax.reports.counts import REASONS, stop_reason
from eagle3_jax.reports.reading import check
from eagle3_jax.trace import Round, Trace


def node_below(item: Round, *, accepted: bool) -> int:
    """A drafted leaf, on the accepted path or beside it."""
    leaves = [n for n in range(1, len(item.tokens)) if n not in item.parents]
    return next(n for n in leaves if (n in item.accepted) == accepted)


def of(trace: Trace, sequence: int, index: int) -> Round:
    return next(r for r in trace.rounds if (r.sequence, r.index) == (sequence, index))


def test_equal_traces_do_not_part():
    for path in (ANCESTORS, BEAM_SLOTS):
        for pair in align(load(path), load(path)):
            assert (pair.text, pair.rounds, pair.compared) == (None, None, True)
    page = report.render([load(ANCESTORS), load(ANCESTORS)])
    assert "The same text in 2 of 2 common prompts. The same rounds in 2 of 2." in page


def test_nodes_numbered_otherwise_are_the_same_tree():
    trace = scripted()
    item = of(trace, 1, 2)
    rng = random.Random(1)
    order = [0]
    while len(order) < len(item.tokens):
        ready = [n for n in range(len(item.tokens)) if n not in order and item.parents[n] in order]
        order.append(rng.choice(ready))
    assert order != sorted(order)
    place = {old: new for new, old in enumerate(order)}
    per_node = ("tokens", "scores", "draft_probs", "positions", "predicted", "margins")
    other = changed(
        trace,
        1,
        2,
        parents=[-1, *(place[item.parents[n]] for n in order[1:])],
        accepted=[place[n] for n in item.accepted],
        **{name: [getattr(item, name)[n] for n in order] for name in per_node},
    )
    check(other, "other")
    assert all(pair.rounds is None for pair in align(trace, other))
    assert set(paths(item)) == set(paths(of(other, 1, 2)))


def test_a_drafted_token_that_differs():
    trace = scripted()
    item = of(trace, 0, 3)
    node = node_below(item, accepted=False)
    tokens = [*item.tokens]
    tokens[node] = next(t for t in range(270) if t not in tokens)
    found = align(trace, changed(trace, 0, 3, tokens=tokens))[0]
    assert found.text is None
    assert found.rounds is not None
    assert (found.rounds.kind, found.rounds.near_tie) == ("draft", None)
    for place, id_ in ((found.rounds.a, item.tokens[node]), (found.rounds.b, tokens[node])):
        assert (place.round, place.node, place.id) == (3, node, id_)
        assert place.score == item.scores[node]


@pytest.mark.parametrize(("margin", "near"), [(1e-5, True), (0.5, False)])
def test_a_target_that_chooses_otherwise(margin, near):
    """Beside the accepted path, so that nothing follows from it."""
    trace = scripted()
    item = of(trace, 1, 1)
    node = node_below(item, accepted=False)
    predicted, margins = [*item.predicted], [*item.margins]
    predicted[node] = (predicted[node] + 1) % 200
    margins[node] = margin
    found = align(trace, changed(trace, 1, 1, predicted=predicted, margins=margins))[1].rounds
    assert found is not None
    assert (found.kind, found.near_tie) == ("target", near)
    assert (found.a.node, found.b.node, found.a.round) == (node, node, 1)
    assert (found.a.id, found.b.id) == (item.predicted[node], predicted[node])
    assert found.b.margin == margin


def test_unknown_predictions_are_not_compared():
    trace = scripted()
    item = of(trace, 0, 0)
    known = [p if n in item.accepted else -1 for n, p in enumerate(item.predicted)]
    other = changed(trace, 0, 0, predicted=known, margins=[])
    assert align(trace, other)[0].rounds is None


def test_an_acceptance_that_stops_early():
    """The rest of the text is the same, one round later."""
    trace = scripted(sequences=1, rounds=9)
    item = next(r for r in trace.rounds if len(r.accepted) > 2)
    short = item.accepted[:2]
    token = item.tokens[item.accepted[2]]
    other = copy.deepcopy(trace)
    other.rounds = [
        dataclasses.replace(r, accepted=short, bonus=token, emitted=[item.tokens[short[1]], token])
        for r in trace.rounds
        if r.index == item.index
    ]
    other.rounds[0] = dataclasses.replace(other.rounds[0], index=0)
    other.tokens = [[item.tokens[0], *other.rounds[0].emitted]]
    trace.rounds = [dataclasses.replace(item, index=0)]
    trace.tokens = [[item.tokens[0], *item.emitted]]
    found = align(trace, other)[0]
    assert found.rounds is not None
    assert found.rounds.kind == "acceptance"
    assert found.rounds.a.node == found.rounds.b.node == short[1]
    assert found.text is not None
    assert (found.text.kind, found.text.a.token, found.text.b.token) == ("end", 3, None)
    assert found.text.near_tie is None
    assert found.text.a.node == item.accepted[2]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_text_that_parts_names_token_round_and_node(length):
    trace = scripted(sequences=1, rounds=9)
    number = next(r.index for r in trace.rounds if r.index and len(r.emitted) == length)
    item = trace.rounds[number]
    at = sum(len(r.emitted) for r in trace.rounds[: number + 1])
    predicted = [*item.predicted]
    predicted[item.accepted[-1]] = 271
    emitted = [*item.emitted[:-1], 271]
    other = changed(trace, 0, number, bonus=271, emitted=emitted, predicted=predicted)
    other.rounds = other.rounds[: number + 1]
    other.tokens = [[*trace.tokens[0][:at], 271]]
    found = align(trace, other)[0]
    assert found.text is not None
    assert found.text.kind == "text"
    for place, id_ in ((found.text.a, item.bonus), (found.text.b, 271)):
        assert (place.token, place.round, place.node) == (at, number, item.accepted[-1])
        assert (place.id, place.margin) == (id_, item.margins[item.accepted[-1]])
    assert found.rounds is not None
    assert (found.rounds.kind, found.rounds.a.round) == ("target", number)
    page = report.render([trace, other])
    assert f"A: token {at}, round {number}, node {item.accepted[-1]}" in page
    assert page_data(page)["pairs"][0]["text"]["b"]["id"] == 271


def test_the_prefill_and_the_end():
    trace = scripted(sequences=1)
    other = copy.deepcopy(trace)
    other.tokens[0][0] = trace.rounds[0].tokens[0] + 1
    found = align(trace, other)[0]
    assert found.text is not None
    assert found.rounds is not None
    assert (found.text.kind, found.rounds.kind) == ("prefill", "prefill")
    assert (found.text.a.token, found.text.a.round) == (0, None)
    shorter = copy.deepcopy(trace)
    cut = shorter.rounds.pop()
    del shorter.tokens[0][-len(cut.emitted) :]
    found = align(trace, shorter)[0]
    assert found.rounds is not None
    assert (found.rounds.kind, found.rounds.a.round, found.rounds.b.round) == ("end", 5, None)


def test_the_recorded_pair_parts_in_the_draft():
    """Two draft attentions draft two trees; both texts are the target's."""
    a, b = load(ANCESTORS), load(BEAM_SLOTS)
    first, second = align(a, b)
    assert (first.text, first.rounds, second.text) == (None, None, None)
    assert second.rounds is not None
    assert (second.rounds.kind, second.rounds.a.round) == ("draft", 11)
    ours, theirs = of(a, 1, 11), of(b, 1, 11)
    assert set(paths(ours)) != set(paths(theirs))
    for k in range(11):
        assert set(paths(of(a, 1, k))) == set(paths(of(b, 1, k)))
    page = report.render([a, b], names=["ours", "SGLang's"])
    assert "The same text in 2 of 2 common prompts. The same rounds in 1 of 2." in page
    assert page.count("differs</span>") == 3  # draft attention, engine profile, prompt 1


def test_other_trees_compare_texts_alone():
    trace = scripted()
    other = copy.deepcopy(trace)
    other.tree = {"num_steps": 5, "topk": 3, "num_draft_tokens": 10}
    assert [p.compared for p in align(trace, other)] == [False, False]
    assert "Rounds are not compared" in report.render([trace, other])


def test_prompts_are_matched_by_their_ids():
    a, b = scripted(sequences=3), scripted(sequences=3)
    b.prompts, b.tokens = b.prompts[::-1], b.tokens[::-1]
    b.rounds = [dataclasses.replace(r, sequence=2 - r.sequence) for r in b.rounds]
    b.prompts[0] = [1, 2, 3]
    pairs = align(a, b)
    assert [(p.a, p.b) for p in pairs] == [(0, 2), (1, 1), (2, None), (None, 0)]
    page = report.render([a, b])
    assert "1 prompt is only in A. 1 prompt is only in B." in page
    assert page.count("not in this trace") == 2
    with pytest.raises(ConvertError, match=r"share no prompt \(3 and 1 of them\)"):
        report.render([a, scripted(sequences=1, seed=9)])


def test_every_reason_has_its_round():
    trace = scripted(rounds=60)
    assert trace.tree is not None
    steps = trace.tree["num_steps"]
    seen = set()
    for item in trace.rounds:
        last = item.accepted[-1]
        below = [item.tokens[n] for n, p in enumerate(item.parents) if p == last]
        reason = stop_reason(item, steps)
        seen.add(reason)
        assert (reason == "full") == (len(item.accepted) == steps + 1)
        if reason != "full":
            assert reason == ("refused" if below else "bare")
        if below:
            assert stop_reason(dataclasses.replace(item, bonus=below[0]), steps) == "broken"
            assert stop_reason(dataclasses.replace(item, bonus=-1), steps) == "unknown"
    assert seen == {"full", "refused", "bare"}
    assert set(REASONS) == {*seen, "broken", "unknown"}
