"""Mistral, Qwen2, Qwen3 and the text part of a vision model, from folders transformers wrote.

tests/data/targets holds the folders and what transformers computed (tests/make_target_goldens.py);
tests/test_targets.py compares with transformers itself.
"""

import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_models import draft_config, random_draft
from safetensors.numpy import load_file, save_file
from tree_paths import bits

import eagle3_jax as e3
from eagle3_jax.config import ConfigError, RopeConfig
from eagle3_jax.layers import Rows
from eagle3_jax.modules import take_apart

DATA = Path(__file__).parent / "data/targets"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_vl")
PREFILLED = (14, 5)
TREE = e3.TreeConfig(2, 8, 24)


@functools.cache
def loaded(family: str):
    return e3.load_target(DATA / family)


@functools.cache
def recorded(family: str) -> dict[str, np.ndarray]:
    with np.load(DATA / family / "record.npz") as file:
        return dict(file)


@functools.partial(jax.jit, static_argnames=("structure", "boundaries"))
def forward(structure, leaves, tokens, rows, cache, boundaries):
    target = structure.build(leaves)
    states, aux, cache = target.states(tokens, rows, cache, boundaries)
    return target.logits(states), aux, cache


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_transformers(family):
    """A ragged prefill, rows through the cache, then a tree: every boundary and the logits.

    The windows, 4 to 6 positions, end within the first sequence's prefill and before its tree.
    """
    target, record = loaded(family), recorded(family)
    leaves, structure = take_apart(target)
    boundaries = (*range(target.config.num_layers + 1), "final_norm")
    found: list[dict[str, list]] = [{str(b): [] for b in (*boundaries, "logits")} for _ in range(2)]
    cache = target.new_cache(2, 48)
    windows = any(target.config.windows)
    assert (cache.positions is not None) == windows == (family not in ("llama", "qwen3_vl"))

    def run(tokens, rows, counts):
        nonlocal cache
        ids = jnp.asarray(tokens, jnp.int32)
        logits, aux, cache = forward(structure, leaves, ids, rows, cache, boundaries)
        for b, count in enumerate(counts):
            found[b]["logits"].append(logits[b, :count])
            for i, boundary in enumerate(boundaries):
                found[b][str(boundary)].append(aux[b, :count, i])

    tokens = [record[f"tokens.{b}"] for b in range(2)]
    padded = np.zeros((2, 16), np.int32)
    for row, sequence, count in zip(padded, tokens, PREFILLED, strict=True):
        row[:count] = sequence[:count]
    run(padded, Rows.prefill(2, 16), PREFILLED)
    lengths = np.array(PREFILLED, np.int32)
    for at in (0, 3):
        new = [t[n + at : n + at + 3] for t, n in zip(tokens, PREFILLED, strict=True)]
        run(np.stack(new), Rows.chain(jnp.asarray(lengths + at), 3), (3, 3))
    parents = [record[f"parents.{b}"].tolist() for b in range(2)]
    depths = np.zeros((2, len(parents[0])), np.int32)
    for row, links in zip(depths, parents, strict=True):
        for node, parent in enumerate(links[1:], 1):
            row[node] = row[parent] + 1
    assert depths.max() > 3
    start = jnp.asarray(lengths + 6)
    ancestors = jnp.asarray(np.stack([bits(links, 1) for links in parents]))
    rows = Rows(start[:, None] + jnp.asarray(depths), start, start, ancestors)
    run([record[f"nodes.{b}"] for b in range(2)], rows, [len(links) for links in parents])

    for b, values in enumerate(found):
        for name, parts in values.items():
            np.testing.assert_allclose(
                np.concatenate(parts), record[f"{name}.{b}"], rtol=0, atol=1e-4, err_msg=name
            )


EXHAUSTIVE = [pytest.param(f, marks=pytest.mark.exhaustive) for f in ("llama", "qwen3_vl")]


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", *EXHAUSTIVE])
def test_speculation_writes_the_text_of_transformers(family):
    """With a wide tree of a random draft; `generate` does so for the family with both layers."""
    target, record = loaded(family), recorded(family)
    prompts = [record[f"prompt.{i}"].tolist() for i in range(3)]
    expected = record["greedy"].tolist()
    config = draft_config(target.config, draft_vocab_size=30)
    draft = random_draft(config, seed=3, dtype=np.float32)
    new = len(expected[0])
    found = e3.speculate(target, draft, prompts, max_new_tokens=new, tree=TREE)
    assert found.tokens == expected
    assert max(max(lengths) for lengths in found.accept_lengths) > 1
    if family == "qwen2":
        assert e3.generate(target, prompts, max_new_tokens=new).tokens == expected


