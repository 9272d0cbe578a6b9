"""Replay on a CPU against the draft's plain forward: `python bench/replay.py` after `make model`.

    python bench/replay.py                  one long text and the demo's prompts, chains of 1, 3, 5
    python bench/replay.py --tree 3,4,8     also a tree, as tokens/s

The plain forward is one pass of the draft over the same tokens and states, with logits and argmax
of every row, in calls of the same number of rows. A chain of K levels runs K - 1 more forwards at
the rows that are right so far: its share of the plain speed is about 1 / (1 + c_1 + .. + c_(K-1)).
"""

import harness

parser = harness.parser(__doc__)
parser.add_argument("--tokens", type=int, default=2000, metavar="N", help="of the long text")
parser.add_argument("--tree", action="append", default=[], metavar="STEPS,TOPK,TOKENS")
args = parser.parse_args()
harness.use_cores(args.cores)

import functools  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from pair import models  # noqa: E402
from run import PROMPTS  # noqa: E402

import eagle3_jax as e3  # noqa: E402
from eagle3_jax.layers import Rows  # noqa: E402
from eagle3_jax.modules import take_apart  # noqa: E402
from eagle3_jax.record import Record, RecordSequence  # noqa: E402
from eagle3_jax.replay import CHUNK, replay  # noqa: E402
from eagle3_jax.tokenizer import Tokenizer  # noqa: E402


def record_of(target, draft, texts: list[tuple[int, list[int]]]) -> Record:
    """(prompt length, ids) with the states of one pass over each."""
    boundaries = draft.config.aux_boundaries
    sequences = []
    for prompt, ids in texts:
        padded = -(-len(ids) // 256) * 256
        tokens = np.zeros((1, padded), np.int32)
        tokens[0, : len(ids)] = ids
        rows = Rows.prefill(1, padded)
        _, aux, _ = target.states(
            jnp.asarray(tokens), rows, target.new_cache(1, padded), boundaries
        )
        sequences.append(
            RecordSequence(np.asarray(ids, np.int32), np.asarray(aux)[0, : len(ids)], prompt)
        )
    return Record(
        boundaries, "greedy", sequences, target.config.vocab_size, target.config.num_layers
    )


@functools.partial(jax.jit, static_argnames=("structure",), donate_argnames=("cache",))
def forward(structure, leaves, shared, cache, aux, tokens, start):
    """C rows after `start` ones: what any user of the draft runs."""
    draft = structure.build(leaves)
    rows = Rows.chain(start[None], tokens.shape[0])
    out, cache = draft.step(tokens[None], draft.fuse(aux[None]), rows, cache, shared=shared)
    return cache, jnp.argmax(draft.logits(out, shared=shared), axis=-1)


def plain(draft, shared, record: Record) -> int:
    """The draft's forward over a whole record."""
    leaves, structure = take_apart(draft)
    total = 0
    for sequence in record.sequences:
        rows = len(sequence.tokens) - 1
        slots = -(-rows // CHUNK) * CHUNK
        cache = draft.new_cache(1, slots)
        found = []
        for start in range(0, rows, CHUNK):
            tokens, aux = np.zeros(CHUNK, np.int32), sequence.aux[start : start + CHUNK]
            here = sequence.tokens[start + 1 : start + 1 + CHUNK]
            tokens[: len(here)] = here
            states = np.zeros((CHUNK, *aux.shape[1:]), aux.dtype)
            states[: len(aux)] = aux
            cache, best = forward(structure, leaves, shared, cache, states, tokens, np.int32(start))
            found.append(best)
        jax.device_get(found)
        total += rows
    return total


def main():
    folder, target, draft = models()
    tokenizer = Tokenizer.from_folder(folder)
    prompts = [tokenizer.encode(text, add_special_tokens=True) for text in PROMPTS]
    new = 128
    answers = e3.generate(target, prompts, max_new_tokens=new, stop_token_ids=()).tokens
    long = e3.generate(
        target, prompts[:1], max_new_tokens=args.tokens - len(prompts[0]), stop_token_ids=()
    ).tokens[0]
    records = {
        "one long": record_of(target, draft, [(len(prompts[0]), [*prompts[0], *long])]),
        "short ones": record_of(
            target, draft, [(len(p), [*p, *a]) for p, a in zip(prompts, answers, strict=True)]
        ),
    }
    shared = target.shared()
    chains = [e3.TreeConfig(steps) for steps in (1, 3, 5)]
    trees = [e3.TreeConfig(*map(int, text.split(","))) for text in args.tree]
    result = {}
    for name, record in records.items():
        tokens = sum(len(s.tokens) - 1 for s in record.sequences)
        runs = {"plain": functools.partial(plain, draft, shared, record)}
        for tree in (*chains, *trees):
            runs[str(tree)] = functools.partial(replay, record, draft, tree, shared=shared)
        times = harness.alternate(runs, args.repeats)
        seconds = harness.medians(times)
        result[name] = {
            "tokens": tokens,
            "plain tokens/s": tokens / seconds["plain"],
            "replay": {
                str(tree): {
                    "tokens/s": tokens / seconds[str(tree)],
                    "of plain": harness.ratio(times, "plain", str(tree)),
                    "accept length": replay(record, draft, tree, shared=shared)
                    .trees[0]
                    .accept_length,
                }
                for tree in (*chains, *trees)
            },
        }
    harness.report({"replay": result}, args.out)


if __name__ == "__main__":
    main()
