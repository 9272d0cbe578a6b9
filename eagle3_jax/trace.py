"""What happened, round by round, in one form for every producer; stored as JSON lines."""

import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from eagle3_jax.files.whole import whole_file

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Round:
    """One draft and one verification of one sequence.

    Nodes are numbered as verified: node 0 is the root, the pending bonus token. Plain decoding is
    a round whose tree is its root.

    Attributes:
      sequence: index of the prompt in the batch. index: number of the round, from 0.
      length: slots that hold target KV when the round starts (SGLang's `seq_len`).
      tokens: target ids of the nodes, root first.
      parents: parent node of each node, -1 for the root.
      scores: product of draft probabilities along the path, 1 for the root (SGLang's
        `select_top_k_tokens`; a chain computes none there and has 1 everywhere).
      draft_probs: the draft's own probability of each node's token, 1 for the root.
      positions: RoPE position of each node, `length + depth`.
      predicted: the target's own next token after each node; sampled, the one drawn after accepted
        nodes, the most likely one elsewhere.
      margins: the target's best logit minus its second best after each node; small margins are
        where rounding may choose. Empty when not recorded, and when sampled.
      accepted: nodes of the accepted path, root first.
      bonus: the target's token after the last accepted node.
      emitted: tokens this round added to the output, cut at a stop token or max_new_tokens.
      target_probs: sampled, the target's probability of each node's token after its parent, all
        processors applied, 1 for the root; else empty.
      expected_drafts: sampled, how many of the drafted tokens the rule accepts on average over its
        coins (`expected.expected_drafts`); else None.
      tensors: on request, arrays by name (states, logits); never stored.
    """

    sequence: int
    index: int
    length: int
    tokens: list[int]
    parents: list[int]
    scores: list[float]
    draft_probs: list[float]
    positions: list[int]
    predicted: list[int]
    margins: list[float]
    accepted: list[int]
    bonus: int
    emitted: list[int]
    target_probs: list[float] = dataclasses.field(default_factory=list)
    expected_drafts: float | None = None
    tensors: dict[str, Any] | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def num_correct_drafts(self) -> int:
        """Accepted draft tokens, before any cut."""
        return len(self.accepted) - 1

    @property
    def accept_length(self) -> int:
        """Tokens the round commits, bonus included, before any cut."""
        return len(self.accepted)