def test_config_is_read():
    qwen2, qwen3 = loaded("qwen2").config, loaded("qwen3").config
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    assert qwen2.windows == (None, 5, 5)
    assert qwen2.rope == RopeConfig(500.0, "yarn", 4.0, original_max_position_embeddings=128)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.tie_word_embeddings) == (False, True, True)
    assert qwen3.windows == (4, None, 4)
    assert loaded("mistral").config.windows == (6, 6, 6)
    assert loaded("llama").config.windows == ()
    assert loaded("llama").folder.notes == ()


@pytest.fixture
def edited(tmp_path):
    """`edited(family, config changes, rename, **added tensors)` copies a folder and changes it.

    A value of `...` deletes a key; `text_config.` before a key reaches into the text part.
    """

    def make(family: str, changes: dict, rename=lambda name: name, **added) -> Path:
        folder = tmp_path / family
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(DATA / family, folder)
        raw = json.loads((folder / "config.json").read_text())
        for key, value in changes.items():
            *_, last = key.split(".")
            table = raw["text_config"] if key.startswith("text_config.") else raw
            table.pop(last, None)
            if value is not ...:
                table[last] = value
        (folder / "config.json").write_text(json.dumps(raw))
        tensors = {rename(n): t for n, t in load_file(folder / "model.safetensors").items()}
        save_file(tensors | added, folder / "model.safetensors")
        return folder

    return make


