"""The RoPE a draft was trained with, where its trainer is known not to follow its own config."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from eagle3_jax.aux_ids import ANGELSLIM_KEY
from eagle3_jax.config import DraftConfig
from eagle3_jax.draft_switches import MODELOPT_KEYS
from eagle3_jax.source_config import SourceConfig

ANGELSLIM = "Eagle3LlamaForCausalLM"
PLAIN_LLAMA = "LlamaForCausalLM"
BASE = 10000.0


@dataclasses.dataclass(frozen=True)
class TrainedRope:
    """What is known: `sure` when the file shows its trainer, else a possibility."""

    why: str
    sure: bool

    @property
    def fix(self) -> str:
        """How to run the draft so."""
        return f"--rope-theta {BASE:g} --ignore-rope-scaling"


def trained_rope(
    config: DraftConfig, dialect: str, source: Mapping[str, Any]
) -> TrainedRope | None:
    """How the RoPE in training differed from the config's; None when nothing says it did.

    AngelSlim and the official trainer use base 10000 without scaling whatever the config says, as
    did SpecForge before 2025-10-30; ModelOpt's export writes yarn (factor 32) into drafts trained
    without it. AngelSlim's multi-axis class does follow the base.
    """
    rope = config.rope
    plain = rope.kind == "default" and rope.theta == BASE
    eagle = source.get("eagle_config") or {}
    names = SourceConfig(source, "config.json").architectures
    if plain or config.latent is not None:
        return None
    if rope.kind == "yarn" and (
        dialect == "modelopt" or any(key in eagle for key in MODELOPT_KEYS)
    ):
        why = "ModelOpt's export writes yarn into drafts trained without scaling"
        return TrainedRope(why, True)
    if dialect != "official":
        return None
    angelslim = ANGELSLIM_KEY in source or ANGELSLIM_KEY in eagle or ANGELSLIM in names
    if angelslim and "mrope_section" not in str(source.get("rope_scaling")):
        return TrainedRope("AngelSlim trains at base 10000 whatever the config says", True)
    if PLAIN_LLAMA in names and not eagle:
        return TrainedRope("the official trainer uses base 10000 whatever the config says", True)
    why = "AngelSlim, and SpecForge before 2025-10-30, train at base 10000 whatever the config says"
    return TrainedRope(why, False)
