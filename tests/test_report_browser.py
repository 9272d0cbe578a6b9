"""The page in a real headless Chromium: keys, trees, two traces, themes, widths, no scripts."""

import time

import pytest

pytest.importorskip("playwright.sync_api")

from browser import executable, watched
from playwright.sync_api import sync_playwright
from report_traces import ANCESTORS, BEAM_SLOTS, NASTY, byte_tokenizer, load, scripted

from eagle3_jax import report
from eagle3_jax.trace import Round, Trace

CHROMIUM = executable()


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Pages by name; those of scripted traces have text."""
    folder = tmp_path_factory.mktemp("pages")
    tokenizer = byte_tokenizer(folder / "hf")
    nasty = scripted(sequences=1, rounds=1)
    ids = list(range(256, 256 + len(NASTY)))
    nasty.prompts, nasty.rounds, nasty.tokens = [ids], [], [[5]]
    item = scripted(sequences=1, rounds=1, tree=(2, 16, 17), vocab=260).rounds[0]
    nasty.rounds = [nasty_round(item, ids)]
    nasty.tokens = [[ids[0], *nasty.rounds[0].emitted]]
    pages = {
        "one": report.render([scripted(rounds=9)], tokenizer=tokenizer),
        "recorded": report.render([load(BEAM_SLOTS)]),
        "two": report.render([load(ANCESTORS), load(BEAM_SLOTS)], names=["ours" * 60, "theirs"]),
        "nasty": report.render([nasty], tokenizer=tokenizer),
        "plain": report.render([without_draft()], tokenizer=tokenizer),
        "large": report.render(
            [scripted(sequences=1, rounds=1000, tree=(6, 8, 64), vocab=256)], tokenizer=tokenizer
        ),
    }
    for name, page in pages.items():
        (folder / f"{name}.html").write_text(page, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in pages}


def nasty_round(item: Round, ids: list[int]) -> Round:
    """A root with all other ids as its children; the target takes the first."""
    nodes = [ids[0], *ids[1:], ids[0]]
    count = len(nodes)
    ones = [0.5] * count
    return Round(
        sequence=0,
        index=0,
        length=item.length,
        tokens=nodes,
        parents=[-1] + [0] * (count - 1),
        scores=ones,
        draft_probs=ones,
        positions=[item.length] + [item.length + 1] * (count - 1),
        predicted=[ids[1]] * count,
        margins=ones,
        accepted=[0, 1],
        bonus=ids[2],
        emitted=[ids[1], ids[2]],
    )


def without_draft() -> Trace:
    trace = scripted(sequences=1, rounds=2, tree=(1, 1, 1))
    trace.tree, trace.draft_attention = None, None
    return trace


def test_arrows_home_and_end_walk_the_rounds(browser, files):
    with watched(browser, files["recorded"]) as seen:
        rounds = load(BEAM_SLOTS).of(0)
        assert seen.round == 0
        assert seen.key("ArrowLeft").round == 0
        assert seen.key("ArrowRight", "ArrowRight").round == 2
        assert seen.key("n").round == 3
        assert seen.key("p").round == 2
        assert seen.page.evaluate("location.hash") == "#p0r2"
        assert seen.key("End").round == len(rounds) - 1
        assert seen.page.get_by_role("button", name="Next round").get_attribute("aria-disabled")
        assert seen.key("ArrowRight").round == len(rounds) - 1
        assert seen.key("Home").round == 0
        seen.page.get_by_role("button", name="Last round").click()
        assert seen.round == len(rounds) - 1
        seen.page.fill("#round", "4")
        assert seen.key("Enter").round == 4
        seen.page.get_by_role("button", name="Previous round").click()
        assert seen.round == 3
        assert "Accept length" in seen.page.get_by_role("status").inner_text()
        assert seen.key("]").page.evaluate("location.hash") == "#p1r0"
        assert seen.page.locator("#p1").is_visible()
        assert not seen.page.locator("#p0").is_visible()
        assert seen.page.evaluate("document.activeElement.id") == "p1-title"
        assert seen.page.get_by_role("navigation").locator("[aria-current]").count() == 1


def test_help_opens_and_letters_can_be_turned_off(browser, files):
    with watched(browser, files["one"]) as seen:
        dialog = seen.page.get_by_role("dialog", name="Keys")
        assert not dialog.is_visible()
        seen.key("?")
        assert dialog.is_visible()
        assert "first difference" not in dialog.inner_text()
        assert seen.key("ArrowRight").round == 0
        seen.page.get_by_label("letters and signs").uncheck()
        seen.key("Escape")
        assert not dialog.is_visible()
        assert seen.key("n", "?").round == 0
        assert not dialog.is_visible()
        assert seen.key("ArrowRight").round == 1
        seen.page.get_by_role("button", name="Keys").click()
        assert dialog.is_visible()
        seen.page.get_by_role("button", name="Close").click()
        assert not dialog.is_visible()


@pytest.mark.parametrize("name", ["recorded", "one"])
def test_every_tree_is_the_rounds(browser, files, name):
    trace = load(BEAM_SLOTS) if name == "recorded" else scripted(rounds=9)
    rounds = trace.rounds[::4] if name == "recorded" else trace.rounds
    read = """nodes => nodes.map(n => ({node: +n.dataset.node, level: +n.ariaLevel,
        label: n.getAttribute("aria-label"), taken: n.classList.contains("taken")}))"""
    with watched(browser, files[name]) as seen:
        for item in rounds:
            seen.page.evaluate("where => location.hash = where", f"#p{item.sequence}r{item.index}")
            seen.page.wait_for_function(
                """([p, r]) => at.pair === p && at.rounds[0] === r""",
                arg=[item.sequence, item.index],
            )
            nodes = {n["node"]: n for n in seen.page.get_by_role("treeitem").evaluate_all(read)}
            count = len(item.tokens)
            assert sorted(nodes) == list(range(count + 1))
            own = nodes.pop(count)
            assert f"id {item.bonus}" in own["label"]
            assert own["level"] == len(item.accepted) + 1
            assert sorted(n for n in nodes if nodes[n]["taken"]) == sorted(item.accepted)
            for n, node in nodes.items():
                assert node["level"] == item.positions[n] - item.length + 1
                assert f"id {item.tokens[n]}" in node["label"]
                assert f"next token {label(name, item.predicted[n])}" in node["label"]
                if n:
                    shown = float(node["label"].split("probability ")[1].split(",")[0])
                    assert shown == pytest.approx(item.draft_probs[n], rel=1e-3)
            why = seen.page.locator(".why").inner_text()
            assert why.startswith(f"Accept length {len(item.accepted)}.")
            assert f"id {item.bonus}" in why
            assert ("cut the rest" in why) == (len(item.emitted) < len(item.accepted))
            edges = seen.page.locator(".edge.taken").count()
            assert edges == len(item.accepted) - 1


def label(name: str, token: int) -> str:
    return f"id {token}" if name == "recorded" else "“"


def test_a_tree_is_walked_by_keys(browser, files):
    with watched(browser, files["recorded"], "#p0r3") as seen:
        item = load(BEAM_SLOTS).of(0)[3]
        focused = "+document.activeElement.dataset.node"
        seen.page.locator('.node[data-node="0"]').click()
        assert seen.page.evaluate(focused) == 0
        seen.key("End")
        last = seen.page.evaluate(focused)
        seen.key("ArrowLeft")
        assert seen.page.evaluate(focused) == item.parents[last]
        assert seen.round == 3
        seen.key("Home", "ArrowRight")
        assert seen.page.evaluate(focused) in {len(item.tokens), item.accepted[-1]}
        seen.key("ArrowDown")
        node = seen.page.evaluate(focused)
        facts = seen.page.locator(".facts").inner_text().split("\n")
        shown = dict(zip(facts[::2], facts[1::2], strict=True))
        assert shown["node"] == str(node)
        assert shown["id"] == str(item.tokens[node])
        assert shown["parent"] == str(item.parents[node])
        assert shown["position"] == str(item.positions[node])
        assert float(shown["score"]) == pytest.approx(item.scores[node], rel=1e-3)
        assert shown["target's next token"] == f"id {item.predicted[node]}"
        assert float(shown["target's margin"]) == pytest.approx(item.margins[node], rel=1e-3)
        assert seen.page.locator('.node[tabindex="0"]').count() == 1
        assert seen.key("n").round == 4
        assert seen.page.evaluate("document.activeElement.closest('.node') !== null")
        seen.key("Escape")
        assert seen.page.evaluate("document.activeElement.id") == "round"
        seen.page.get_by_text("All nodes as a table").click()
        seen.page.locator(".nodes tbody tr").first.wait_for()
        assert seen.page.locator(".nodes tbody tr").count() == 8


def test_a_token_leads_to_its_round(browser, files):
    trace = load(BEAM_SLOTS)
    wanted = [0]
    for item in trace.of(0):
        wanted += [item.index] * len(item.emitted)
    with watched(browser, files["recorded"]) as seen:
        found = seen.page.evaluate(
            """() => [...document.querySelectorAll('#p0 .tokens > span')].map(token => {
                token.click();
                return [+document.getElementById('round').value, token.classList.contains('now')];
            })"""
        )
        assert [round_ for round_, _ in found] == wanted
        assert [now for _, now in found] == [False] + [True] * (len(wanted) - 1)


def test_two_traces_meet_at_the_same_token_and_jump_to_their_difference(browser, files):
    a, b = load(ANCESTORS), load(BEAM_SLOTS)
    with watched(browser, files["two"], "#p1r0") as seen:
        panes = seen.page.locator(".pane")
        assert panes.count() == 2
        seen.key("d")
        assert seen.round == 11
        chosen = panes.locator('.node[aria-selected="true"]')
        nodes = [int(n) for n in chosen.evaluate_all("all => all.map(n => n.dataset.node)")]
        assert panes.locator(".node.apart").count() == 2
        ids = (a.of(1)[11].tokens[nodes[0]], b.of(1)[11].tokens[nodes[1]])
        listed = seen.page.locator("#p1 > .verdict").inner_text()
        assert all(f"round 11, node {n}, id {i}" in listed for n, i in zip(nodes, ids, strict=True))
        seen.open("#p0r2")
        seen.key("s", "ArrowRight")
        assert seen.page.evaluate("location.hash") == "#p0r3b"
        assert "B leads" in seen.page.locator("#of").inner_text()
        starts = [1 + sum(len(r.emitted) for r in b.of(0)[:3])]
        begin = [1]
        for item in a.of(0):
            begin.append(begin[-1] + len(item.emitted))
        meeting = max(k for k, start in enumerate(begin) if start <= starts[0])
        assert f"round {meeting}," in panes.nth(0).locator("h4").inner_text()
        seen.page.get_by_role("link", name="prompt 1").click()
        assert seen.page.locator("#p1").is_visible()


def test_light_and_dark(browser, files):
    background = "getComputedStyle(document.body).backgroundColor"
    with watched(browser, files["one"], color_scheme="dark") as seen:
        dark = seen.page.evaluate(background)
        seen.key("t")
        light = seen.page.evaluate(background)
        assert seen.page.locator("#theme").inner_text() == "Theme: light"
        assert light != dark
        seen.open()
        assert seen.page.evaluate(background) == light
        seen.page.locator("#theme").click()
        assert seen.page.evaluate(background) == dark
    with watched(browser, files["one"], color_scheme="light") as seen:
        assert seen.page.evaluate(background) == light
        seen.key("t", "t")
        assert seen.page.locator("#theme").inner_text() == "Theme: dark"
        assert seen.page.evaluate(background) == dark


@pytest.mark.parametrize("name", ["one", "recorded", "two", "nasty", "plain"])
def test_no_width_scrolls_sideways(browser, files, name):
    with watched(browser, files[name]) as seen:
        for width in (360, 768, 1280):
            seen.page.set_viewport_size({"width": width, "height": 800})
            assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
            clipped = seen.page.evaluate(
                """() => [...document.querySelectorAll('h1, h2, h3, button, .why, .cards dd')]
                .filter(e => e.offsetParent && e.getBoundingClientRect().right > innerWidth)
                .map(e => e.outerHTML)"""
            )
            assert clipped == []


@pytest.mark.parametrize("name", ["one", "two"])
def test_text_and_numbers_without_scripts(browser, files, name):
    with watched(browser, files[name], java_script_enabled=False) as seen:
        page = seen.page
        assert page.locator(".sequence:visible").count() == 2
        assert page.locator("figure:visible").count() == 2 * (1 + (name == "two"))
        assert page.get_by_text("Accept-length histogram").last.is_visible()
        assert page.get_by_text("spec_accept_length").first.is_visible()
        assert not page.locator("#viewer").is_visible()
        assert not page.locator(".tools").is_visible()
        for detail in page.locator("details").all():
            detail.locator("summary").click()
        assert page.locator(".lengths:visible").count() == 2


def test_tokens_do_no_harm(browser, files):
    with watched(browser, files["nasty"]) as seen:
        assert seen.page.evaluate("typeof hacked") == "undefined"
        assert seen.page.locator("img").count() == 0
        seen.page.get_by_text("All nodes as a table").click()
        seen.page.locator(".nodes tbody tr").first.wait_for()
        shown = seen.page.locator(".nodes tbody tr td:first-of-type").all_inner_texts()
        assert shown[0] == "</script>"
        assert shown[2] == "<img src=x onerror=hacked=1>"
        assert shown[4] == "\\x00"
        assert shown[6] == "\\u202eabc"
        assert shown[8] == NASTY[8]


def test_focus_is_seen_and_everything_is_named(browser, files):
    with watched(browser, files["two"]) as seen:
        unnamed = seen.page.evaluate(
            """() => [...document.querySelectorAll('button, input, [role], summary, a')].filter(e =>
                !(e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.length)
                && e.id !== 'said').map(e => e.outerHTML)"""
        )
        assert unnamed == []
        reached = set()
        for _ in range(40):
            seen.key("Tab")
            reached.add(
                seen.page.evaluate(
                    """() => { const e = document.activeElement;
                    return e.id || e.dataset.go || e.getAttribute('aria-label') || e.tagName; }"""
                )
            )
            if seen.page.evaluate("document.activeElement === document.body"):
                break
            ring = seen.page.evaluate(
                """() => { const e = document.activeElement, ring = e.querySelector('.ring');
                return ring ? getComputedStyle(ring).strokeWidth
                    : getComputedStyle(e).outlineStyle; }"""
            )
            assert ring in ("solid", "4px"), seen.page.evaluate("document.activeElement.outerHTML")
        assert {"theme", "keys", "round", "next", "last"} <= reached
        tree = seen.page.get_by_role("tree").first
        assert "nodes" in tree.get_attribute("aria-label")


def test_plain_decoding_has_rounds_of_one_node(browser, files):
    with watched(browser, files["plain"]) as seen:
        assert "Plain decoding" in seen.page.locator(".why").inner_text()
        assert seen.page.get_by_role("treeitem").count() == 2
        assert seen.key("End").round == 1


@pytest.mark.parametrize("anchor", ["#p1r3", "#p1r999", "#p7r1", "#x", "#p0r2b"])
def test_an_address_opens_a_round(browser, files, anchor):
    with watched(browser, files["one"], anchor) as seen:
        last = 8
        wanted = {"#p1r3": (1, 3), "#p1r999": (1, last), "#p0r2b": (0, 2)}.get(anchor, (0, 0))
        assert seen.round == wanted[1]
        assert seen.page.locator(f"#p{wanted[0]}").is_visible()


def test_a_large_trace_stays_usable(browser, files):
    start = time.monotonic()
    with watched(browser, files["large"]) as seen:
        assert seen.page.get_by_role("treeitem").count() == 65
        assert time.monotonic() - start < 20
        start = time.monotonic()
        for _ in range(20):
            seen.key("ArrowRight")
        assert seen.round == 20
        assert time.monotonic() - start < 20
        assert seen.key("End").round == 999
        assert seen.page.evaluate("document.querySelectorAll('*').length") < 12_000