SLIDES, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("mistral", {"sliding_window": None}, ()),
        ("mistral", {"sliding_window": ...}, (4096, 4096, 4096)),
        ("mistral", {"layer_types": [SLIDES] * 3}, (6, 6, 6)),
        ("qwen2", {"use_sliding_window": False, "layer_types": ...}, ()),
        ("qwen2", {"use_sliding_window": ..., "layer_types": ...}, ()),
        ("qwen2", {"layer_types": ...}, (None, 5, 5)),
        ("qwen2", {"layer_types": ..., "max_window_layers": 0}, (5, 5, 5)),
        ("qwen2", {"layer_types": ..., "max_window_layers": 3}, ()),
        ("qwen2", {"layer_types": ..., "max_window_layers": ...}, ()),
        ("qwen3", {"sliding_window": ..., "layer_types": [FULL, SLIDES, FULL]}, (None, 4096, None)),
        ("qwen3", {"sliding_window": None, "layer_types": [FULL] * 3}, ()),
        ("llama", {"sliding_window": 4}, ()),
    ],
)
def test_windows(edited, family, changes, windows):
    """The rules of transformers' MistralConfig, Qwen2Config and Qwen3Config."""
    target = e3.load_target(edited(family, changes))
    assert target.config.windows == windows
    noted = any("sliding_window is 4, which LlamaForCausalLM" in n for n in target.folder.notes)
    assert noted == (family == "llama")


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "mistral",
            {"layer_types": [SLIDES, FULL, SLIDES]},
            "gives every layer its sliding_window",
        ),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0, expected an integer of at least"),
        ("qwen2", {"layer_types": [SLIDES] * 2}, "expected 3 of full_attention and sliding_att"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 3}, "layer_types is ['chunked_att"),
        ("qwen2", {"layer_types": 7}, "layer_types is 7, expected 3 of full_attention"),
        ("qwen2", {"use_sliding_window": False}, "layer_types asks for sliding_attention, but"),
        ("qwen2", {"use_sliding_window": "yes"}, "use_sliding_window is 'yes', expected true"),
        ("qwen2", {"layer_types": ..., "max_window_layers": None}, "max_window_layers is null"),
        ("qwen3", {"num_hidden_layers": 10**12}, "but the weights have the blocks 0..2"),
        ("qwen3", {"attention_bias": True}, "attention_bias is true, but the weights have no such"),
        (
            "qwen2",
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "is of kind dynamic, whose",
        ),
        (
            "llama",
            {"architectures": ["Qwen3ForCausalLM"], "mlp_bias": ...},
            "attn.q_norm.weight is",
        ),
        ("qwen3", {"architectures": ["LlamaForCausalLM"]}, "k_norm.weight has no place in Llama"),
        ("qwen3", {"architectures": ["Qwen3MoeForCausalLM"]}, "replay and doctor need no target"),
        ("qwen3_vl", {"text_config.model_type": "qwen3_vl_moe_text"}, "replay and doctor need no"),
        ("qwen3_vl", {"text_config": 7}, "config.json: text_config is 7, expected an object"),
        ("qwen3_vl", {"text_config.hidden_size": ...}, "text_config: hidden_size is missing"),
        ("qwen3_vl", {"quantization_config": {}}, "has a quantization_config, expected weights in"),
    ],
)
def test_refusals(edited, family, changes, message):
    folder = edited(family, changes)
    with pytest.raises(ConfigError) as caught:
        e3.load_target(folder)
    assert str(caught.value).startswith(str(folder))
    assert message in str(caught.value)
    assert "--" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_text_part_is_entered_by_structure(edited):
    """Under any prefix; what stands beside it is passed over by name, never in silence."""
    target = loaded("qwen3_vl")
    assert target.config.architecture == "Qwen3VLForConditionalGeneration"
    assert (target.config.qk_norm, target.config.rope.theta) == (True, 500.0)
    rope, tensors, vision = target.folder.notes
    where = str(DATA / "qwen3_vl")
    assert rope.startswith(f"{where}/config.json: text_config: multi-axis rope")
    assert tensors == f"{where}: text only; the tensors are under model.language_model."
    assert vision.startswith(f"{where}: model.visual: passed over, ")

    def older(name):
        if name == "lm_head.weight":
            return "language_model.lm_head.weight"
        name = name.replace("model.language_model.", "language_model.model.")
        return name.replace("model.visual.", "vision_tower.")

    speech = {"speech.embed_tokens.weight": np.ones((2, 2), np.float32)}
    moved = e3.load_target(edited("qwen3_vl", {}, older, **speech))
    assert any("vision_tower: passed over" in note for note in moved.folder.notes)
    assert any("speech: passed over, 1 tensors" in note for note in moved.folder.notes)
    for ours, theirs in zip(take_apart(moved)[0], take_apart(target)[0], strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_text_part_must_be_whole(edited):
    stem = "model.language_model."
    with pytest.raises(ConfigError, match=r"expected one prefix .* found none"):
        e3.load_target(edited("qwen3_vl", {}, lambda name: name.replace("embed_tokens", "wte")))
    second = {
        f"talker.{name}": np.ones((2, 2), np.float32)
        for name in ("embed_tokens.weight", "layers.0.self_attn.q_proj.weight")
    }
    with pytest.raises(ConfigError, match=r"expected one prefix .* found \['model\.lang.*talker"):
        e3.load_target(edited("qwen3_vl", {}, **second))
    stray = {f"{stem}layers.2.cross_attn.weight": np.ones((2, 2), np.float32)}
    with pytest.raises(ConfigError, match=r"layers\.2\.cross_attn\.weight has no place in Qwen3VL"):
        e3.load_target(edited("qwen3_vl", {}, **stray))


def test_a_flat_vision_config(edited):
    """Older Qwen2-VL: the text keys at the top of config.json, `visual.` beside `model.`."""
    changes = {"architectures": ["Qwen2VLForConditionalGeneration"], "vision_config": {}}
    changes["rope_scaling"] = {"type": "mrope", "mrope_section": [1, 1, 0]}
    vision = {"visual.merger.weight": np.ones((2, 2), np.float32)}
    target = e3.load_target(edited("qwen2", changes, **vision))
    assert target.config.architecture == "Qwen2VLForConditionalGeneration"
    assert target.config.rope == RopeConfig(500.0)
    assert any("visual: passed over, 1 tensors" in note for note in target.folder.notes)
    for ours, theirs in zip(take_apart(target)[0], take_apart(loaded("qwen2"))[0], strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("sharded", [False, True])
def test_mistrals_second_copy_is_passed_over(edited, sharded):
    """Its repositories hold `consolidated.safetensors`, the same weights under other names."""
    folder = edited("mistral", {})
    save_file(
        {"tok_embeddings.weight": np.ones(2, np.float32)}, folder / "consolidated.safetensors"
    )
    if sharded:
        names = list(load_file(folder / "model.safetensors"))
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    target = e3.load_target(folder)
    (note,) = target.folder.notes
    assert note.endswith("was read; passed over: consolidated.safetensors")
    np.testing.assert_array_equal(target.shared().embedding, loaded("mistral").shared().embedding)


def test_a_base_left_out_is_the_family_s(edited):
    for family, key, base in (("qwen3_vl", "text_config.", 5e5), ("mistral", "", 1e4)):
        rope = {"rope_parameters": ..., "rope_theta": ...}
        folder = edited(family, {f"{key}{name}": value for name, value in rope.items()})
        assert e3.load_target(folder).config.rope == RopeConfig(base)
