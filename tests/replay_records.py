"""Records of a target this machine can run, and of SGLang's own recorded states."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from sglang_goldens import Request

from eagle3_jax.layers import Rows
from eagle3_jax.record import EngineRound, Record, RecordSequence


def of_target(
    target,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    boundaries: Sequence,
    rounds: Sequence[tuple[EngineRound, ...]] | None = None,
) -> Record:
    """Prompt and output of every request, with the states of one pass over both."""
    sequences = []
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        ids = [*prompt, *output]
        padded = -(-len(ids) // 64) * 64
        tokens = np.zeros((1, padded), np.int32)
        tokens[0, : len(ids)] = ids
        cache = target.new_cache(1, padded)
        _, aux, _ = target.states(
            jnp.asarray(tokens), Rows.prefill(1, padded), cache, tuple(boundaries)
        )
        sequences.append(
            RecordSequence(
                tokens=np.asarray(ids, np.int32),
                aux=np.asarray(aux)[0, : len(ids)],
                prompt_length=len(prompt),
                rounds=None if rounds is None else rounds[i],
            )
        )
    config = target.config
    return Record(tuple(boundaries), "greedy", sequences, config.vocab_size, config.num_layers)


def of_sglang(requests: Sequence[Request]) -> Record:
    """SGLang's own states: of its prompt pass, and of the accepted nodes of every round."""
    sequences = []
    for r in requests:
        first = r.arrays["prefill/target_hidden"]
        width = first.shape[1] // 3
        states = [first.reshape(-1, 3, width)]
        tokens = [*r.prompt, int(r.at("root", 0))]
        for i in range(r.num_rounds):
            path = r.at("accept_index", i)[: r.at("accept_len", i)]
            states.append(r.tensor("target_hidden", i)[path].reshape(-1, 3, width))
            tokens += r.at("predict", i)[path].tolist()
        aux = np.concatenate(states)
        assert len(aux) == len(tokens) - 1
        sequences.append(
            RecordSequence(np.asarray(tokens, np.int32), aux, len(r.prompt), rounds=rounds_of(r))
        )
    boundaries = tuple(requests[0].arrays["prefill/boundaries"].tolist())
    return Record(boundaries, "greedy", sequences, 128, 8)


def rounds_of(request: Request) -> tuple[EngineRound, ...]:
    """SGLang's rounds of a request."""
    pairs = zip(
        request.arrays["seq_len"].tolist(), request.arrays["accept_len"].tolist(), strict=True
    )
    return tuple(EngineRound(start, length - 1) for start, length in pairs)
