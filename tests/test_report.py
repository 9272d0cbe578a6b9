"""The page as text: what it says against the trace, what it escapes, that it loads nothing."""

import base64
import hashlib
import html.parser
import random
import re

import numpy as np
import pytest
from report_traces import (
    ANCESTORS,
    BEAM_SLOTS,
    NASTY,
    RECORDED,
    byte_tokenizer,
    fallback_tokenizer,
    load,
    page_data,
    scripted,
)

from eagle3_jax import report
from eagle3_jax.live import Pieces
from eagle3_jax.reports.counts import count
from eagle3_jax.reports.data import short
from eagle3_jax.reports.texts import HARMFUL, label, pieces, readable
from eagle3_jax.trace import Trace

VOID = {"meta", "input", "br", "link", "img"}
SVG = {"rect", "path"}


class Document(html.parser.HTMLParser):
    """Elements with their text; refuses tags that are not closed in order."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.open: list[int] = []
        self.items: list[dict] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.items.append({"tag": tag, "text": "", "in": tuple(self.open), **dict(attrs)})
        if tag not in VOID:
            self.open.append(len(self.items) - 1)

    def handle_startendtag(self, tag, attrs):
        assert tag in SVG, tag
        self.items.append({"tag": tag, "text": "", "in": tuple(self.open), **dict(attrs)})

    def handle_endtag(self, tag):
        assert self.items[self.open.pop()]["tag"] == tag

    def handle_data(self, data):
        for i in self.open:
            self.items[i]["text"] += data

    def all(self, tag, **attributes) -> list[dict]:
        wanted = {name.rstrip("_"): value for name, value in attributes.items()}
        return [
            e
            for e in self.items
            if e["tag"] == tag
            and all(value in (e.get(n) or "").split() for n, value in wanted.items())
        ]

    def inside(self, outer: dict, tag: str) -> list[dict]:
        number = next(i for i, e in enumerate(self.items) if e is outer)
        return [e for e in self.items if e["tag"] == tag and number in e["in"]]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("bytes") / "hf")


@pytest.fixture(scope="module", params=["recorded", "scripted", "two", "plain"])
def made(request, byte_level):
    """(traces, page) of each sort."""
    traces = {
        "recorded": lambda: [load(BEAM_SLOTS)],
        "scripted": lambda: [scripted()],
        "two": lambda: [load(ANCESTORS), load(BEAM_SLOTS)],
        "plain": lambda: [plain()],
    }[request.param]()
    return traces, report.render(traces, tokenizer=byte_level)


def plain() -> Trace:
    """Plain decoding of three tokens."""
    trace = scripted(sequences=1, rounds=2, tree=(1, 1, 1))
    trace.tree, trace.draft_attention = None, None
    trace.dtype = {"target": "float32"}
    return trace


def test_nothing_is_loaded_and_only_its_own_script_runs(made):
    page = made[1]
    document = Document(page)
    ids = [e["id"] for e in document.items if "id" in e]
    assert len(ids) == len(set(ids))
    for element in document.items:
        assert not {"src", "srcset", "style", "action", "background", "data"} & set(element)
        assert not [name for name in element if name.startswith("on")]
        assert element["tag"] not in {"link", "img", "iframe", "object", "base", "embed"}
        if "href" in element:
            assert element["href"].startswith("#")
            assert element["href"][1:] in ids
    style, script = document.all("style")[0]["text"], document.all("script")[-1]["text"]
    assert "url(" not in style
    assert "@import" not in style
    urls = set(re.findall(r"\w+://[^\"'\s<>]+", page))
    assert urls <= {"http://www.w3.org/2000/svg"}
    policy = next(e["content"] for e in document.all("meta") if "http-equiv" in e)
    assert policy.startswith("default-src 'none'; ")
    for name, text in (("style-src", style), ("script-src", script)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{name} 'sha256-{digest}';" in policy
    assert [e.get("type") for e in document.all("script")] == ["application/json", None]


def test_headings_labels_and_landmarks(made):
    document = Document(made[1])
    assert len(document.all("h1")) == len(document.all("main")) == 1
    for section in document.all("section"):
        named = section["aria-labelledby"]
        assert any(e.get("id") == named and e["text"].strip() for e in document.items)
    for table in document.all("table"):
        assert len(document.inside(table, "caption")) == 1
        assert all(e["scope"] in ("row", "col") for e in document.inside(table, "th"))
    for button in document.all("button"):
        assert button["text"].strip()


def expected_kinds(trace: Trace, sequence: int) -> list[tuple[str, int]]:
    """Per new token `p`, `b` or `d` with its depth, by walking each round's tree."""
    found = [("p", 0)]
    for item in trace.of(sequence):
        for number, _ in enumerate(item.emitted, 1):
            if number == len(item.accepted):
                found.append(("b", 0))
                continue
            node, depth = item.accepted[number], 0
            while node:
                node, depth = item.parents[node], depth + 1
            found.append(("d", depth))
    return found


