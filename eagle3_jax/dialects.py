"""Checkpoint dialects as data: tensor names, prefixes, and what a missing switch means."""

import dataclasses
import difflib
import re
from collections.abc import Iterable, Sequence

from eagle3_jax.findings import ConvertError, Findings
from eagle3_jax.source_config import SourceConfig

PREFIXES = ("module.", "_orig_mod.", "draft_model.", "eagle_module.", "model.")
"""Wrappers that save under their own name: DDP, torch.compile, the trainers of SpecForge and of
ModelOpt, NeMo and HF."""

LAYER = re.compile(r"(midlayer|layers)\.(?:([0-9]{1,4})\.)?")
"""A layer's prefix: `layers.i.`, `midlayer.`, or `midlayer.i.` (ModelOpt before 0.43)."""

LAYER_NAMES = {
    "input_layernorm.weight": "norm_embed.weight",
    "hidden_norm.weight": "norm_hidden.weight",
    "post_attention_layernorm.weight": "norm_post.weight",
    **{
        f"self_attn.{name}_proj.{part}": f"attn.{name}.{part}"
        for name in "qkvo"
        for part in ("weight", "bias")
    },
    **{
        f"mlp.{name}_proj.{part}": f"mlp.{name}.{part}"
        for name in ("gate", "up", "down")
        for part in ("weight", "bias")
    },
    "self_attn.q_norm.weight": "attn.q_norm.weight",
    "self_attn.k_norm.weight": "attn.k_norm.weight",
    "self_attn.q_a_proj.weight": "attn.q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn.q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn.q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn.kv_a.weight",
    "self_attn.kv_a_layernorm.weight": "attn.kv_a_norm.weight",
    "self_attn.kv_b_proj.weight": "attn.kv_b.weight",
}
"""Name after a layer's prefix -> canonical name after `layers.i.`, the same in every dialect."""

MODEL_NAMES = {
    "fc.weight": "fc.weight",
    "fc.bias": "fc.bias",
    "input_norm.weight": "input_norm.weight",
    "fc_norm.weight": "input_norm.weight",
    "norm.weight": "norm_final.weight",
    "lm_head.weight": "lm_head.weight",
    "embed_tokens.weight": "embed.weight",
    "d2t": "d2t",
    "t2d": "t2d",
}
"""Name outside the layer -> canonical name; one `fc_norm.weight` is a norm over all states."""

FC_NORM = re.compile(r"fc_norm\.([0-9]{1,3})\.weight")
FC_NORM_ALIASES = {"aux_norm_low.weight": 0, "aux_norm_mid.weight": 1, "aux_norm_high.weight": 2}

IGNORED = {
    "verifier_lm_head.weight": "the target's head, kept in memory by speculators' trainer",
    "verifier_norm.weight": "the target's final norm, kept in memory by speculators' trainer",
    "rotary_emb.inv_freq": "recomputed from the RoPE settings",
    "self_attn.rotary_emb.inv_freq": "recomputed from the RoPE settings",
}
"""Names (after the layer's prefix, if any) that carry nothing the draft needs."""


@dataclasses.dataclass(frozen=True)
class Dialect:
    """What a framework means when a switch is not in the file; None: it must be stated.

    Attributes:
      norm_output_clear: whether `norm_output` true has one meaning (post-norm feedback).
      theta_untrue: whether trainers of this dialect are known to use base 10000 whatever the config
        says (AngelSlim; SpecForge before 2025-10-30).
    """

    name: str
    norm_before_residual: bool | None
    double_norm: bool | None
    norm_output_clear: bool
    theta_untrue: bool


DIALECTS = {
    dialect.name: dialect
    for dialect in (
        Dialect("official", False, False, norm_output_clear=False, theta_untrue=True),
        Dialect("speculators", None, False, norm_output_clear=True, theta_untrue=False),
        Dialect("modelopt", False, None, norm_output_clear=False, theta_untrue=False),
        Dialect("nemo", False, False, norm_output_clear=False, theta_untrue=False),
        Dialect("deepspec", False, False, norm_output_clear=False, theta_untrue=False),
        Dialect("mla", False, False, norm_output_clear=True, theta_untrue=False),
    )
}


