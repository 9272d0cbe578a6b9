"""A wiring as the scorer's arguments."""

from collections.abc import Sequence

import numpy as np

from eagle3_jax.config import DraftConfig, RopeConfig
from eagle3_jax.rope import axes, inverse_frequencies
from eagle3_jax.wirings.wiring import Wiring

FAR = 1 << 30


def knobs_of(
    config: DraftConfig, wiring: Wiring, slots: Sequence[int], order: int
) -> dict[str, np.ndarray]:
    """`block.Knobs` by name.

    Args:
      slots: row of the projections for each boundary. order: number of the record's row order.
    """
    turning, rope = config.attention().rotary_dim, wiring.rope
    pairs = np.arange(turning)
    if wiring.pairs == "interleaved":
        pairs = np.concatenate((pairs[0::2], pairs[1::2]))
    several = rope.mrope_section != ()
    whole = {
        "slots": slots,
        "embed": int(wiring.embed == "draft"),
        "pairs": pairs,
        "lanes": 1 + axes(rope, turning) if several else np.zeros(turning // 2),
        "window": [FAR if w is None else w for w in _windows(config, wiring)],
        "clamp": FAR if wiring.clamp is None else wiring.clamp,
        "token_shift": wiring.token_shift,
        "row_shift": wiring.row_shift,
        "first_seen": int(wiring.first == "dropped"),
        "chunk": wiring.chunk or 0,
        "order": order,
        "depth": 1 if wiring.layers == "first alone" else config.num_layers,
    }
    truth = {
        "concat": wiring.fuse_norm == "concat",
        "before_residual": wiring.norm_before_residual,
        "double_norm": wiring.double_norm,
        "final_norm": wiring.final_norm,
        "post_norm": wiring.feedback == "post_norm",
        "embedding_residual": wiring.residual == "embedding",
        "next_hidden_norm": wiring.next_norm == "hidden_norm",
        "fed_first": wiring.fed_from == "first",
        "zero_first": wiring.first == "zeroed",
        "no_prompt": wiring.prefix == "missing",
    }
    numbers = {
        "frequency": inverse_frequencies(rope, turning),
        "amplitude": rope.amplitude,
        "growth": _growth(rope),
        "scale": config.head_dim**-0.5 * (rope.latent_sharpness if config.latent else 1.0),
    }
    return (
        {name: np.asarray(value, np.int32) for name, value in whole.items()}
        | {name: np.asarray(value, np.bool_) for name, value in truth.items()}
        | {name: np.asarray(value, np.float32) for name, value in numbers.items()}
    )


def _windows(config: DraftConfig, wiring: Wiring) -> Sequence[int | None]:
    if wiring.window == "as configured":
        return config.windows
    return [wiring.window] * config.num_layers


def _growth(rope: RopeConfig) -> tuple[float, float]:
    """The factor of a dynamic rope, and the length past which its base grows."""
    if rope.kind != "dynamic":
        return 1.0, 1e30
    return rope.factor, rope.original_max_position_embeddings
