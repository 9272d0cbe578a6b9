"""Random wirings, one fault or two at once, and fifty right ones: found, and no false cure."""

import dataclasses

import numpy as np
import pytest
from scripted_draft import Truth
from scripted_records import Request, make
from selection import by_default

from eagle3_jax.doctor import diagnose

pytestmark = pytest.mark.full_compile

SEED = 7919
FAULTS = {
    "boundaries": lambda rng: tuple(map(int, rng.permutation(9)[:3])),
    "norm_before_residual": lambda rng: True,
    "double_norm": lambda rng: True,
    "norm_before_fc": lambda rng: True,
    "feedback": lambda rng: "post_norm",
    "theta": lambda rng: float(rng.choice([1e5, 5e5, 1e6])),
    "rope_pairs": lambda rng: "interleaved",
    "window": lambda rng: int(rng.choice([16, 32, 64])),
    "position_clamp": lambda rng: int(rng.choice([31, 63])),
    "residual": lambda rng: "embedding",
    "table": lambda rng: str(rng.choice(["ids", "none"])),
    "shift": lambda rng: 0,
    "embed": lambda rng: "draft",
}


def draw(index: int) -> tuple[Truth, Truth]:
    """The wiring behind a record, and the one its config claims."""
    rng = np.random.default_rng([SEED, index])
    claim = Truth(boundaries=tuple(sorted(map(int, rng.permutation(9)[:3]))))
    names = rng.permutation(list(FAULTS))[: 1 + index % 2]
    truth = dataclasses.replace(claim, **{str(n): FAULTS[n](rng) for n in names})
    return (truth, claim) if truth != claim else draw(index + 1000)


def extra(s) -> dict[str, np.ndarray]:
    return {
        "input_norm.weight": s.weights["input_norm.weight"],
        "embed.weight": s.weights["embed_tokens.weight"],
    }


@pytest.mark.slow
@pytest.mark.parametrize("index", by_default(range(24), lambda i, _: i < 2))
def test_random_wirings_are_found(index):
    """Even ones have one fault, odd ones two; the accept length comes back to the script's."""
    truth, claim = draw(index)
    s = make(Request(tokens=240), truth=truth, seed=100 + index)
    d = diagnose(s.record, s.draft(claim), s.shared(), extra=extra(s))
    assert d.verdict == "wiring_differs", d.configured
    assert d.best.accept_length == pytest.approx(s.accept_length, abs=0.06), d.best.words
    assert d.agreements[0].name == "refresh"
    assert d.agreements[0].equal
    if "boundaries" in d.best.wiring.changes(d.configured.wiring):
        assert d.best.wiring.boundaries == truth.boundaries


@pytest.mark.slow
@pytest.mark.parametrize(
    "indices", [range(2), pytest.param(range(2, 50), marks=pytest.mark.exhaustive)]
)
def test_no_false_cure_on_fifty_right_wirings(indices):
    """With the engine's rounds and without, weakly accepting drafts among them."""
    cured = []
    for index in indices:
        rng = np.random.default_rng([SEED, 7, index])
        truth, _ = draw(2000 + index)
        truth = dataclasses.replace(truth, table="offset", shift=1)
        truth = dataclasses.replace(truth, window=None, position_clamp=None)
        truth = dataclasses.replace(truth, residual="hidden", rope_pairs="half")
        script = rng.choice([0, 0, 1, 2, 3], 8).tolist()
        s = make(Request(script=script, tokens=200), truth=truth, seed=500 + index)
        record = s.record
        if index % 3 == 0:
            bare = [dataclasses.replace(q, rounds=None) for q in record.sequences]
            record = dataclasses.replace(record, sequences=bare)
        d = diagnose(record, s.draft(), s.shared(), extra=extra(s))
        if d.best.wiring != d.configured.wiring:
            cured.append((index, d.best.words))
    assert not cured
