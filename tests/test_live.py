"""The coloured text and the live view, looked at on a screen."""

import io
import re
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text
from terminal import Screen
from tiny_gguf import tiny
from tiny_text import ids_of, text_target

import eagle3_jax as e3
from convert.from_gguf import convert
from eagle3_jax import live
from eagle3_jax.live import LiveView, Pieces, by_depth, printable, token_depths
from eagle3_jax.stopwatch import Stopwatch
from eagle3_jax.tokenizer import Tokenizer

SGR = {1: "1;32", 2: "1;36", 3: "1;35", 4: "1;33", 5: "1;34", 6: "1;31", 0: ""}


@pytest.fixture(scope="module")
def words(sglang_models, tmp_path_factory) -> Tokenizer:
    folder = text_target(sglang_models / "target", tmp_path_factory.mktemp("words") / "target")
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def all_bytes(tmp_path_factory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("bytes")
    convert(tiny().write(folder / "tiny.gguf"), folder / "hf")
    return Tokenizer.from_folder(folder / "hf")


def terminal(width: int = 40, height: int = 10, **options) -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=width,
        height=height,
        highlight=False,
        _environ={"TERM": "xterm-256color", **options},
    )


def screen(console: Console) -> Screen:
    return Screen(console.width, console.height).feed(console.file.getvalue())


def a_round(index: int, drafted: list[int], accepted: int, bonus: int, root: int = 9) -> e3.Round:
    nodes = len(drafted) + 1
    path = list(range(accepted + 1))
    return e3.Round(
        sequence=0,
        index=index,
        length=5,
        tokens=[root, *drafted],
        parents=list(range(-1, nodes - 1)),
        scores=[1.0] * nodes,
        draft_probs=[1.0] * nodes,
        positions=list(range(nodes)),
        predicted=[*drafted[:accepted], bonus, *[0] * (nodes - accepted - 1)],
        margins=[1.0] * nodes,
        accepted=path,
        bonus=bonus,
        emitted=[*drafted[:accepted], bonus],
    )


@pytest.mark.parametrize(
    ("accept", "count", "expected"),
    [
        ([], 3, [0, 0, 0]),
        ([1, 3, 2], 7, [0, 0, 1, 2, 0, 1, 0]),
        ([4], 3, [0, 1, 2]),
        ([], 0, []),
    ],
)
def test_depths(accept, count, expected):
    assert token_depths(accept, count) == expected


@pytest.fixture(scope="module")
def generated(tiny_target, tiny_draft) -> e3.Generation:
    return e3.speculate(
        tiny_target,
        tiny_draft,
        [[5, 17, 33, 91, 120, 7, 100, 45], [64, 3]],
        max_new_tokens=23,
        tree=e3.TreeConfig(3, 4, 8),
        stop_token_ids=(),
        trace=True,
    )


def test_depths_are_those_of_the_accepted_nodes(generated):
    deepest = 0
    for i, tokens in enumerate(generated.tokens):
        own = [0]
        for item in generated.trace.of(i):
            depth = {0: 0}
            for node in range(1, len(item.tokens)):
                depth[node] = depth[item.parents[node]] + 1
            own += [depth[n] for n in item.accepted[1:]] + [0]
        assert token_depths(generated.accept_lengths[i], len(tokens)) == own[: len(tokens)]
        deepest = max(deepest, *own)
    assert deepest == 3


@pytest.mark.parametrize("sequence", [0, 1])
def test_ids_of_a_real_pair(generated, sequence):
    """Without a tokenizer the view shows ids: those of the generation, by depth."""
    console = terminal(width=200)
    with Stopwatch() as watch, LiveView(console, None, watch) as view:
        for item in generated.trace.of(sequence):
            view.add(item)
    shown, tokens = screen(console), generated.tokens[sequence]
    assert shown.lines[0] == " ".join(map(str, tokens))
    at, depths = 0, token_depths(generated.accept_lengths[sequence], len(tokens))
    for token, depth in zip(map(str, tokens), depths, strict=True):
        assert {shown.rows[0][at + i][1] for i in range(len(token))} == {SGR[depth]}
        at += len(token) + 1


@given(st.lists(st.integers(0, len(tiny().tokens) - 1), max_size=30))
def test_pieces_one_by_one_equal_pieces_at_once(all_bytes, ids):
    assert Pieces.of(all_bytes, ids) == all_bytes.pieces(ids)


def test_pieces_without_text(words):
    assert Pieces.of(None, [3, 17]) == ["3 ", "17 "]
    assert Pieces.of(words, [7, 500, 8]) == ["w7", "<500>", " w8"]


def test_control_characters_are_written_out():
    assert printable("a\tb\nc\x1b[2J\r\x9b\u2028") == "a    b\nc\\x1b[2J\\x0d\\x9b\\x2028"


