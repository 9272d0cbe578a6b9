"""A replay as a trace: every visited round with its whole tree, to be compared like any other."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.config import ConfigError, TreeConfig
from eagle3_jax.record import Record
from eagle3_jax.replays.bin import BinReplay, Runner
from eagle3_jax.replays.result import ReplayResult
from eagle3_jax.replays.rows import Part, Rows, pack
from eagle3_jax.run import versions
from eagle3_jax.trace import Round, Trace
from eagle3_jax.tree import Candidates, Tree, select

UNKNOWN_TOKEN = -1


def replay_trace(
    record: Record, runner: Runner, result: ReplayResult, tree: TreeConfig, *, capacity: int
) -> Trace:
    """The rounds of one tree of a free replay, drafted once more.

    `Round.predicted` is known on the accepted path only and -1 elsewhere; `margins` is empty; a
    round that the record's end cut is not there, and `tokens` ends with the last whole round.

    Raises:
      ConfigError: the replay was pinned or kept its draft KV, or a sequence has several outputs.
    """
    if result.mode != "free" or not result.refresh:
        raise ConfigError("a trace follows a free replay with refreshed draft KV")
    several = [i for i, s in enumerate(result.sequences) if len(s.begins) > 1]
    if several:
        raise ConfigError(
            f"sequence {several[0]} has {len(result.sequences[several[0]].begins)} outputs by its "
            "loss mask, a trace has one a prompt"
        )
    config = runner.draft.config
    to_draft = np.full(config.vocab_size, -1, np.int32)
    ids = np.asarray(runner.draft.draft_to_target[...])
    to_draft[ids] = np.arange(len(ids), dtype=np.int32)
    wanted: dict[int, list[tuple[int, int]]] = {}
    for r in result.of(tree).rounds:
        wanted.setdefault(r.sequence, []).append((r.start, r.accepted))
    found: list[Round] = []
    for rows in pack(
        record.sequences,
        to_draft,
        steps=tree.num_steps,
        capacity=capacity,
        multiple=runner.chunk,
        multi_axis=bool(config.rope.mrope_section),
    ):
        replayed = BinReplay(runner, rows, topk=tree.topk)
        for part in rows.parts:
            found += _part(replayed, rows, part, tree, wanted.get(part.number, []))
    return _trace(record, runner, result, tree, found)


def _part(
    replayed: BinReplay, rows: Rows, part: Part, tree: TreeConfig, rounds: list[tuple[int, int]]
) -> list[Round]:
    size = replayed.starts_per_call(tree.topk)
    found: list[Round] = []
    tokens = np.asarray(part.sequence.tokens)
    for first in range(0, len(rounds), size):
        chosen = rounds[first : first + size]
        slots = np.array([part.slot_of(start) for start, _ in chosen])
        _, _, candidates = replayed.trees(slots, tree, whole=True)
        assert candidates is not None
        roots = rows.tokens[slots]
        chosen_tree = jax.device_get(_select(candidates, jnp.asarray(roots), tree))
        for i, (start, accepted) in enumerate(chosen):
            nodes = jax.tree.map(lambda x, i=i: x[i], chosen_tree)
            text = tokens[start : start + accepted + 2].tolist()
            root = start if rows.axes is None else int(rows.farthest[slots[i]]) + 1
            found.append(_round(part.number, first + i, start, root, accepted, nodes, text))
    return found


def _select(candidates: Candidates, roots: jax.Array, tree: TreeConfig) -> Tree:
    return select(jax.tree.map(jnp.asarray, candidates), roots, tree)[0]


def _round(
    sequence: int,
    index: int,
    start: int,
    root: int,
    accepted: int,
    tree: Tree,
    text: list[int],
) -> Round:
    """`root` is the bonus token's rotary position; `text` is that token, the accepted ones, and the
    next where the record has it.
    """
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    path = [0]
    for token in text[1 : accepted + 1]:
        path.append(
            next(
                n
                for n in range(1, len(tokens))
                if parents[n] == path[-1] and tokens[n] == token and n > path[-1]
            )
        )
    predicted = [UNKNOWN_TOKEN] * len(tokens)
    for node, following in zip(path, text[1:], strict=False):
        predicted[node] = following
    bonus = text[accepted + 1] if len(text) > accepted + 1 else UNKNOWN_TOKEN
    emitted = text[1 : accepted + 2]
    return Round(
        sequence=sequence,
        index=index,
        length=start,
        tokens=tokens,
        parents=[-1, *parents[1:]],
        scores=tree.scores.tolist(),
        draft_probs=tree.probs.tolist(),
        positions=(root + tree.depths).tolist(),
        predicted=predicted,
        margins=[],
        accepted=path,
        bonus=bonus,
        emitted=emitted,
    )


def _trace(
    record: Record, runner: Runner, result: ReplayResult, tree: TreeConfig, found: list[Round]
) -> Trace:
    prompts, tokens = [], []
    for number, sequence in enumerate(result.sequences):
        ids = np.asarray(record.sequences[number].tokens).tolist()
        begin = sequence.begins[0] if sequence.begins else len(ids)
        last = [r for r in found if r.sequence == number]
        end = last[-1].length + len(last[-1].accepted) + 1 if last else begin + 1
        prompts.append(ids[:begin])
        tokens.append(ids[begin:end])
    return Trace(
        prompts=prompts,
        tokens=tokens,
        rounds=found,
        tree=dataclasses.asdict(tree),
        rule="greedy",
        draft_attention=result.draft_attention,
        dtype={"draft": result.dtype},
        engine=runner.draft.engine,
        versions=versions(),
        stats=result.of(tree).stats(),
    )