@dataclasses.dataclass(frozen=True)
class Matched:
    """A checkpoint's tensors by meaning.

    Attributes:
      sources: canonical name (or `d2t`, `t2d`) -> the file's names, several for `fc_norm`.
      ignored: the file's name -> why nothing is lost by leaving it out.
      layer: the first layer's prefix, "midlayer.", "midlayer.0." or "layers.0.".
    """

    sources: dict[str, tuple[str, ...]]
    ignored: dict[str, str]
    layer: str

    @property
    def num_layers(self) -> int:
        """Counted in the tensors."""
        found = [int(name.split(".")[1]) for name in self.sources if name.startswith("layers.")]
        return max(found, default=0) + 1

    def spelled(self, canonical: str) -> str:
        """How this file spells, or would spell, a canonical name."""
        if canonical in self.sources:
            return self.sources[canonical][0]
        if canonical == "fc_norm.weight":
            return "fc_norm.0.weight"
        prefix, rest, table = "", canonical, MODEL_NAMES
        if canonical.startswith("layers."):
            _, index, rest = canonical.split(".", 2)
            prefix, table = layer_prefix(self.layer, int(index)), LAYER_NAMES
        for name, target in table.items():
            if target == rest:
                return prefix + name
        return canonical


def layer_prefix(first: str, index: int) -> str:
    """The prefix of layer `index` in a file whose first layer has this prefix."""
    if index == 0:
        return first
    return f"{'midlayer' if first == 'midlayer.0.' else 'layers'}.{index}."


def strip_prefixes(names: Sequence[str], findings: Findings | None = None) -> dict[str, str]:
    """Plain name -> the file's name, `PREFIXES` removed; those of training states are noted.

    Raises:
      ConvertError: two names differ only by their prefix.
    """
    plain: dict[str, str] = {}
    for name in names:
        short = name
        while prefix := next((p for p in PREFIXES if short.startswith(p)), None):
            short = short.removeprefix(prefix)
        if short in plain:
            raise ConvertError(
                "WEIGHT_DUPLICATE", f"tensors {plain[short]!r} and {name!r} are both {short!r}"
            )
        plain[short] = name
    stripped = {n.removesuffix(short) for short, n in plain.items()} - {"", "model."}
    if stripped and findings is not None:
        findings.note(
            "WEIGHT_PREFIX",
            f"names begin with {', '.join(sorted(stripped))}, as a training state's do: stripped; "
            "an engine that loads this file skips such names without a word",
        )
    return plain


def match(plain: dict[str, str]) -> Matched:
    """Gives every tensor its canonical name; `plain` is what `strip_prefixes` returned.

    Raises:
      ConvertError: WEIGHT_UNMATCHED_KEY with the closest known name; WEIGHT_DUPLICATE for two
        spellings of one tensor.
    """
    layer = _first_layer(plain)
    sources: dict[str, tuple[str, ...]] = {}
    ignored: dict[str, str] = {}
    norms: dict[int, str] = {}
    unknown: list[str] = []
    for name, original in plain.items():
        found = LAYER.match(name)
        inner = name[found.end() :] if found else name
        slot = _fc_norm_slot(name)
        if slot is not None:
            if slot in norms:
                raise _twice(norms[slot], original)
            norms[slot] = original
        elif inner in IGNORED:
            ignored[original] = IGNORED[inner]
        else:
            canonical = _canonical(found, inner, layer)
            if canonical is None:
                unknown.append(name)
            elif canonical in sources:
                raise _twice(sources[canonical][0], original)
            else:
                sources[canonical] = (original,)
    if unknown:
        raise ConvertError("WEIGHT_UNMATCHED_KEY", _unmatched(unknown, plain, layer))
    if norms:
        if sorted(norms) != list(range(len(norms))):
            raise ConvertError(
                "WEIGHT_MISSING", f"fc_norm has tensors {sorted(norms)}, expected 0..{max(norms)}"
            )
        sources["fc_norm.weight"] = tuple(norms[i] for i in sorted(norms))
    return Matched(sources, ignored, layer)