@dataclasses.dataclass
class Trace:
    """Rounds of a batch of prompts with what is needed to read them again.

    Attributes:
      prompts: token ids of each prompt.
      tokens: new token ids of each prompt, the prefill's first.
      rounds: in the order they ended; `Round.sequence` tells whose.
      tree: `{"num_steps", "topk", "num_draft_tokens"}`, None for plain decoding.
      rule: the acceptance rule, `"greedy"`, `"target_only"` or `"rejection"`.
      sampling: `SamplingConfig.json()` and under `"rule"` `AcceptRule.json()`, which says whether
        the text follows the target's distribution (`lossless`); None for plain greedy decoding.
      draft_attention: `"ancestors"`, `"beam_slots"`, or None for plain decoding.
      dtype: of target and draft. engine: the profile the draft was run as, if any.
      versions: of the packages that computed it.
    """

    prompts: list[list[int]]
    tokens: list[list[int]]
    rounds: list[Round]
    tree: dict[str, int] | None
    rule: str
    draft_attention: str | None
    dtype: dict[str, str]
    engine: str | None = None
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    stats: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    sampling: dict[str, Any] | None = None

    def of(self, sequence: int) -> list[Round]:
        """The rounds of one prompt, in order."""
        return [r for r in self.rounds if r.sequence == sequence]

    def save(self, path: str | os.PathLike):
        """Writes JSON lines: a header, one line a round, one line a sequence; all or nothing."""
        header = {
            "type": "trace",
            "format": FORMAT,
            "tree": self.tree,
            "rule": self.rule,
            "sampling": self.sampling,
            "draft_attention": self.draft_attention,
            "dtype": self.dtype,
            "engine": self.engine,
            "versions": self.versions,
            "num_sequences": len(self.prompts),
        }
        lines = [header, *map(_round_json, self.rounds)]
        for i, (prompt, tokens) in enumerate(zip(self.prompts, self.tokens, strict=True)):
            stats = self.stats[i] if self.stats else {}
            lines.append(
                {"type": "sequence", "sequence": i, "prompt": prompt, "tokens": tokens}
                | {"stats": stats}
            )
        _write_lines(Path(path), lines)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Trace":
        """Reads what `save` wrote.

        Raises:
          ValueError: not a trace, a line that is not JSON, a newer format, or missing sequences;
            the message names file and line.
        """
        path = Path(path)
        header: dict[str, Any] | None = None
        rounds: list[Round] = []
        sequences: dict[int, dict[str, Any]] = {}
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    item = json.loads(line)
                    kind = item["type"]
                    if header is None:
                        if kind != "trace":
                            raise ValueError(f"first line is {kind!r}, expected 'trace'")
                        if item["format"] != FORMAT:
                            raise ValueError(f"format {item['format']}, expected {FORMAT}")
                        header = item
                    elif kind == "round":
                        del item["type"]
                        rounds.append(Round(**item))
                    elif kind == "sequence":
                        sequences[item["sequence"]] = item
                    else:
                        raise ValueError(f"unknown line type {kind!r}")
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(f"{path}, line {number}: not a trace line: {error}") from None
        if header is None:
            raise ValueError(f"{path}: empty, expected a trace")
        count = header["num_sequences"]
        if len(sequences) != count or sorted(sequences) != list(range(count)):
            raise ValueError(
                f"{path}: ends with sequences {sorted(sequences)}, expected 0..{count - 1}: "
                "the file is cut short"
            )
        ordered = [sequences[i] for i in range(count)]
        return cls(
            prompts=[s["prompt"] for s in ordered],
            tokens=[s["tokens"] for s in ordered],
            rounds=rounds,
            tree=header["tree"],
            rule=header["rule"],
            draft_attention=header["draft_attention"],
            dtype=header["dtype"],
            engine=header["engine"],
            versions=header["versions"],
            stats=[s["stats"] for s in ordered],
            sampling=header.get("sampling"),
        )


def _round_json(item: Round) -> dict[str, Any]:
    fields = {f.name: getattr(item, f.name) for f in dataclasses.fields(Round)}
    del fields["tensors"]
    return {"type": "round", **fields}


def _write_lines(path: Path, lines: Iterable[dict[str, Any]]):
    with whole_file(path, encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


def sglang_stats(
    prompt_tokens: int,
    completion_tokens: int,
    num_correct_drafts: Sequence[int],
    num_draft_tokens: int | None,
) -> dict[str, Any]:
    """One sequence's statistics under SGLang 0.5.23's names and formulas.

    `managers/tokenizer_manager.py`: the spec_* keys are absent when no round ran; the accept length
    is completion tokens per verification, so it counts the prefill's token and the final cut, and
    differs from the mean of `accept_lengths`.

    Args:
      num_correct_drafts: accepted draft tokens of each round, before any cut.
      num_draft_tokens: nodes verified per round, root included; None for plain decoding.
    """
    stats: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
    }
    rounds = len(num_correct_drafts)
    if num_draft_tokens is None or rounds == 0 or num_draft_tokens < 2:
        return stats
    correct = sum(num_correct_drafts)
    proposed = rounds * (num_draft_tokens - 1)
    histogram = [0] * (max(num_correct_drafts) + 1)
    for k in num_correct_drafts:
        histogram[k] += 1
    stats |= {
        "spec_verify_ct": rounds,
        "spec_num_correct_drafts": correct,
        "spec_num_proposed_drafts": proposed,
        "spec_accept_rate": correct / proposed,
        "spec_accept_length": completion_tokens / rounds,
        "spec_correct_drafts_histogram": histogram,
    }
    return stats
