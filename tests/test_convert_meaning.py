"""A checkpoint whose meaning was changed: refused, or what changed is named and nothing else moves.

Each draw changes one thing a person or a tool gets wrong (a flag, ids, sizes, the vocabulary map, a
tensor under another's name or in another dtype). A conversion that goes through must then differ
from the right one in the fields and tensors of that thing alone, and name their origin in the file;
where it does not differ at all, it is the same draft.
"""

import json
import random

import numpy as np
import pytest
import toy_drafts as toy
from selection import by_default

from eagle3_jax.conversion import convert_draft
from eagle3_jax.files.shards import FileError
from eagle3_jax.findings import ConvertError

DRAWS = 60
MAP = {"draft_to_target", "map"}


def flags(rng, config, tensors):
    """A key that some framework reads, with a value that some framework writes."""
    key, values, fields = rng.choice(
        [
            ("norm_before_residual", (True, False, None), {"norm_before_residual"}),
            ("norm_output", (True, False), {"feedback", "final_norm"}),
            ("rms_norm_eps", (1e-6, 1e-5, 0.1), {"rms_norm_eps"}),
            ("rope_theta", (500000.0, 1e4, 1), {"rope"}),
            ("rope_scaling", ({"type": "linear", "factor": 2.0}, None), {"rope"}),
            ("max_position_embeddings", (16, 4096), {"max_position_embeddings"}),
            ("hidden_act", ("gelu", "silu"), set()),
            ("fc_norm", (True,), {"fc_norm"}),
            ("norm_before_fc", (True,), {"norm_before_fc"}),
            ("attention_bias", (True,), {"qkv_bias", "output_bias"}),
            ("bias", (True,), {"fc_bias", "qkv_bias", "output_bias"}),
            ("mlp_bias", (True,), {"mlp_bias"}),
            ("tie_word_embeddings", (True, False), {"head", "embed"}),
            ("target_hidden_size", (toy.E, toy.E // 2, 2 * toy.E), {"target_hidden_size"}),
        ]
    )
    config[key] = rng.choice(values)
    return fields


def sizes(rng, config, tensors):
    """A size that the tensors contradict, or do not show."""
    key = rng.choice(
        [
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
            "draft_vocab_size",
            "num_hidden_layers",
        ]
    )
    config[key] = max(1, int(config[key] * rng.choice([0.5, 2, 1.5]) + rng.choice([-1, 0, 1])))
    return {"num_heads", "num_kv_heads", "head_dim", "vocab_size"}


def ids(rng, config, tensors):
    """Aux ids shifted, swapped, repeated or short."""
    kind, given = rng.randrange(4), [1, 3, 4]
    if kind == 0:
        step = rng.choice([-1, 1, 2])
        given = [i + step for i in given]
    elif kind == 1:
        rng.shuffle(given)
    elif kind == 2:
        given[rng.randrange(3)] = given[rng.randrange(3)]
    else:
        del given[rng.randrange(3)]
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = given
    return {"aux_boundaries"}


def vocabulary(rng, config, tensors):
    """The map permuted, shifted, read as ids, cut, out of range, or its mask of another map."""
    table, kind = tensors["d2t"], rng.randrange(7)
    places = np.random.default_rng(rng.randrange(2**31))
    if kind == 0:
        tensors["d2t"] = places.permutation(table + np.arange(toy.W)) - np.arange(toy.W)
    elif kind == 1:
        tensors["d2t"] = table + rng.choice([-1, 1, 7])
    elif kind == 2:
        tensors["d2t"] = table + np.arange(toy.W)
    elif kind == 3:
        tensors["d2t"] = table[:-1]
    elif kind == 4:
        table[rng.randrange(toy.W)] = rng.choice([-1000, 10**6, toy.V])
    elif kind == 5:
        tensors["t2d"] = places.permutation(tensors["t2d"])
    else:
        tensors["d2t"] = table.astype(rng.choice([np.int32, np.float32, np.int16, np.uint8]))
    return set(MAP)


def names(rng, config, tensors):
    """Two tensors under each other's names, one missing, one too many."""
    kind, all_names = rng.randrange(3), sorted(set(tensors) - {"d2t", "t2d"})
    one = rng.choice(all_names)
    if kind == 0:
        other = rng.choice(all_names)
        tensors[one], tensors[other] = tensors[other], tensors[one]
        return {toy.CANONICAL[one], toy.CANONICAL[other]}
    if kind == 1:
        del tensors[one]
        return {toy.CANONICAL[one], "final_norm", "head", "feedback"}
    tensors[one.replace("weight", rng.choice(["bias", "scale", "weight2"]))] = tensors[one]
    return {"qkv_bias", "output_bias", "mlp_bias", "fc_bias"}


def values(rng, config, tensors):
    """A tensor transposed, cast, with a hole, zeros or a NaN in it."""
    one = rng.choice(sorted(set(tensors) - {"d2t", "t2d"}))
    array, kind = tensors[one], rng.randrange(5)
    if kind == 0:
        tensors[one] = np.ascontiguousarray(array.T)
    elif kind == 1:
        tensors[one] = array.astype(rng.choice([np.float16, np.float64, np.int8]))
    elif kind == 2:
        tensors[one] = array[..., :-1].copy()
    elif kind == 3:
        tensors[one] = np.zeros_like(array)
    else:
        array.reshape(-1)[rng.randrange(array.size)] = rng.choice([np.nan, np.inf, 1e38])
    return {toy.CANONICAL[one]}


KINDS = [flags, sizes, ids, vocabulary, names, values]


def known(folder):
    """What a conversion says: fields, digests, origins."""
    made = convert_draft(folder).manifest
    digests = {name: record["sha256"] for name, record in made["tensors"].items()}
    return made["config"], digests, made["origins"]


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    return known(toy.write(tmp_path_factory.mktemp("right") / "draft"))


@pytest.mark.parametrize("seed", by_default(range(20), lambda i, _: i < 2))
@pytest.mark.parametrize("kind", KINDS)
def test_one_change_moves_what_it_means_and_nothing_else(right, tmp_path, kind, seed):
    rng, outcomes = random.Random(f"{kind.__name__} {seed}"), set()
    for draw in range(DRAWS):
        allowed: set[str] = set()

        def change(config, tensors, allowed=allowed):
            tensors |= {name: tensor.copy() for name, tensor in tensors.items()}
            allowed |= kind(rng, config, tensors)

        folder = toy.write(tmp_path / str(draw), change)
        try:
            config, digests, origins = known(folder)
        except (ConvertError, FileError) as error:
            text = str(error)
            assert text.count("\n") == 0
            assert len(text) > 20
            outcomes.add("refused")
            continue
        moved = {k for k in config.keys() | right[0].keys() if config.get(k) != right[0].get(k)}
        moved |= {k for k in digests.keys() | right[1].keys() if digests.get(k) != right[1].get(k)}
        assert moved <= allowed, (draw, json.loads((folder / "config.json").read_text()))
        if not moved:
            outcomes.add("the same draft")
            continue
        outcomes.add("named")
        for field in moved:
            said = [
                o for name, o in origins.items() if name.split(".")[0] == field or name == field
            ]
            assert any(o.startswith(("config:", "tensor", "target")) for o in said), field
    assert "refused" in outcomes
    assert len(outcomes) > 1
