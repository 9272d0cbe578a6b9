"""Random tiny targets and drafts with non-unit norms and non-zero biases."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle3_jax.config import DraftConfig, RopeConfig, TargetConfig
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.targets.llama import LlamaTarget


def randomize(make, seed: int, dtype, vocab_size: int):
    """The module `make` builds, every tensor drawn anew in NumPy."""
    rng = np.random.default_rng(seed)
    graphdef, state = nnx.split(nnx.eval_shape(make))
    filled = []
    for path, variable in nnx.to_flat_state(state):
        name = ".".join(map(str, path))
        shape = variable.get_value().shape
        if name == "draft_to_target":
            value = rng.permutation(vocab_size)[: shape[0]].astype(np.int32)
        else:
            value = rng.normal(size=shape)
            if "norm" in name:
                value = 1 + 0.3 * value
            elif name.endswith("bias"):
                value = 0.3 * value
            else:
                transposed = variable.get_metadata().get("transposed", False)
                value = value / np.sqrt(shape[0 if transposed else -1])
            value = value.astype(dtype)
        filled.append((path, variable.replace(jnp.asarray(value))))
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def random_target(config: TargetConfig, seed: int, dtype=np.float64) -> LlamaTarget:
    return randomize(lambda: LlamaTarget(config, rngs=nnx.Rngs(0)), seed, dtype, config.vocab_size)


def random_draft(config: DraftConfig, seed: int, dtype=np.float64) -> Eagle3Draft:
    return randomize(lambda: Eagle3Draft(config, rngs=nnx.Rngs(0)), seed, dtype, config.vocab_size)


def target_config(**changes) -> TargetConfig:
    base = {
        "architecture": "LlamaForCausalLM",
        "hidden_size": 16,
        "intermediate_size": 12,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 6,
        "vocab_size": 13,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(),
        "max_position_embeddings": 256,
    }
    return TargetConfig(**(base | changes))


def draft_config(target: TargetConfig, **changes) -> DraftConfig:
    base = {
        "hidden_size": target.hidden_size,
        "target_hidden_size": target.hidden_size,
        "num_aux": 3,
        "intermediate_size": 10,
        "num_heads": 3,
        "num_kv_heads": 1,
        "head_dim": 4,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size - 3,
        "rms_norm_eps": 1e-5,
        "aux_boundaries": (0, 1, target.num_layers),
    }
    return DraftConfig(**(base | changes))


def leaves_of(tree) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(tree)]
