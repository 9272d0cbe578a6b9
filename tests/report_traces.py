"""Traces for the report's tests: recorded ones, scripted ones, and a byte-level tokenizer."""

import copy
import itertools
import json
import random
from pathlib import Path

import tokenizers
from tokenizers import decoders, models

from eagle3_jax.tokenizer import Tokenizer
from eagle3_jax.trace import Round, Trace

RECORDED = Path(__file__).parent / "data/report"
ANCESTORS = RECORDED / "ancestors.trace"
BEAM_SLOTS = RECORDED / "sglang-0.5.23.trace"

NASTY = [
    "</script>",
    "<!--",
    "<img src=x onerror=hacked=1>",
    "\"'`&amp;",
    "\x00",
    "\x1b[31m",
    "\u202eabc",
    "\u2028",
    "مرحبا",
    "\n\n",
    "\t",
    "  ",
    "👩‍🚀",
    "\ufeff",
    "${title}",
    "\\n",
    "</script x",
    "<!-- <script ",
]


def byte_tokenizer(folder: Path) -> Tokenizer:
    """Ids 0 to 255 are bytes, then `NASTY` as added tokens; 300 is not in it."""
    marks = _byte_characters()
    backend = tokenizers.Tokenizer(models.BPE({marks[b]: b for b in range(256)}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in NASTY])
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_folder(folder)


def fallback_tokenizer(folder: Path) -> Tokenizer:
    """Ids 0 to 255 are bytes, then words after a `▁`, as in Llama's: runs of bytes are one text."""
    words = ["▁the", "▁of", "s", "▁", "ing"]
    vocab = {f"<0x{b:02X}>": b for b in range(256)} | {w: 256 + i for i, w in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_folder(folder)


def _byte_characters() -> list[str]:
    """GPT-2's table: printable Latin-1 characters stand for themselves, others from U+0100 on."""
    same = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(b) if b in same else chr(next(others)) for b in range(256)]


def grow(
    rng: random.Random, sequence: int, index: int, length: int, root: int, tree: dict, vocab: int
) -> Round:
    """A round with a random tree and a random accepted path, consistent as a greedy one is."""
    count, steps = tree["num_draft_tokens"], tree["num_steps"]
    tokens, parents, depths = [root], [-1], [0]
    while len(tokens) < count:
        parent = rng.randrange(len(tokens))
        taken = {tokens[n] for n in range(len(tokens)) if parents[n] == parent}
        token = rng.randrange(vocab)
        if depths[parent] < steps and token not in taken:
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
    children = [[n for n in range(count) if parents[n] == p] for p in range(count)]
    path = [0]
    while children[path[-1]] and rng.random() < 0.7:
        path.append(rng.choice(children[path[-1]]))
    predicted = []
    for node in range(count):
        below = {tokens[n] for n in children[node]}
        predicted.append(rng.choice([t for t in range(vocab) if t not in below]))
    for node, following in itertools.pairwise(path):
        predicted[node] = tokens[following]
    probs = [1.0, *(rng.random() for _ in tokens[1:])]
    scores = [1.0]
    for node in range(1, count):
        scores.append(scores[parents[node]] * probs[node])
    return Round(
        sequence=sequence,
        index=index,
        length=length,
        tokens=tokens,
        parents=parents,
        scores=scores,
        draft_probs=probs,
        positions=[length + depth for depth in depths],
        predicted=predicted,
        margins=[5 * rng.random() for _ in tokens],
        accepted=path,
        bonus=predicted[path[-1]],
        emitted=[tokens[n] for n in path[1:]] + [predicted[path[-1]]],
    )


def scripted(
    *,
    sequences: int = 2,
    rounds: int = 6,
    tree: tuple[int, int, int] = (4, 3, 10),
    vocab: int = 272,
    seed: int = 0,
) -> Trace:
    """A trace that no model wrote; the last round of each sequence is cut by one token."""
    rng = random.Random(seed)
    triple = dict(zip(("num_steps", "topk", "num_draft_tokens"), tree, strict=True))
    prompts = [[rng.randrange(vocab) for _ in range(5 + i)] for i in range(sequences)]
    trace = Trace(
        prompts=prompts,
        tokens=[],
        rounds=[],
        tree=triple,
        rule="greedy",
        draft_attention="ancestors",
        dtype={"target": "float32", "draft": "float32"},
        versions={"eagle3_jax": "0"},
    )
    for i, prompt in enumerate(prompts):
        tokens, length = [rng.randrange(vocab)], len(prompt)
        for index in range(rounds):
            item = grow(rng, i, index, length, tokens[-1], triple, vocab)
            tokens += item.emitted
            length += len(item.accepted)
            trace.rounds.append(item)
        if len(trace.rounds[-1].emitted) > 1:
            trace.rounds[-1].emitted.pop()
            tokens.pop()
        trace.tokens.append(tokens)
    return trace


def load(path: Path) -> Trace:
    return Trace.load(path)


def changed(trace: Trace, of: int, number: int, **fields) -> Trace:
    """A copy in which round `number` of sequence `of` has other fields."""
    other = copy.deepcopy(trace)
    at = next(k for k, r in enumerate(other.rounds) if (r.sequence, r.index) == (of, number))
    values = {name: getattr(other.rounds[at], name) for name in Round.__dataclass_fields__}
    other.rounds[at] = Round(**(values | fields))
    return other


def page_data(page: str) -> dict:
    """The JSON that the page's script reads."""
    opening = '<script type="application/json" id="data">'
    text = page.split(opening, 1)[1].split("</script>", 1)[0]
    return json.loads(text)
