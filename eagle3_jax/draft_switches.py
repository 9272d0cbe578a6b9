"""The switches of a draft's forward pass: from its tensors, its config, its dialect, or a flag."""

import dataclasses
from typing import Literal

from eagle3_jax.dialects import Dialect, Matched
from eagle3_jax.draft_layers import NextNorm
from eagle3_jax.findings import ConvertError, Findings
from eagle3_jax.source_config import Field, SourceConfig

QKV = ("q", "k", "v")
MLP = ("gate", "up", "down")
MODELOPT_KEYS = ("use_last_layernorm", "use_mtp_layernorm", "parallel_draft_step")

NORM_OUTPUT_MEANINGS = (
    "norm_output is true: in SpecForge of 2026-07 it means 'a norm before the head, the un-normed "
    "state fed back' (--feedback pre_norm); in SpecForge since 2026-09 (#879), SGLang and "
    "EAGLE-3.1 'the normed state fed back' (--feedback post_norm)"
)


@dataclasses.dataclass(frozen=True)
class Flags:
    """The user's word on what no tensor shows; None: not given."""

    norm_before_residual: bool | None = None
    feedback: Literal["pre_norm", "post_norm"] | None = None
    final_norm: bool | None = None
    double_norm: bool | None = None
    embed: Literal["auto", "draft", "target"] = "auto"
    next_norm: NextNorm | None = None


@dataclasses.dataclass(frozen=True)
class Switches:
    """`DraftConfig`'s switches and where each comes from; `dropped`: tensors a flag leaves out."""

    fields: dict[str, bool | str]
    origins: dict[str, str]
    dropped: dict[str, str]


class _Reader:
    def __init__(
        self, matched: Matched, config: SourceConfig, dialect: Dialect, findings: Findings
    ):
        self.matched, self.config = matched, config
        self.dialect, self.findings = dialect, findings
        self.fields: dict[str, bool | str] = {}
        self.origins: dict[str, str] = {}
        self.dropped: dict[str, str] = {}

    def has(self, name: str) -> bool:
        return name in self.matched.sources

    def tensor(self, name: str) -> str:
        return f"tensor {self.matched.spelled(name)}"

    def put(self, name: str, value: bool | str, origin: str):
        self.fields[name] = value
        self.origins[name] = origin


def read_switches(
    matched: Matched, config: SourceConfig, dialect: Dialect, flags: Flags, findings: Findings
) -> Switches:
    """Every switch of `DraftConfig`, none guessed.

    Raises:
      ConvertError: NORM_BEFORE_RESIDUAL, NORM_OUTPUT_AMBIGUOUS or NORM_DOUBLE when only the user
        can know; NORM_BEFORE_FC, NORM_FC or BIAS_DISAGREES when config and tensors conflict;
        WEIGHT_MISSING.
    """
    reader = _Reader(matched, config, dialect, findings)
    _residual(reader, flags)
    _double(reader, flags)
    _state_norms(reader)
    _feedback(reader, flags)
    _final_norm(reader, flags)
    _attention_norms(reader)
    _biases(reader)
    _embed(reader, flags)
    return Switches(reader.fields, reader.origins, reader.dropped)


def _residual(reader: _Reader, flags: Flags):
    field = reader.config.anywhere("norm_before_residual")
    stated = reader.config.flag(field)
    if flags.norm_before_residual is not None:
        reader.put(
            "norm_before_residual", flags.norm_before_residual, "flag --norm-before-residual"
        )
    elif field is not None and stated is not None:
        reader.put("norm_before_residual", stated, field.origin)
    elif reader.dialect.norm_before_residual is not None:
        value = reader.dialect.norm_before_residual
        reader.put("norm_before_residual", value, f"default:{reader.dialect.name}")
    else:
        raise ConvertError(
            "NORM_BEFORE_RESIDUAL",
            f"{reader.config.where}: no norm_before_residual, and no tensor shows it: speculators' "
            "trainer defaults to true, its config class to false: give --norm-before-residual",
        )


