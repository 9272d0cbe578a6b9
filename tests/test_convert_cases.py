"""Reported faults in names, vocabulary and ownership, each as a small draft."""

import json

import numpy as np
import pytest
import toy_drafts as toy
from convert_command import Command, codes, digests


@pytest.fixture
def command(tmp_path, capsys) -> Command:
    return Command(tmp_path, capsys)


def without(*names):
    def change(config, tensors):
        return {name: tensor for name, tensor in tensors.items() if name not in names}

    return change


def renamed(old, new):
    def change(config, tensors):
        return {name.replace(old, new): tensor for name, tensor in tensors.items()}

    return change


# The vocabulary map: vllm#18909, Automodel#2447


def test_a_reduced_vocabulary_without_a_map(command, tmp_path):
    folder = toy.write(tmp_path / "draft", without("d2t", "t2d"))
    command.refused("VOCAB_MAP_MISSING", "--allow VOCAB_MAP_MISSING", folder)
    manifest = command.converted(folder, "--allow", "VOCAB_MAP_MISSING")
    assert codes(manifest) == ["VOCAB_MAP_MISSING"]
    assert manifest["d2t"]["kind"] == "identity"
    assert command.stored()["draft_to_target"].tolist() == list(range(64))


def unsorted_ids() -> np.ndarray:
    return np.random.default_rng(4).permutation(toy.target_ids())


@pytest.mark.parametrize("form", ["npy", "npz", "json", "offsets", "speculators"])
def test_a_map_in_a_side_file_is_used_in_its_order(command, tmp_path, form):
    folder = toy.write(tmp_path / "draft", without("d2t", "t2d"))
    ids = unsorted_ids()
    offsets = ids - np.arange(64)
    mask = np.isin(np.arange(toy.V), ids)
    if form == "npy":
        np.save(folder / "selected_token_ids.npy", ids)
    elif form == "npz":
        np.savez(folder / "token_map.npz", hot_token_ids=ids, counts=np.arange(64))
    elif form == "json":
        (folder / "token_map.json").write_text(json.dumps({"selected_token_ids": ids.tolist()}))
    else:
        np.save(folder / "d2t.npy", offsets)
        if form == "speculators":
            np.save(folder / "t2d.npy", mask)
    manifest = command.converted(folder)
    assert command.stored()["draft_to_target"].tolist() == ids.tolist()
    assert codes(manifest) == ["VOCAB_MAP_SIDE_FILE", "VOCAB_MAP_UNSORTED"]
    kind = "offset" if form in ("offsets", "speculators") else "absolute"
    assert manifest["origins"]["draft_to_target"].endswith(f"as {kind}")
    assert len(manifest["sources"]) == 3


def test_specforges_vocab_mapping(command, tmp_path):
    torch = pytest.importorskip("torch")
    folder = toy.write(tmp_path / "draft", without("d2t", "t2d"))
    made = {name: torch.from_numpy(toy.tensors()[name]) for name in ("d2t", "t2d")}
    torch.save(made, folder / "vocab_mapping.pt")
    command.converted(folder)
    assert command.stored()["draft_to_target"].tolist() == toy.target_ids().tolist()
    torch.save(made["t2d"], folder / "t2d.pt")
    torch.save(made["d2t"] + 1, folder / "d2t.pt")
    command.out = tmp_path / "other"
    command.refused("VOCAB_MAP_SIDE_FILE", "differ: d2t.pt, t2d.pt, vocab_mapping.pt", folder)


def test_a_side_file_without_a_map_is_named(command, tmp_path):
    folder = toy.write(tmp_path / "draft", without("d2t", "t2d"))
    (folder / "vocab_mapping.json").write_text("{")
    command.refused("VOCAB_MAP_SIDE_FILE", "vocab_mapping.json beside them", folder)
    (folder / "vocab_mapping.json").write_text('{"d2t": [1, 2, 3]}')
    command.refused("VOCAB_MAP_SIDE_FILE", "no table of 64 integers", folder)
    ids = {"selected_token_ids": [7] * 64}
    (folder / "vocab_mapping.json").write_text(json.dumps(ids))
    command.refused("VOCAB_MAP_INVALID", "7", folder)


def test_an_absolute_map_needs_the_flag(command, tmp_path):
    def absolute(config, tensors):
        tensors["d2t"] = toy.target_ids()

    folder = toy.write(tmp_path / "draft", absolute)
    command.refused("VOCAB_MAP_ABSOLUTE", "--d2t-kind absolute", folder)
    assert command.converted(folder, "--d2t-kind", "absolute")["d2t"]["kind"] == "absolute"
    assert command.stored()["draft_to_target"].tolist() == toy.target_ids().tolist()


