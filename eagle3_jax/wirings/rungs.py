"""Parts of a record to score on, from few chains to many, and what scoring gives."""

import dataclasses

import numpy as np

from eagle3_jax.config import DraftConfig
from eagle3_jax.wirings.pack import Pack
from eagle3_jax.wirings.scorer import BLOCK

FIRST, FEW, SOME, MANY = 24, 64, 192, 1024
CONTEXT = 48
SMALL = 256
"""Up to this hidden size the second rung costs more to compile than it saves."""
TRANSIENT = 200 << 20  # bytes of activations a batch may take


@dataclasses.dataclass(frozen=True)
class Rung:
    """A part of the record to score on: slots low .. high - 1, chains by their index in the pack.

    Attributes:
      steps: of each chain. slots, chains_padded: shapes the program is compiled for.
      head_rows: rows of the head to compare among, None for all.
    """

    low: int
    high: int
    chains: np.ndarray
    steps: int
    slots: int
    chains_padded: int
    batch: int
    head_rows: int | None = None


@dataclasses.dataclass(frozen=True)
class Scores:
    """Of one wiring on one rung.

    Attributes:
      cost: [chains] log loss per step, see `costs_of`.
      nll: [steps, chains] of the record's tokens, NaN outside the map.
      proposed: [steps, chains] the draft's best tokens as target ids.
      accepted: [chains] drafts that are right before the first wrong one.
    """

    cost: np.ndarray
    nll: np.ndarray
    proposed: np.ndarray
    accepted: np.ndarray


def costs_of(nll: np.ndarray, has: np.ndarray, counted: np.ndarray, vocab_size: int) -> np.ndarray:
    """[maps, chains] log loss of the draft with 5% of its mass spread evenly over V, per step.

    Bounded, so that one confident error weighs no more than ignorance; a token outside the map has
    only its share of the 5%. At the sharpness that suits the wiring best.

    Args:
      nll: [sharpness, maps, steps, chains]. has: [maps, steps, chains]. counted: [steps, chains].
    """
    p = np.where(has[None], 0.95 * np.exp(-nll), 0.0)
    loss = np.where(counted[None, None], -np.log(p + 0.05 / vocab_size), 0.0).mean(axis=2)
    best = loss.mean(axis=2).argmin(axis=0)
    return loss[best, np.arange(len(best))]


def rungs(p: Pack, config: DraftConfig) -> tuple[Rung, Rung, Rung, Rung]:
    """Two with few chains of one step for all boundaries; one with some; one with many."""
    T, total = len(p.tokens), len(p.chains)
    high, upto = T, total
    for number, piece in enumerate(p.pieces):
        end = piece.offset + piece.length
        inside = sum(c.slot < end for c in p.chains)
        if inside >= SOME and (number or len(p.pieces) == 1):  # two whole sequences at least
            high, upto = end, inside
            break
    first = _short(p, config, FIRST)
    few = first if config.hidden_size <= SMALL else _short(p, config, FEW)
    some = _rung(config, 0, high, _spread(upto, SOME), p.steps, 2048)
    many = _rung(config, 0, T, _spread(total, MANY), p.steps, None)
    return first, few, some, some if _alike(some, many, config) else many


def _alike(some: Rung, many: Rung, config: DraftConfig) -> bool:
    whole = some.head_rows is None or some.head_rows >= config.draft_vocab_size
    return whole and some.high == many.high and np.array_equal(some.chains, many.chains)


def _short(p: Pack, config: DraftConfig, count: int) -> Rung:
    """`count` chains in a row with a little context."""
    chains = np.arange(min(count, len(p.chains)))
    slots = [p.chains[i].slot for i in chains]
    low = max(slots[0] - CONTEXT, 0)
    chains = np.array([i for i in chains if slots[i] < low + 8 * count])
    high = min(slots[chains[-1]] + p.steps + 2, len(p.tokens))
    return _rung(config, low, high, chains, 1, 512)


def _spread(total: int, count: int) -> np.ndarray:
    """Indices spread evenly, all when there are few."""
    return np.unique(np.linspace(0, total - 1, min(total, count)).round().astype(int))


def _rung(
    config: DraftConfig,
    low: int,
    high: int,
    chains: np.ndarray,
    steps: int,
    head_rows: int | None,
) -> Rung:
    slots = _bucket(high - low + 1)
    padded = -(-len(chains) // 32) * 32
    rows = min(head_rows or config.draft_vocab_size, config.draft_vocab_size)
    wide = config.num_heads * slots + rows + 4 * config.intermediate_size
    if config.latent is not None:
        wide += 2 * config.num_heads * (config.latent.kv_lora_rank + config.head_dim)
    at_once = padded if config.num_layers == 1 else max(padded, BLOCK)
    batch = max(1, min(32, TRANSIENT // (4 * at_once * wide)))
    return Rung(low, high, chains, steps, slots, padded, 1 << (batch.bit_length() - 1), head_rows)


def _bucket(n: int) -> int:
    step = 128 if n <= 1024 else 512
    return -(-n // step) * step