def test_texts_are_the_traces(made, byte_level):
    traces, page = made
    document = Document(page)
    boxes = document.all("div", class_="tokens")
    wanted = [(t, i) for i in range(len(traces[0].prompts)) for t in traces]
    assert len(boxes) == len(wanted)
    for box, (trace, i) in zip(boxes, wanted, strict=True):
        spans = document.inside(box, "span")
        assert len(spans) == len(trace.tokens[i])
        kinds = expected_kinds(trace, i)
        for element, (kind, depth) in zip(spans, kinds, strict=True):
            first = element["class"].split()[0]
            assert first == (f"d{depth}" if kind == "d" else kind)
            assert element.get("data-d") == (str(depth) if depth else None)
        assert box["text"] == readable(byte_level.decode(trace.tokens[i]))
    prompts = document.all("pre")
    for element, prompt in zip(prompts, traces[0].prompts, strict=True):
        assert element["text"] == readable(byte_level.decode(prompt))


def test_ids_without_a_tokenizer():
    trace = load(ANCESTORS)
    document = Document(report.render([trace]))
    for box, tokens in zip(document.all("div", class_="ids"), trace.tokens, strict=True):
        assert box["text"].split() == list(map(str, tokens))
    assert page_data(report.render([trace]))["labels"] == {}


def rows(document: Document, caption: str) -> list[list[list[str]]]:
    """Cells of the body of every table with that caption."""
    found = []
    for table in document.all("table"):
        if document.inside(table, "caption")[0]["text"] == caption:
            body = document.inside(table, "tbody")[0]
            found.append(
                [
                    [
                        c["text"]
                        for c in document.items
                        if c["tag"] in ("th", "td") and at in c["in"]
                    ]
                    for at, row in enumerate(document.items)
                    if row["tag"] == "tr" and any(document.items[k] is body for k in row["in"])
                ]
            )
    return found


def share(text: str) -> float:
    assert text.endswith("%")
    return float(text[:-1]) / 100


@pytest.mark.parametrize("source", [ANCESTORS, BEAM_SLOTS, None])
def test_numbers_are_the_rounds(source):
    trace = scripted(rounds=40) if source is None else load(source)
    document = Document(report.render([trace]))
    assert trace.tree is not None
    steps = trace.tree["num_steps"]
    histograms = rows(document, "Accept-length histogram")
    positions = rows(document, "Acceptance by draft position")
    groups = [range(len(trace.prompts)), *([i] for i in range(len(trace.prompts)))]
    assert len(histograms) == len(positions) == len(groups)
    values = [e["text"] for e in document.all("dd", class_="s0")]
    for k, group in enumerate(groups):
        accepted = np.array([len(r.accepted) - 1 for i in group for r in trace.of(i)])
        new = sum(len(trace.tokens[i]) for i in group)
        proposed = (trace.tree["num_draft_tokens"] - 1) * len(accepted)
        assert values[5 * k : 5 * k + 5] == [
            f"{(accepted + 1).mean():.3f}",
            f"{new / len(accepted):.3f}",
            f"{100 * accepted.sum() / proposed:.1f}%",
            str(len(accepted)),
            str(new),
        ]
        for length, row in enumerate(histograms[k], 1):
            number = int((accepted + 1 == length).sum())
            assert row[:3] == [str(length), "", str(number)]
            assert share(row[3]) == pytest.approx(number / len(accepted), abs=6e-4)
        assert len(histograms[k]) == steps + 1
        for i, row in enumerate(positions[k], 1):
            reached = int((accepted >= i - 1).sum())
            assert row[:2] == [str(i), ""]
            assert share(row[2]) == pytest.approx((accepted >= i).mean(), abs=6e-4)
            if reached:
                conditional = (accepted >= i).sum() / reached
                assert share(row[3]) == pytest.approx(conditional, abs=6e-4)
            else:
                assert row[3] == "–"
            assert row[4] == str(reached)
        counts = count(trace, group)
        assert np.isclose(1 + sum(c or 0 for c in counts.cumulative), (accepted + 1).mean())
        assert sum(counts.reasons.values()) == len(accepted)