def _double(reader: _Reader, flags: Flags):
    if flags.double_norm is not None:
        reader.put("double_norm", flags.double_norm, "flag --double-norm")
    elif reader.dialect.double_norm is None:
        raise ConvertError(
            "NORM_DOUBLE",
            f"a ModelOpt draft ({reader.matched.layer}*, eagle_config, no t2d): ModelOpt >= 0.41 "
            "trains hidden_norm(input_layernorm(state)), every server runs hidden_norm(state), and "
            "no tensor shows which fits: --double-norm true runs it as trained, false as served "
            "(Megatron-trained drafts and ModelOpt <= 0.40: false)",
        )
    else:
        reader.put("double_norm", reader.dialect.double_norm, f"default:{reader.dialect.name}")
        if any(key in reader.config.eagle for key in MODELOPT_KEYS):
            reader.findings.warn(
                "NORM_DOUBLE",
                "eagle_config looks like ModelOpt's: ModelOpt 0.41 and 0.42 trained such drafts "
                "with hidden_norm(input_layernorm(state)); --double-norm true runs that",
            )


def _attention_norms(reader: _Reader):
    """`hidden_norm` of the first layer, and q/k norms: the tensors show them."""
    name = "layers.0.norm_hidden.weight"
    present = reader.has(name)
    reader.put("hidden_norm", present, reader.tensor(name) + ("" if present else " absent"))
    norms = ["layers.0.attn.q_norm.weight", "layers.0.attn.k_norm.weight"]
    found = [name for name in norms if reader.has(name)]
    if len(found) == 1:
        lost = next(name for name in norms if name not in found)
        raise ConvertError(
            "WEIGHT_MISSING",
            f"missing: {reader.matched.spelled(lost)}, though {reader.matched.spelled(found[0])} "
            "is there",
        )
    reader.put("qk_norm", bool(found), reader.tensor(norms[0]) + ("" if found else " absent"))


def _state_norms(reader: _Reader):
    places = (
        ("norm_before_fc", "input_norm.weight", ("norm_before_fc",), "NORM_BEFORE_FC"),
        ("fc_norm", "fc_norm.weight", ("fc_norm", "use_aux_norm"), "NORM_FC"),
    )
    for switch, tensor, keys, code in places:
        present = reader.has(tensor)
        fields = [f for key in keys if (f := reader.config.anywhere(key))]
        stated = [reader.config.flag(field) for field in fields]
        if len(set(stated)) > 1 or (stated and stated[0] != present):
            said = " and ".join(f"{f.key} is {str(f.value).lower()}" for f in fields)
            holds = "holds" if present else "has no"
            raise ConvertError(
                code,
                f"{reader.config.where}: {said}, but the file {holds} "
                f"{reader.matched.spelled(tensor)}",
            )
        if present and not fields:
            reader.findings.warn(
                code,
                f"{reader.matched.spelled(tensor)} is in the file and no config key says so: used; "
                "an engine that reads the key would leave it out",
            )
        origin = (
            reader.tensor(tensor) if present else f"tensor {reader.matched.spelled(tensor)} absent"
        )
        reader.put(switch, present, f"{fields[0].origin}, {origin}" if fields else origin)
    if reader.fields["norm_before_fc"] and reader.fields["fc_norm"]:
        raise ConvertError(
            "NORM_FC", "the file holds input_norm and fc_norm: they exclude each other"
        )


def _feedback(reader: _Reader, flags: Flags):
    field = reader.config.anywhere("norm_output")
    stated = reader.config.flag(field)
    trt = reader.config.anywhere("return_hidden_post_norm")
    if flags.feedback is not None:
        reader.put("feedback", flags.feedback, "flag --feedback")
    elif trt is not None and reader.config.flag(trt):
        reader.put("feedback", "post_norm", trt.origin)
    elif field is None or stated is None:
        reader.put("feedback", "pre_norm", f"default:{reader.dialect.name}")
    elif reader.dialect.norm_output_clear:
        reader.put("feedback", "post_norm" if stated else "pre_norm", field.origin)
    elif stated:
        raise ConvertError(
            "NORM_OUTPUT_AMBIGUOUS", f"{reader.config.where}: {NORM_OUTPUT_MEANINGS}"
        )
    else:
        reader.put("feedback", "pre_norm", field.origin)
        if flags.final_norm is None:
            reader.findings.warn(
                "NORM_OUTPUT_AMBIGUOUS",
                "norm_output is false: pre-norm feedback, the final norm used if it is in the "
                "file; SpecForge of 2026-07 meant no final norm at all (--final-norm false)",
            )


