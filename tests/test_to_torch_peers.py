"""Our exports as SpecForge's and speculators' own classes ran them (`make_peer_logits.py`).

Non-unit norms, H != D / N, E != D, a map in no order, four steps of the training-time unroll.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import peer_drafts
import pytest
from test_draft import unroll, valid_rows

from eagle3_jax.draft import Eagle3Draft, Shared

RECORDED = Path(__file__).parent / "data/exports"


ALWAYS = (
    "specforge_wide",
    "specforge_yarn",
    "speculators_layers",
    "speculators_qk_norm",
    "speculators_switches",
)
CASES = [
    name if name in ALWAYS else pytest.param(name, marks=pytest.mark.exhaustive)
    for name in peer_drafts.CASES
]


@pytest.mark.parametrize("name", CASES)
def test_the_export_is_what_the_peer_loaded(name, tmp_path):
    recorded = json.loads((RECORDED / "exports.json").read_text())
    assert peer_drafts.digest(peer_drafts.export(name, tmp_path)) == recorded[name]


@pytest.mark.parametrize("name", CASES)
def test_the_peers_logits_are_ours(name):
    config, tensors = peer_drafts.make(name)
    ids, aux, table = peer_drafts.inputs(config)
    draft = Eagle3Draft.from_tensors(config, tensors, "float32")
    shared = None if config.embed == "draft" else Shared(jnp.asarray(table), jnp.asarray(table))
    with jax.default_matmul_precision("highest"):
        ours = unroll(draft, ids, aux, shared)
    theirs = np.load(RECORDED / f"{name}.npy")
    for k, (a, b) in enumerate(zip(valid_rows(ours), valid_rows(theirs), strict=True)):
        assert np.abs(b).max() > 0.5
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-4, err_msg=f"step {k}")