def test_a_frequency_order_is_kept(command, tmp_path):
    ids = np.random.default_rng(3).permutation(toy.target_ids())

    def unsorted(config, tensors):
        tensors["d2t"] = (ids - np.arange(64)).astype(np.int32)

    manifest = command.converted(toy.write(tmp_path / "draft", unsorted))
    assert codes(manifest) == ["VOCAB_MAP_UNSORTED"]
    assert not manifest["d2t"]["sorted"]
    assert command.stored()["draft_to_target"].tolist() == ids.tolist()


def test_a_mask_that_disagrees_names_the_file_and_row(command, tmp_path):
    def stale(config, tensors):
        tensors["t2d"] = np.roll(tensors["t2d"], 1)

    err = command.refused("VOCAB_T2D_DISAGREES", "draft id", toy.write(tmp_path / "draft", stale))
    assert str(tmp_path / "draft") in err


# The head: sglang#27908


def test_a_missing_head_of_a_full_vocabulary_is_the_target_s(command, tmp_path):
    def change(config, tensors):
        config["draft_vocab_size"] = 256
        return {n: t for n, t in tensors.items() if n not in ("lm_head.weight", "d2t", "t2d")}

    manifest = command.converted(
        toy.write(tmp_path / "draft", change), "--target", toy.write_target(tmp_path / "target")
    )
    assert manifest["config"]["head"] == "target"
    assert manifest["origins"]["lm_head.weight"] == "target"
    assert codes(manifest) == ["WEIGHT_MISSING_LM_HEAD"]
    assert "lm_head <- target" in manifest["findings"][0]["message"]


@pytest.mark.parametrize("gone", [("lm_head.weight",), ("lm_head.weight", "d2t", "t2d")])
def test_a_missing_head_of_a_reduced_vocabulary_is_refused(command, tmp_path, gone):
    folder = toy.write(tmp_path / "draft", without(*gone))
    command.refused("WEIGHT_MISSING_LM_HEAD", "missing: lm_head.weight", folder)


def test_a_missing_tied_head_beside_an_own_embedding_is_refused(command, tmp_path):
    def change(config, tensors):
        config |= {"draft_vocab_size": 256, "tie_word_embeddings": True}
        tensors["embed_tokens.weight"] = toy.normal(256, 64)
        return {n: t for n, t in tensors.items() if n not in ("lm_head.weight", "d2t", "t2d")}

    folder = toy.write(tmp_path / "draft", change)
    command.refused("WEIGHT_MISSING_LM_HEAD", "tie_word_embeddings", folder)


def test_tie_word_embeddings_does_not_replace_an_own_head(command, tmp_path):
    def tied(config, tensors):
        config["tie_word_embeddings"] = True

    manifest = command.converted(toy.write(tmp_path / "draft", tied))
    assert codes(manifest) == ["WEIGHT_TIED_HEAD"]
    assert manifest["config"]["head"] == "draft"


# Names: speculators#1131, Model-Optimizer#628


def test_a_renamed_tensor_is_refused_with_the_closest_name(command, tmp_path):
    change = renamed("midlayer.self_attn.q_proj", "midlayer.attn.q_proj")
    command.refused(
        "WEIGHT_UNMATCHED_KEY",
        "'midlayer.attn.q_proj.weight' is not one of this dialect, closest known name that is "
        "absent: midlayer.self_attn.q_proj.weight",
        toy.write(tmp_path / "draft", change),
    )


@pytest.mark.parametrize(
    "name",
    ["midlayer.self_attn.v_proj.weight", "midlayer.hidden_norm.weight", "fc.weight", "norm.weight"],
)
def test_a_missing_tensor_is_named(command, tmp_path, name):
    folder = toy.write(tmp_path / "draft", without(name))
    command.refused("WEIGHT_MISSING", f"missing: {name}", folder)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("midlayer.", "layers.0."),
        ("midlayer.", "model.layers.0."),
        ("midlayer.", "module.midlayer."),
        ("fc.", "model.fc."),
    ],
)
def test_spellings_give_identical_digests(command, tmp_path, old, new):
    plain = command.converted(toy.write(tmp_path / "draft"))
    other = command.converted(toy.write(tmp_path / "other", renamed(old, new)))
    assert digests(other) == digests(plain)
    assert other["config"] == plain["config"]


# The target's own spelling: speculators#1156


@pytest.mark.parametrize(
    ("embed", "head", "tied"),
    [
        ("backbone.embeddings.weight", "lm_head.weight", False),
        ("model.language_model.embed_tokens.weight", None, True),
        ("tok_embeddings.weight", "output.weight", False),
    ],
)
def test_the_target_s_tensors_are_found_by_ending_and_shape(command, tmp_path, embed, head, tied):
    weights = {embed: toy.normal(260, 64), "visual.embed_tokens.weight": toy.normal(300, 32)}
    weights |= {"layers.0.attention.output.weight": toy.normal(64, 64)}
    if head:
        weights[head] = toy.normal(260, 64, seed=1)
    target = toy.write_target(tmp_path / "target", weights, tie_word_embeddings=tied)
    manifest = command.converted(toy.write(tmp_path / "draft"), "--target", target)
    assert manifest["target"] == {
        "hidden_size": 64,
        "vocab_size": 256,
        "num_hidden_layers": 8,
        "embed": embed,
        "head": head or f"tied to {embed}",
    }
    assert codes(manifest) == []