def test_depth_without_colour():
    text = by_depth(["a", " b\n", "c"], [0, 2, 1], color=False)
    assert text.plain == "a[2: b\\n]\n[1:c]"
    assert live.legend(2, color=False).plain.endswith("[1:token] [2:token]")


def test_live_view_on_a_screen(words):
    console = terminal(width=100)
    with Stopwatch() as watch, LiveView(console, words, watch) as view:
        assert re.fullmatch(r"compiling \.\.\. 0\.\d s", view.status())
        view.add(a_round(0, ids_of("w20 w21 w22"), 2, 23))
        assert view.status().startswith("4 tokens | 1 rounds | accept length 3.00 | ")
        view.add(a_round(1, ids_of("w30 w31 w32"), 0, 33, root=23))
        view.add(a_round(2, ids_of("w40 w41 w42"), 3, 43, root=33))
    shown = screen(console)
    assert shown.lines[:2] == ["w9 w20 w21 w23 w33 w40 w41 w42 w43", shown.lines[1]]
    assert shown.lines[1].startswith("9 tokens | 3 rounds | accept length 2.67 | ")
    depths = [0, 1, 2, 0, 0, 1, 2, 3, 0]
    for word, depth in zip(shown.lines[0].split(), depths, strict=True):
        assert shown.style_of(0, word) == SGR[depth], word


def test_live_view_of_plain_decoding(words):
    console = terminal(width=80)
    with Stopwatch() as watch, LiveView(console, words, watch) as view:
        view.add(a_round(0, [], 0, 20))
        view.add(a_round(1, [], 0, 21, root=20))
    shown = screen(console)
    assert shown.lines[0] == "w9 w20 w21"
    assert {style for _, style in shown.rows[0].values()} == {""}
    assert re.match(r"3 tokens \| [\d.]+ tokens/s \| compiling took 0\.0 s more", shown.lines[1])


@pytest.mark.parametrize("options", [{"NO_COLOR": "1"}])
def test_live_view_without_colours(words, options):
    console = terminal(width=60, **options)
    with Stopwatch() as watch, LiveView(console, words, watch) as view:
        view.add(a_round(0, ids_of("w20 w21"), 1, 23))
    assert screen(console).lines[0] == "w9[1: w20] w23"


def test_incomplete_characters_wait(all_bytes):
    console = terminal()
    first, *middle, last = all_bytes.encode("😀")
    with Stopwatch() as watch, LiveView(console, all_bytes, watch) as view:
        for token in (all_bytes.encode("a")[0], first, *middle):
            view.add_token(token, 0)
        assert view._line.plain == "a"
        view.add_token(last, 1)
        assert view._line.plain == "a😀"
        view.add_token(first, 0)
    assert "a😀\ufffd" in [line.replace("😀 ", "😀") for line in screen(console).lines]


def shown_and_whole(pieces: list[str]) -> tuple[list[str], list[str]]:
    """Rows of a live view redrawn after every piece, and of all the text printed at once."""
    console = terminal(width=16, height=6)
    with Stopwatch() as watch, LiveView(console, None, watch) as view:
        for piece in pieces:
            view._append(piece, 0)
            view._live.refresh()
    whole = terminal(width=16, height=1000)
    whole.print(Text(printable("".join(pieces))))
    *found, status, _ = screen(console).lines
    assert status.startswith("compiling ...")
    return found, screen(whole).lines[:-1]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from(["ab", " c", " word", " longer-word", "\n", " d\n", "."]), max_size=25)
)
def test_text_stands_as_if_printed_at_once(pieces):
    found, whole = shown_and_whole(pieces)
    assert found == whole


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(st.sampled_from("ab é\n\t.-"), max_size=40), max_size=9))
def test_no_character_of_any_text_is_lost(pieces):
    found, whole = shown_and_whole(pieces)
    assert "".join("".join(found).split()) == "".join("".join(whole).split())


def test_stopwatch_tells_compiling_apart():
    with Stopwatch() as watch:
        time.sleep(0.05)
        jax.jit(lambda x: jnp.sin(x) @ jnp.cos(x).T + 17)(jnp.ones((3, 5))).block_until_ready()
        before = watch.compiling
        time.sleep(0.05)
        assert watch.compiling == before > 0.001
    assert watch.total == pytest.approx(watch.compiling + watch.running)
    assert watch.running > 0.1 > 0
    total = watch.total
    jax.jit(lambda x: x * 3 - 1)(jnp.ones(7)).block_until_ready()
    assert (watch.total, watch.compiling) == (total, before)


def test_nested_compile_spans_count_once():
    watch = Stopwatch()
    for start, end in ((1.0, 1.2), (1.3, 1.4), (0.9, 2.0), (3.0, 3.5)):
        watch._add(start, end)
    assert watch.compiling == pytest.approx(1.6)
