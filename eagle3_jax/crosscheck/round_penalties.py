"""Penalties that do not count every token of the output: what SGLang does while it verifies.

SGLang 0.5.23 adds one token a round to its penalties, the last of the output so far
(`schedule_batch.cumulate_penalty_output_tokens`, called by `eagle_utils.eagle_prepare_for_decode`),
and applies the sum to all nodes of the round ("a relaxed version", `eagle_utils.eagle_sample`). So
accepted drafts are never penalised.
"""

from collections.abc import Sequence

import numpy as np

from eagle3_jax.crosscheck.emitted import Emitted
from eagle3_jax.crosscheck.processed import Counted, Texts
from eagle3_jax.crosscheck.types import EngineRequest

PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
CODE = "SAMPLING_ROUND_PENALTIES"
LAST, LATE, START = WAYS = ("last", "late", "start")
WORDS = {
    LAST: "penalties count the last token of each round alone, never an accepted draft, as SGLang "
    "does while verifying (schedule_batch.cumulate_penalty_output_tokens)",
    LATE: "penalties count the last token of each round alone, and one round late, as SGLang does "
    "while verifying with its overlap schedule (schedule_batch.cumulate_penalty_output_tokens)",
    START: "penalties count the tokens before each round, not those of the node's own path",
}


def counted_in(
    texts: Texts, requests: Sequence[EngineRequest], emitted: Sequence[Emitted], way: str
) -> Counted | None:
    """What the penalties count in one of `WAYS`; None where a token's round is not known.

    The first token of an output is the prefill's: a request of one token has no round.
    """
    deepest = max((k for one in emitted for _, _, k in one.rounds), default=0)
    kept = np.ones(texts.rows, bool)
    left_out = np.full((texts.rows, max(deepest, 1)), -1)
    also = np.full((texts.rows, 1), -1)
    begin = np.flatnonzero(texts.index == 0)
    for first, number in zip(begin.tolist(), texts.owner[begin].tolist(), strict=True):
        rounds, output = emitted[number].rounds, requests[number].output
        n = len(output)
        if n > 1 and not rounds:
            return None
        roots = {i: at for _, at, k in rounds for i in range(at + 1, min(at + k + 2, n))}
        if way != START:
            kept[first : first + n] = False
            kept[[first + at for _, at, _ in rounds if at < n]] = True
        for i, root in roots.items():
            if way == START:
                left_out[first + i, : i - root - 1] = output[root + 1 : i]
            elif way == LATE:
                left_out[first + i, 0] = output[root]
                also[first + i, 0] = requests[number].prompt[-1]
    return Counted(kept, left_out, also)
