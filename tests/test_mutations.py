"""Every mistake on this list must show in the goldens."""

import dataclasses
import functools
from collections.abc import Callable

import jax.numpy as jnp
import mutations as m
import numpy as np
import pytest
from selection import by_default
from sglang_compare import compare_with_golden
from sglang_goldens import load

import eagle3_jax as e3
from eagle3_jax.config import DraftConfig, RopeConfig

LLAMA3 = RopeConfig(10000.0, "llama3", 8.0, 1.0, 4.0, 64)
ATTENTION = "layers.0.attn."


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One mistake.

    Attributes:
      reason: who makes it, or what it would break.
      change: of the draft; `patch`: of one function. One of the two.
      case: the smallest recording that shows it; `variant` names another draft than the base.
      field: the `DraftConfig` field it flips.
    """

    name: str
    reason: str
    change: Callable[[e3.Eagle3Draft], e3.Eagle3Draft] | None = None
    patch: Callable[[pytest.MonkeyPatch], None] | None = None
    case: str = "chain_s1"
    request: str = "single0"
    variant: str | None = None
    draft_attention: str = "beam_slots"

    @property
    def field(self) -> str:
        return self.name.split(" ")[0]


def boundaries(*values) -> Callable[[e3.Eagle3Draft], e3.Eagle3Draft]:
    return m.flip(aux_boundaries=values)


MUTATIONS = [
    # switches of DraftConfig
    Mutation("norm_before_residual", "speculators' default", m.flip(norm_before_residual=True)),
    Mutation("norm_before_fc", "a norm nobody trained", m.flip(norm_before_fc=True)),
    Mutation("fc_norm", "EAGLE-3.1 norms on an older draft", m.flip(fc_norm=True)),
    Mutation("feedback", "post-norm state fed back", m.flip(feedback="post_norm"), case="chain_s3"),
    Mutation("final_norm", "head without its norm", m.flip(final_norm=False)),
    Mutation("double_norm", "ModelOpt's two norms", m.flip(double_norm=True)),
    Mutation("fc_bias on", "a bias from nowhere", m.flip("fc", fc_bias=True)),
    Mutation("fc_bias off", "fc.bias dropped", m.flip(fc_bias=False), variant="fc_bias"),
    Mutation(
        "qkv_bias",
        "SGLang drops these biases",
        m.flip(*(f"{ATTENTION}{n}" for n in "qkv"), qkv_bias=True),
    ),
    Mutation("output_bias", "o_proj.bias dropped", m.flip(output_bias=False), variant="attn_bias"),
    Mutation(
        "mlp_bias",
        "a bias from nowhere",
        m.flip(*(f"layers.0.mlp.{n}" for n in ("gate", "up", "down")), mlp_bias=True),
    ),
    Mutation("embed", "the draft's own embedding where SGLang has the target's", m.own_embedding),
    Mutation("head", "the target's head", m.flip(head="target"), variant="novocabmap"),
    Mutation("rope theta", "base 500000 for 10000", m.flip(rope=RopeConfig(5e5))),
    Mutation("rope kind", "llama3 scaling on a plain draft", m.flip(rope=LLAMA3)),
    Mutation(
        "rms_norm_eps", "1e-3 for 1e-5 (1e-6 moves nothing by 1e-4)", m.flip(rms_norm_eps=1e-3)
    ),
    Mutation(
        "fuse",
        "one state as wide as the draft handed on without fc",
        m.flip(num_aux=1, aux_boundaries=(5,), fuse="none"),
    ),
    Mutation("hidden_norm", "a norm forgotten", m.without_hidden_norm),
    Mutation("qk_norm", "Qwen3's norms on a Llama layer", m.with_qk_norm),
    Mutation("windows", "a window SGLang does not know", m.flip(windows=(4,))),
    Mutation(
        "next_layers",
        "vLLM's norm of later layers for SGLang's",
        m.flip(next_layers="input_layernorm"),
        variant="two_layers",
    ),
    # which states
    Mutation("aux_boundaries low - 1", "off by one", boundaries(1, 4, 5)),
    Mutation("aux_boundaries low + 1", "off by one", boundaries(3, 4, 5)),
    Mutation("aux_boundaries middle - 1", "off by one", boundaries(2, 3, 5)),
    Mutation("aux_boundaries high + 1", "off by one", boundaries(2, 4, 6)),
    Mutation("aux_boundaries all + 1", "vLLM's ids read as SGLang's", boundaries(3, 5, 6)),
    Mutation("aux_boundaries all - 1", "SGLang's ids read as vLLM's", boundaries(1, 3, 4)),
    Mutation("aux_boundaries swapped", "order of concatenation", boundaries(4, 2, 5)),
    Mutation("aux_boundaries final_norm", "the normed last state", boundaries(2, 4, "final_norm")),
    # weights in the wrong place
    Mutation(
        "norms swapped",
        "input_layernorm is the embedding's",
        m.exchanged("layers.0.norm_embed.weight", "layers.0.norm_hidden.weight"),
    ),
    Mutation(
        "gate and up swapped",
        "a fused tensor split the wrong way",
        m.exchanged("layers.0.mlp.gate.weight", "layers.0.mlp.up.weight"),
    ),
    Mutation(
        "k and v swapped",
        "a fused tensor split the wrong way",
        m.exchanged(f"{ATTENTION}k.weight", f"{ATTENTION}v.weight"),
    ),
    Mutation(
        "state before embedding",
        "order of the two inputs",
        m.altered(*(f"{ATTENTION}{n}.weight" for n in "qkv"), by=m.swap_input_halves),
    ),
    Mutation(
        "rotary rows interleaved",
        "llama.cpp's row order",
        m.altered(*(f"{ATTENTION}{n}.weight" for n in "qk"), by=m.interleave_rotary_rows),
    ),
    Mutation(
        "norm_post forgotten",
        "a norm weight left at one",
        m.altered("layers.0.norm_post.weight", by=np.ones_like),
    ),
    # vocabulary
    Mutation(
        "d2t plus one",
        "off by one",
        m.altered("draft_to_target", by=lambda ids: (ids + 1) % 128),
    ),
    Mutation(
        "d2t shifted",
        "row i of the head with the id of row i - 1",
        m.altered("draft_to_target", by=lambda ids: np.roll(ids, 1)),
    ),
    Mutation("d2t as ids", "offsets taken for target ids", m.map_as_offsets),
    # the loop
    Mutation("token shift", "state t with token t", patch=m.step_with(m.unshifted)),
    Mutation(
        "drafted positions plus one",
        "the pair's position is that of its state",
        patch=m.step_with(m.drafted_positions_plus_one),
        case="chain_s3",
    ),
    Mutation(
        "a mask bit missing",
        "the last node does not see its parent's root",
        patch=m.selected_with(lambda bits: bits.at[:, -1].set(bits[:, -1] & ~jnp.uint32(1))),
    ),
    Mutation(
        "a mask bit too many",
        "the last node sees the one before it",
        patch=m.selected_with(lambda bits: bits.at[:, -1].set(bits[:, -1] | jnp.uint32(4))),
        case="tree_s2_k2_d4",
    ),
    Mutation(
        "ancestors for beam slots",
        "SafeAILab's draft tree where SGLang reads slots",
        lambda draft: draft,
        case="tree_s3_k4_d8",
        draft_attention="ancestors",
    ),
    Mutation(
        "another beam's slot",
        "slot level * topk + beam",
        patch=m.other_beams_slot,
        case="tree_s2_k2_d4",
    ),
    Mutation(
        "softmax over the best",
        "probabilities are over the whole draft vocabulary",
        patch=m.softmax_over_the_best,
        case="tree_s2_k2_d4",
    ),
    Mutation(
        "positions by node",
        "a node's position is length + depth",
        patch=m.positions_by_node,
        case="tree_s2_k2_d4",
    ),
    Mutation(
        "one accepted too few",
        "path off by one",
        patch=m.greedy_with(lambda path, n, steps: (path, jnp.maximum(n - 1, 0))),
    ),
    Mutation(
        "one accepted too many",
        "path off by one",
        patch=m.greedy_with(lambda path, n, steps: (path, jnp.minimum(n + 1, steps))),
    ),
    Mutation(
        "path without the root",
        "accepted nodes start at the root",
        patch=m.greedy_with(lambda path, n, steps: (jnp.roll(path, -1, axis=1), n)),
    ),
    Mutation(
        "KV not compacted",
        "the accepted path must move to the front",
        patch=m.no_compaction,
        case="tree_s2_k2_d4",
    ),
    Mutation(
        "extend not compacted",
        "states of the first nodes instead of the accepted ones",
        patch=m.extend_with(lambda path, n: (jnp.arange(3)[None] + 0 * path, n)),
        case="tree_s2_k2_d4",
    ),
    Mutation(
        "seed from the last row",
        "the last accepted row seeds the next round",
        patch=m.extend_with(lambda path, n: (path, 0 * n + path.shape[1] - 1)),
    ),
    Mutation(
        "draft KV not rebuilt",
        "accepted tokens' KV comes from target states",
        patch=m.extend_writes_nothing,
        case="chain_s3",
    ),
]


@functools.cache
def golden(folder: str, case: str, tag: str):
    return load(folder, case)[tag]


def differences(target, draft, recorded, draft_attention: str) -> list[str]:
    rounds = e3.rounds(
        target,
        draft,
        [recorded.prompt],
        max_new_tokens=recorded.max_new_tokens,
        tree=recorded.tree,
        draft_attention=draft_attention,
        stop_token_ids=(),
        tensors=True,
    )
    return compare_with_golden(recorded, list(rounds)).differences


def recording(mutation: Mutation):
    if mutation.variant is not None:
        return golden("variants", mutation.variant, "single0")
    return golden("traces", mutation.case, mutation.request)


@pytest.fixture(scope="module")
def read_draft(sglang_models, variant_folder, tiny_target, converted):
    """The draft of a recording, as SGLang runs it."""

    @functools.cache
    def read(variant: str | None) -> e3.Eagle3Draft:
        source = variant_folder("draft" if variant is None else f"draft_{variant}")
        flags = ("--next-layer-norm", "hidden_norm") if variant == "two_layers" else ()
        folder = converted(source, "--target", str(sglang_models / "target"), *flags)
        return e3.load_draft(folder, target=tiny_target, as_engine="sglang-0.5.23")

    return read


@pytest.mark.parametrize(
    ("variant", "case"),
    [
        pytest.param(*x, marks=[] if x == (None, "chain_s1") else [pytest.mark.exhaustive])
        for x in sorted({(x.variant, x.case) for x in MUTATIONS}, key=str)
    ],
)
def test_without_a_mutation(variant, case, read_draft, tiny_target):
    recorded = recording(Mutation("none", "", variant=variant, case=case))
    assert differences(tiny_target, read_draft(variant), recorded, "beam_slots") == []


def repeats(index: int, mutation: Mutation) -> bool:
    """A change like its neighbours: every third of the loop's and every sixth of the switches."""
    return index % (3 if mutation.change is None else 6) > 0


