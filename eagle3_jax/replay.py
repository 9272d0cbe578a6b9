"""Replay: the accept length of any draft under any tree, from a record and without its target.

A greedy round depends only on the prefix and its states. As long as a draft is right its tokens are
the record's, so the record answers for the target.
"""

import dataclasses
from collections.abc import Sequence

from eagle3_jax.checks import check_draft_attention
from eagle3_jax.config import ConfigError, TreeConfig
from eagle3_jax.draft import Eagle3Draft, Shared
from eagle3_jax.record import Record, check_fields, check_sequence
from eagle3_jax.records.checks import check_for_draft
from eagle3_jax.replays.bin import Runner
from eagle3_jax.replays.result import MODES, Mode, ReplayResult
from eagle3_jax.replays.trace import replay_trace
from eagle3_jax.replays.walk import Walker
from eagle3_jax.sampling_config import AcceptRule
from eagle3_jax.tree import DraftAttention

CHUNK, CAPACITY = 128, 1024


def replay(
    record: Record,
    draft: Eagle3Draft,
    trees: TreeConfig | Sequence[TreeConfig],
    *,
    mode: Mode = "free",
    shared: Shared | None = None,
    draft_attention: DraftAttention | None = None,
    refresh: bool = True,
    temperatures: Sequence[float] = (),
    rule: AcceptRule | None = None,
    window: int | None = None,
    trace: bool = False,
    chunk: int = CHUNK,
    capacity: int = CAPACITY,
) -> ReplayResult:
    """What every round would have accepted.

    For a `"greedy"` record exactly what serving accepts; for other text, how often the draft meets
    its tokens. Rounds that the record's end cuts are left out and counted apart.

    Args:
      trees: one or many; chains cost one pass in all, trees one growth a topk.
      mode: `"free"` walks from each output's beginning by its own accepts; `"pinned"` judges a
        round at every start the record's engine had, whatever was accepted before.
      shared: the target's embedding and head, for drafts that use them (`read_shared`).
      draft_attention: as for `speculate`; None for the draft's own.
      refresh: committed tokens get their draft KV from target states, as every engine does; False
        keeps what drafting wrote (chains, free).
      temperatures: also the expected accept length there, from the record's logprobs (chains).
      rule: who accepts at a temperature; None is `target_only` without thresholds below 1.
      window: the draft's max_position_embeddings, to mark in tables.
      trace: fill `TreeReplay.trace` (free, refreshed).
      chunk: rows a call, a multiple of 32. capacity: rows of short sequences side by side.

    Raises:
      ConfigError: the draft needs `shared`, topk exceeds its vocabulary, a mode that cannot be.
      RecordError: the record does not fit itself or the draft, or has states that are not finite.
    """
    asked = [trees] if isinstance(trees, TreeConfig) else list(trees)
    attention = check_draft_attention(draft, draft_attention)
    _check(record, draft, asked, mode, shared, refresh, temperatures, rule, chunk)
    slots = check_for_draft(record, draft.config)
    names = [record.boundaries[i] for i in slots]
    runner = Runner(draft, shared, slots, names, attention, chunk)
    call = Walker(record, runner, asked, mode, refresh, tuple(temperatures), rule or AcceptRule())
    capacity = -(-capacity // chunk) * chunk
    call.run(capacity)
    result = call.result(window)
    if not trace:
        return result
    traced = [
        dataclasses.replace(
            t, trace=replay_trace(record, runner, result, t.tree, capacity=capacity)
        )
        for t in result.trees
    ]
    return dataclasses.replace(result, trees=traced)


def _check(
    record: Record,
    draft: Eagle3Draft,
    trees: list[TreeConfig],
    mode: str,
    shared: Shared | None,
    refresh: bool,
    temperatures: Sequence[float],
    rule: AcceptRule | None,
    chunk: int,
):
    if not trees or not all(isinstance(t, TreeConfig) for t in trees):
        raise ConfigError(f"trees is {trees!r}, expected one TreeConfig or several")
    if mode not in MODES:
        raise ConfigError(f"mode is {mode!r}, expected one of {', '.join(MODES)}")
    if chunk < 32 or chunk % 32:
        raise ConfigError(f"chunk is {chunk}, expected a multiple of 32")
    largest = max(t.topk for t in trees)
    if largest > draft.config.draft_vocab_size:
        raise ConfigError(
            f"topk={largest} exceeds the draft vocabulary of {draft.config.draft_vocab_size}"
        )
    needs = [name for name in ("embed", "head") if getattr(draft.config, name) == "target"]
    if needs and shared is None:
        raise ConfigError(
            f"this draft uses the target's {' and '.join(needs)}: pass shared=, or --target"
        )
    if shared is not None and shared.embedding.shape[0] < draft.config.vocab_size:
        raise ConfigError(
            f"the target's embedding has {shared.embedding.shape[0]} rows, the draft is for a "
            f"vocabulary of {draft.config.vocab_size}"
        )
    if not refresh and (mode != "free" or any(t.topk > 1 for t in trees)):
        raise ConfigError("refresh=False is for chains in free mode: what a tree keeps is not one")
    if rule is not None and (rule.sampled_drafts or rule.name == "greedy"):
        raise ConfigError("rule: a replay's drafts are certain, expected target_only or rejection")
    if any(not t > 0 for t in temperatures):
        raise ConfigError(f"temperatures are {tuple(temperatures)}, expected numbers above 0")
    check_fields(record)
    for number in range(len(record.sequences)):
        sequence = record.sequences[number]
        name = f" ({sequence.name})" if sequence.name else ""
        check_sequence(sequence, record, f"sequence {number}{name}")
        if mode == "pinned" and sequence.rounds is None:
            raise ConfigError(
                f"sequence {number}{name} has no rounds of an engine to pin to: use free mode"
            )
        if temperatures and sequence.top_logprobs is None:
            raise ConfigError(
                f"sequence {number}{name} has no logprobs to use temperatures on: record them with "
                "--top-logprobs"
            )