def detect(matched: Matched, config: SourceConfig, findings: Findings) -> Dialect:
    """The dialect of a matched EAGLE-3 checkpoint: the config decides, then the tensors."""
    if config.top("speculators_model_type") is not None:
        if config.nested and config.layer("model_type") is None:
            norms = "layers.0.attn.q_norm.weight" in matched.sources
            has = "them: used" if norms else "none: none are used"
            findings.note(
                "ARCH_LAYER_TYPE",
                "transformer_layer_config has no model_type: speculators would build a Qwen3 layer "
                f"with q/k norms; the file has {has}",
            )
        return DIALECTS["speculators"]
    sources = matched.sources
    if "Qwen3Eagle3Model" in config.architectures:
        return DIALECTS["deepspec"]
    if "layers.0.attn.kv_a.weight" in sources and not config.eagle:
        return DIALECTS["mla"]
    fc = sources.get("fc.weight", ("",))[0]
    if fc == "model.fc.weight" and sources.get("lm_head.weight") == ("lm_head.weight",):
        findings.note("DIALECT_NEMO", "model.fc.weight beside a bare lm_head.weight: read as NeMo")
        return DIALECTS["nemo"]
    bare = not {"t2d", "embed.weight"} & sources.keys()
    if matched.layer == "layers.0." and config.eagle and bare:
        findings.note(
            "DIALECT_MODELOPT",
            "layers.0.*, eagle_config, no t2d and no embed_tokens: read as ModelOpt >= 0.43",
        )
        return DIALECTS["modelopt"]
    if "layers.0.attn.kv_a.weight" in sources:
        return DIALECTS["mla"]
    return DIALECTS["official"]


def known_names(layer: str) -> list[str]:
    """Every name a checkpoint with this first layer's prefix may use."""
    names = [layer + name for name in LAYER_NAMES] + list(MODEL_NAMES)
    return names + [f"fc_norm.{i}.weight" for i in range(3)] + list(FC_NORM_ALIASES)


def _first_layer(plain: Iterable[str]) -> str:
    """`midlayer.` or `layers.0.`; `midlayer.0.` where layers of that stem are numbered."""
    stems = {(m[1], m[2]) for name in plain if (m := LAYER.match(name))}
    if any(stem == "midlayer" and number is not None for stem, number in stems):
        return "midlayer.0."
    if ("layers", "0") in stems and ("midlayer", None) not in stems:
        return "layers.0."
    return "midlayer."


def _canonical(found: re.Match[str] | None, inner: str, first: str) -> str | None:
    if found is None:
        return MODEL_NAMES.get(inner)
    name = LAYER_NAMES.get(inner)
    index = 0 if found[0] == first else int(found[2] or 0)
    if name is None or layer_prefix(first, index) != found[0]:
        return None
    return f"layers.{index}.{name}"


def _fc_norm_slot(name: str) -> int | None:
    found = FC_NORM.fullmatch(name)
    return int(found[1]) if found else FC_NORM_ALIASES.get(name)


def _twice(first: str, second: str) -> ConvertError:
    return ConvertError("WEIGHT_DUPLICATE", f"tensors {first!r} and {second!r} mean the same one")


def _unmatched(unknown: Iterable[str], plain: dict[str, str], layer: str) -> str:
    name, *others = unknown
    absent = [known for known in known_names(layer) if known not in plain]
    close = difflib.get_close_matches(name, absent or known_names(layer), n=1, cutoff=0.5)
    hint = f", closest known name that is absent: {close[0]}" if close else ""
    more = f"; also unknown: {', '.join(map(repr, others[:5]))}" if others else ""
    return f"tensor {plain[name]!r} is not one of this dialect{hint}{more}"