def _final_norm(reader: _Reader, flags: Flags):
    name = "norm_final.weight"
    spelled = reader.matched.spelled(name)
    off: Field | None = reader.config.anywhere("norm_output")
    if flags.final_norm is not None:
        reader.put("final_norm", flags.final_norm, "flag --final-norm")
        if flags.final_norm and not reader.has(name):
            raise ConvertError("WEIGHT_MISSING", f"missing: {spelled} (--final-norm true)")
        if not flags.final_norm and reader.has(name):
            reader.dropped[name] = "flag --final-norm false"
    elif reader.has(name):
        reader.put("final_norm", True, reader.tensor(name))
    elif off is not None and off.value is False:
        reader.put("final_norm", False, f"{off.origin}, tensor {spelled} absent")
    else:
        raise ConvertError(
            "WEIGHT_MISSING", f"missing: {spelled}; --final-norm false if the draft has none"
        )
    if reader.fields["feedback"] == "post_norm" and not reader.fields["final_norm"]:
        raise ConvertError(
            "NORM_OUTPUT_AMBIGUOUS", "post-norm feedback needs the final norm: see --feedback"
        )


def _biases(reader: _Reader):
    groups = {
        "qkv_bias": [f"layers.0.attn.{name}.bias" for name in QKV],
        "output_bias": ["layers.0.attn.o.bias"],
        "mlp_bias": [f"layers.0.mlp.{name}.bias" for name in MLP],
        "fc_bias": ["fc.bias"],
    }
    for switch, names in groups.items():
        present = [name for name in names if reader.has(name)]
        if present and present != names:
            lost = next(name for name in names if name not in present)
            raise ConvertError(
                "WEIGHT_MISSING",
                f"missing: {reader.matched.spelled(lost)}, though "
                f"{reader.matched.spelled(present[0])} is there",
            )
        origin = reader.tensor(names[0]) + ("" if present else " absent")
        reader.put(switch, bool(present), origin)
    keys = {
        "attention_bias": ("qkv_bias", "output_bias"),
        "mlp_bias": ("mlp_bias",),
        "bias": ("fc_bias", "qkv_bias", "output_bias"),
    }
    unstated = {switch for switch in groups if reader.fields[switch]}
    for key, switches in keys.items():
        field = reader.config.layer(key) or reader.config.top(key)
        if field is None or not reader.config.flag(field):
            continue
        if not any(reader.fields[switch] for switch in switches):
            wanted = " or ".join(
                reader.matched.spelled(name) for s in switches for name in groups[s][:1]
            )
            raise ConvertError(
                "BIAS_DISAGREES",
                f"{reader.config.where}: {field.key} is true, but the file has no {wanted}",
            )
        unstated -= set(switches)
    for switch in sorted(unstated):
        reader.findings.note(
            "BIAS_UNSTATED",
            f"{reader.matched.spelled(groups[switch][0])} is in the file though no config key says "
            "so: used",
        )


def _embed(reader: _Reader, flags: Flags):
    name = "embed.weight"
    if flags.embed == "draft" and not reader.has(name):
        raise ConvertError(
            "WEIGHT_OWNER",
            f"--embed draft: the file has no {reader.matched.spelled(name)}",
        )
    own = reader.has(name) and flags.embed != "target"
    if flags.embed != "auto":
        origin = "flag --embed"
    else:
        absent = f"target: no {reader.matched.spelled(name)} in the file"
        origin = reader.tensor(name) if own else absent
    if reader.has(name) and not own:
        reader.dropped[name] = "flag --embed target"
    reader.put("embed", "draft" if own else "target", origin)
