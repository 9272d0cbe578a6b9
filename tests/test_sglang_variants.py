"""Drafts with one switch, tensor or key changed: as SGLang runs them, and as they were trained."""

import jax.numpy as jnp
import numpy as np
import pytest
from selection import by_default
from sglang_compare import compare_with_golden
from sglang_goldens import Request, load

import eagle3_jax as e3
from eagle3_jax.trace import Round, sglang_stats

ENGINE = "sglang-0.5.23"
SAME = (
    "aux_1_3_6",
    "fc_bias",
    "fc_norm",
    "nolmhead_null",
    "norm_before_fc",
    "norm_output",
    "novocabmap",
    "rope_llama3",
    "two_layers",
)
"""SGLang runs these as they were trained."""

IGNORED = {
    "attn_bias": "qkv_proj is built without a bias, o_proj keeps its own",
    "aux_6_1_3": "captured in layer order, whatever the order of the ids",
    "aux_toplevel": "only eagle_config names layers, the default boundaries are captured",
    "norm_before_residual": "not a key SGLang knows",
    "own_embed": "the target's embedding replaces the draft's",
    "rope_dynamic": "one base for all positions, that of the longest sequence",
    "rope_yarn": "attention_factor is not a key it reads",
    "window": "layer_types is not a key it reads",
}
"""SGLang runs these in another way than they were trained."""

ON_REQUEST = (
    "aux_1_3_6",
    "fc_bias",
    "nolmhead_null",
    "rope_dynamic",
    "rope_llama3",
    "rope_yarn",
    "window",
)
"""tests/test_draft.py has the same arithmetic against NumPy."""


def variants(*names: str):
    return pytest.mark.parametrize(
        "name", by_default(names, lambda _, name: name not in ON_REQUEST)
    )


FLAGS = {
    "aux_toplevel": ("--aux-convention", "output"),
    "norm_output": ("--feedback", "post_norm"),
    "two_layers": ("--next-layer-norm", "hidden_norm"),
}


@pytest.fixture(scope="module")
def base() -> Request:
    return load("traces", "chain_s3")["single0"]


@pytest.fixture(scope="module")
def load_variant(sglang_models, variant_folder, tiny_target, converted):
    def read(name: str, as_engine: str | None) -> e3.Eagle3Draft:
        source, target = variant_folder(f"draft_{name}"), sglang_models / "target"
        folder = converted(source, "--target", str(target), *FLAGS.get(name, ()))
        return e3.load_draft(folder, target=tiny_target, as_engine=as_engine)

    return read


def run(target, draft, golden: Request) -> list[Round]:
    rounds = e3.rounds(
        target,
        draft,
        [golden.prompt],
        max_new_tokens=golden.max_new_tokens,
        tree=golden.tree,
        stop_token_ids=(),
        tensors=True,
    )
    found = list(rounds)
    for r in found:  # SGLang records the state it hands on, the loop the layer's result
        assert r.tensors is not None
        handed_on = draft.feedback(jnp.asarray(r.tensors["extend_hidden"][None]))[0]
        r.tensors["extend_hidden"] = np.asarray(handed_on)
    return found


@variants(*SAME, *IGNORED)
def test_as_sglang_runs_it(name, load_variant, tiny_target):
    golden = load("variants", name)["single0"]
    draft = load_variant(name, ENGINE)
    assert draft.engine == ENGINE
    assert draft.draft_attention == "beam_slots"
    rounds = run(tiny_target, draft, golden)
    tokens = [rounds[0].tokens[0], *(token for r in rounds for token in r.emitted)]
    stats = sglang_stats(
        len(golden.prompt),
        len(tokens),
        [r.num_correct_drafts for r in rounds],
        golden.tree.num_draft_tokens,
    )
    stats["finish_reason"] = {"type": "length", "length": golden.max_new_tokens}
    result = compare_with_golden(golden, rounds, tokens=tokens, stats=stats)
    assert result.differences == []
    assert [r.accept_length for r in rounds] == golden.arrays["accept_len"].tolist()


@pytest.mark.parametrize(
    "name", by_default(IGNORED, lambda _, name: name in ("attn_bias", "aux_6_1_3"))
)
def test_a_switch_sglang_ignores_is_live(name, load_variant, tiny_target):
    """Run as trained, the draft says something else than SGLang."""
    golden = load("variants", name)["single0"]
    draft = load_variant(name, None)
    assert draft.engine is None
    rounds = run(tiny_target, draft, golden)
    assert rounds[0].tensors is not None
    ours = rounds[0].tensors["prefill.extend_logits"]
    assert np.abs(ours - golden.arrays["prefill/draft_logits"]).max() > 0.05
    assert compare_with_golden(golden, rounds).differences


@pytest.mark.parametrize("name", SAME)
def test_the_engine_profile_changes_nothing_else(name, load_variant):
    assert load_variant(name, ENGINE).config == load_variant(name, None).config


@pytest.mark.parametrize("name", [*SAME, *IGNORED])
def test_the_recording_shows_the_change(name, base):
    """What SGLang heeds moves the draft's first logits, what it ignores leaves them alone."""
    before, after = base.arrays, load("variants", name)["single0"].arrays
    heeded = name in SAME or name in ("attn_bias", "aux_6_1_3", "rope_dynamic", "rope_yarn")
    what = "prefill/draft_hidden" if name == "norm_output" else "prefill/draft_logits"
    x, y = before[what], after[what]
    if x.shape == y.shape:
        assert (np.abs(x - y).max() > 0.05) == heeded
    else:
        assert heeded