def test_a_doubtful_target_tensor_is_a_warning(command, tmp_path):
    weights = {"a.embed_tokens.weight": toy.normal(256, 64), "b.wte.weight": toy.normal(256, 64)}
    target = toy.write_target(tmp_path / "target", weights)
    manifest = command.converted(toy.write(tmp_path / "draft"), "--target", target)
    assert codes(manifest) == ["WEIGHT_TARGET_KEY", "WEIGHT_TARGET_KEY"]
    (target / "model.safetensors").write_bytes(b"damaged")
    manifest = command.converted(toy.write(tmp_path / "draft"), "--target", target)
    assert "were not looked at" in manifest["findings"][0]["message"]


# Whose embedding: vllm#28549, vllm#50158


def own_embedding(config, tensors):
    tensors["embed_tokens.weight"] = toy.normal(256, 64)


def test_the_own_embedding_is_compared_with_the_target_s(command, tmp_path):
    folder = toy.write(tmp_path / "draft", own_embedding)
    same = {"model.embed_tokens.weight": toy.normal(256, 64), "lm_head.weight": toy.normal(256, 64)}
    target = toy.write_target(tmp_path / "target", same)
    manifest = command.converted(folder, "--target", target)
    assert manifest["target"]["embed_compared"] == {
        "rows": 256,
        "rows_different": 0,
        "max_abs_diff": 0.0,
    }
    assert codes(manifest) == []
    same["model.embed_tokens.weight"][5:, 3] += 0.5
    target = toy.write_target(tmp_path / "target", same)
    manifest = command.converted(folder, "--target", target)
    compared = manifest["target"]["embed_compared"]
    assert compared["rows_different"] == 251
    assert compared["first_different_row"] == 5
    assert compared["max_abs_diff"] == pytest.approx(0.5, abs=1e-6)
    assert codes(manifest) == ["WEIGHT_OWNER"]


def test_embed_says_whose(command, tmp_path):
    folder = toy.write(tmp_path / "draft", own_embedding)
    manifest = command.converted(folder)
    assert manifest["config"]["embed"] == "draft"
    assert command.stored()["embed.weight"].tobytes() == toy.normal(256, 64).tobytes()
    manifest = command.converted(folder, "--embed", "target")
    assert manifest["config"]["embed"] == "target"
    assert manifest["ignored"]["embed_tokens.weight"] == "flag --embed target"
    assert "embed.weight" not in manifest["tensors"]
    bare = toy.write(tmp_path / "bare")
    command.out = tmp_path / "other"
    command.refused("WEIGHT_OWNER", "no embed_tokens.weight", bare, "--embed", "draft")


# Other attention: vllm-ascend#9703, Automodel#3264


def test_latent_attention_whose_sizes_do_not_fit_is_refused(command, tmp_path):
    def latent(config, tensors):
        made = {n: t for n, t in tensors.items() if "self_attn" not in n}
        shapes = {"q_a_proj": (24, 128), "q_b_proj": (80, 24), "kv_a_proj_with_mqa": (24, 128)}
        shapes |= {"kv_b_proj": (100, 16), "o_proj": (64, 48)}
        made |= {f"midlayer.self_attn.{n}.weight": toy.normal(*s) for n, s in shapes.items()}
        norms = {"q_a_layernorm": 24, "kv_a_layernorm": 16}
        return made | {f"midlayer.self_attn.{n}.weight": toy.normal(s) for n, s in norms.items()}

    folder = toy.write(tmp_path / "draft", latent)
    command.refused("WEIGHT_SHAPE", "latent attention of 4 heads", folder)


def test_another_familys_scaling_is_refused(command, tmp_path):
    def scaled(config, tensors):
        config["logit_scale"] = 0.0625

    folder = toy.write(tmp_path / "draft", scaled)
    command.refused("ARCH_UNKNOWN_VARIANT", "logit_scale 0.0625", folder)


def test_a_gated_attention_with_another_activation_names_both(command, tmp_path):
    def gated(config, tensors):
        config["hidden_act"] = "situ"
        tensors["midlayer.self_attn.g_proj.weight"] = toy.normal(64, 128)

    folder = toy.write(tmp_path / "draft", gated)
    err = command.refused("ARCH_UNKNOWN_VARIANT", "g_proj", folder)
    assert "'situ'" in err