def test_statistics_keep_sglangs_names_and_say_when_rounds_disagree():
    trace = load(BEAM_SLOTS)
    tables = rows(Document(report.render([trace])), "Statistics, SGLang's names")
    for table, stats in zip(tables, trace.stats, strict=True):
        shown = dict(table)
        assert set(shown) == set(stats)
        for name, value in stats.items():
            if isinstance(value, float):
                assert float(shown[name]) == pytest.approx(value, rel=1e-5)
            elif not isinstance(value, dict):
                assert shown[name] == str(value)
    trace.stats[1]["spec_verify_ct"] += 1
    page = report.render([trace])
    wrong = dict(rows(Document(page), "Statistics, SGLang's names")[1])
    assert "≠" in wrong["spec_verify_ct"]
    assert "≠" not in wrong["spec_accept_rate"]
    assert "the rounds of this trace do not give it: spec_verify_ct" in page
    trace.stats = []
    again = rows(Document(report.render([trace])), "Statistics, SGLang's names")[0]
    assert dict(again) == {name: text for name, text in tables[0] if name != "finish_reason"}


def test_data_is_the_traces(made):
    traces, page = made
    known = page_data(page)
    for trace, stored in zip(traces, known["traces"], strict=True):
        for i, sequence in enumerate(stored["sequences"]):
            assert sequence["tokens"] == trace.tokens[i]
            at = 1
            for item, values in zip(trace.of(i), sequence["rounds"], strict=True):
                found = dict(zip(known["fields"], values, strict=True))
                assert sequence["starts"][item.index] == at
                at += found["written"]
                assert found["written"] == len(item.emitted)
                for name in ("length", "tokens", "parents", "predicted", "accepted", "bonus"):
                    assert found[name] == getattr(item, name), name
                assert found["positions"] == 0
                if trace.tree is not None:
                    np.testing.assert_allclose(found["probs"], item.draft_probs, rtol=1e-3)
                    np.testing.assert_allclose(found["margins"], item.margins, rtol=1e-3)
                    np.testing.assert_allclose(found["scores"], item.scores, rtol=1e-3)


def test_positions_and_numbers_that_are_not_usual():
    trace = scripted()
    trace.rounds[0].positions[3] += 1
    trace.rounds[0].scores[2] = float("nan")
    trace.rounds[1].margins.clear()
    known = page_data(report.render([trace]))
    first, second = (
        dict(zip(known["fields"], values, strict=True))
        for values in known["traces"][0]["sequences"][0]["rounds"][:2]
    )
    assert first["positions"] == trace.rounds[0].positions
    assert first["scores"][2] is None
    assert second["margins"] == 0
    assert short(0.123456) == 0.1235
    assert short(2.0) == 2