@pytest.mark.parametrize(
    "mutation",
    by_default(MUTATIONS, lambda i, x: not repeats(i, x)),
    ids=lambda x: x.name.replace(" ", "-"),
)
def test_the_goldens_notice(mutation, read_draft, tiny_target, monkeypatch):
    draft = read_draft(mutation.variant)
    if mutation.change is not None:
        draft = mutation.change(draft)
    if mutation.patch is not None:
        m.fresh_programs(monkeypatch)
        mutation.patch(monkeypatch)
    assert differences(tiny_target, draft, recording(mutation), mutation.draft_attention)


def test_every_switch_is_mutated():
    """A switch added to DraftConfig needs a mutation here."""
    sizes = {
        "hidden_size",
        "target_hidden_size",
        "num_aux",
        "intermediate_size",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "vocab_size",
        "draft_vocab_size",
        "num_layers",
        "next_spare_norm",  # a tensor that is kept, not a number that is used
        "latent",  # another attention: tests/test_attention_mla.py
    }
    switches = {field.name for field in dataclasses.fields(DraftConfig)} - sizes
    assert switches <= {mutation.field for mutation in MUTATIONS}


def test_one_change_each():
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names)
    for mutation in MUTATIONS:
        assert (mutation.change is None) != (mutation.patch is None), mutation.name