def test_every_token_is_harmless(byte_level):
    trace = scripted(sequences=1, rounds=1)
    ids = list(range(256, 256 + len(NASTY)))
    trace.prompts = [ids]
    trace.tokens, trace.rounds = [[*ids, 228, 184, 173, 300]], []
    name = "</title><script>hacked=1</script>\u202e\udcff"
    page = report.render([trace], tokenizer=byte_level, names=[name], models=[("<b>", name)])
    document = Document(page)
    page.encode("utf-8")
    assert len(document.all("script")) == 2
    assert not document.all("img")
    texts = [e["text"] for e in document.items]
    assert not [t for t in texts if HARMFUL.search(t)]
    assert "\x00" not in page
    box = document.all("div", class_="tokens")[0]
    wanted = [*map(readable, NASTY), "", "", "中", "<300>"]
    assert [e["text"] for e in document.inside(box, "span")] == wanted
    assert wanted[6] == "\\u202eabc"
    assert wanted[4] == "\\x00"
    data = page.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    assert not set("<>&") & set(data)
    labels = page_data(page)["labels"]
    assert labels["228"] == "‹bytes 228›"
    assert labels["256"] == "</script>"
    assert labels["265"] == "\\n\\n"
    assert labels["267"] == "␣␣"
    assert labels["300"] == "<300>"


def test_labels_show_spaces_and_lines():
    assert label(" the") == "␣the"
    assert label("a b ") == "a b␣"
    assert label("a\n\tb") == "a\\n\\tb"
    assert label("\\n") == "\\\\n"


@pytest.mark.parametrize("share", [0.2, 0.6, 0.95])
def test_long_runs_of_bytes_have_the_pieces_of_the_live_view(tmp_path, share):
    tokenizer = fallback_tokenizer(tmp_path / "hf")
    rng = random.Random(0)
    ids: list[int] = []
    while len(ids) < 500:
        if rng.random() < share:
            ids += rng.choice("中é👩a").encode()
        else:
            ids.append(rng.randrange(256, 261))
        if share < 0.9 and rng.random() < 0.01:
            ids.append(0xE4)
    assert pieces(tokenizer, ids) == Pieces.of(tokenizer, ids)


@pytest.mark.parametrize("seed", range(6))
def test_long_texts_have_the_pieces_of_the_live_view(byte_level, seed):
    rng = random.Random(seed)
    characters = "aé中👩🚀\u200d \nمرب" + "z" * rng.randrange(20)
    ids: list[int] = []
    while len(ids) < 400:
        ids += rng.choice(characters).encode()
        if rng.random() < 0.1:
            ids.append(rng.choice([300, 257, 200, 0x80, 0xF0]))
    for end in (1, 63, 64, 65, 200, 399, 400):
        assert pieces(byte_level, ids[:end]) == Pieces.of(byte_level, ids[:end])


def test_a_large_trace_stays_small():
    """Under 60 bytes a node: four megabytes for a thousand rounds of 64."""
    trace = scripted(sequences=1, rounds=200, tree=(6, 8, 64), vocab=256)
    assert len(report.render([trace]).encode()) < 60 * 64 * 200


def luminance(color: str) -> float:
    values = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colours_have_contrast(theme):
    """WCAG 2.2: 4.5 for text, 3 for what is drawn."""
    style = Document(report.render([plain()])).all("style")[0]["text"]
    found = re.findall(r"--(\w+): light-dark\((#\w+), (#\w+)\)", style)
    colors = {name: luminance(both[theme]) for name, *both in found}

    def contrast(a: str, b: str) -> float:
        low, high = sorted((colors[a], colors[b]))
        return (high + 0.05) / (low + 0.05)

    for back in ("page", "card", "bonus", "good", "warn", *(f"d{k}" for k in range(1, 9))):
        assert contrast("ink", back) >= 4.5, back
    for back in ("page", "card"):
        assert contrast("soft", back) >= 4.5
        assert contrast("accent", back) >= 4.5
        assert min(contrast("a", back), contrast("b", back)) >= 3
    assert min(contrast("card", "a"), contrast("card", "b")) >= 4.5


def test_the_page_is_the_same_every_time():
    traces = [load(ANCESTORS), load(BEAM_SLOTS)]
    assert report.render(traces) == report.render(traces)
    assert {p.name for p in RECORDED.iterdir()} >= {"README.md", ANCESTORS.name, BEAM_SLOTS.name}
