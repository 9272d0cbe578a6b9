"""How tokens are sampled and which rule accepts drafted ones: frozen values, checked when built."""

import contextlib
import copy
import dataclasses
import math
import numbers
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from eagle3_jax.attention_config import ConfigError
from eagle3_jax.source_config import shorten

RuleName = Literal["greedy", "target_only", "rejection"]
LEAST_TEMPERATURE = 1e-6
"""Below it SGLang takes the most likely token (`sampling_params._SAMPLING_EPS`)."""
MOST_BIAS = 1e30
"""More, over a small temperature, would overflow float32."""
RULES: tuple[RuleName, ...] = ("greedy", "target_only", "rejection")


@dataclasses.dataclass(frozen=True, init=False)
class SamplingConfig:
    """SGLang's sampling parameters, applied to every token as if decoded one by one.

    The order is SGLang's: presence and frequency penalty, repetition penalty, logit bias,
    temperature, softmax, top-k, top-p, min-p, each of the last three renormalised
    (`sampling_batch_info._apply_*_logits_transforms`, `eagle_utils.eagle_sample`). All penalties
    count new tokens only, as SGLang's do; vLLM's repetition penalty counts the prompt too, its bias
    comes before the penalties and its min-p before top-k.

    Attributes:
      temperature: 0 is greedy, on the penalised and biased logits, and so is all below 1e-6.
      top_k: most likely tokens kept, None for all; of equal ones the lower ids.
      top_p: the fewest most likely tokens whose probabilities reach this much.
      min_p: tokens at least this fraction as likely as the most likely one.
      repetition_penalty: divides a repeated token's logit above 0, multiplies it below.
      presence_penalty, frequency_penalty: subtracted once, and once per occurrence.
      logit_bias: (token id, added) pairs, sorted; given as a mapping.
      seed: one for all prompts or one a prompt. What a prompt gets depends on its own seed, never
        on its batch neighbours: two equal prompts with one seed get one text.

    Raises:
      ConfigError: a value outside the range SGLang's `SamplingParams.verify` allows.
    """

    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    seed: int | tuple[int, ...]

    def __init__(
        self,
        temperature: float = 1.0,
        *,
        top_k: int | None = None,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = (),
        seed: int | Sequence[int] = 0,
    ):
        def put(name: str, value: Any):
            object.__setattr__(self, name, value)

        put("temperature", _number("temperature", temperature, 0.0, math.inf))
        whole = isinstance(top_k, numbers.Integral) and top_k == -1  # SGLang's word for all
        put("top_k", None if top_k is None or whole else _whole("top_k", top_k, 1))
        put("top_p", _number("top_p", top_p, 0.0, 1.0, above=True))
        put("min_p", _number("min_p", min_p, 0.0, 1.0))
        put(
            "repetition_penalty",
            _number("repetition_penalty", repetition_penalty, 0, 2, above=True),
        )
        put("presence_penalty", _number("presence_penalty", presence_penalty, -2, 2))
        put("frequency_penalty", _number("frequency_penalty", frequency_penalty, -2, 2))
        put("logit_bias", _bias(logit_bias))
        put("seed", _seeds(seed))

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < LEAST_TEMPERATURE

    @property
    def penalises(self) -> bool:
        """Whether what was generated before changes the logits."""
        changed = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return changed != (1.0, 0.0, 0.0)

    def with_seed(self, seed: int | Sequence[int]) -> "SamplingConfig":
        """The same with another seed."""
        other = copy.copy(self)
        object.__setattr__(other, "seed", _seeds(seed))
        return other

    def json(self) -> dict[str, Any]:
        """The fields as JSON has them, under SGLang's names."""
        seed = self.seed if isinstance(self.seed, int) else list(self.seed)
        bias = {str(i): b for i, b in self.logit_bias}
        return dataclasses.asdict(self) | {"logit_bias": bias, "seed": seed}


@dataclasses.dataclass(frozen=True)
class AcceptRule:
    """Which drafted tokens a round accepts.

    - `greedy`: those equal to the target's argmax (temperature 0).
    - `target_only`: SGLang's `tree_speculative_sampling_target_only`: one coin a node against the
      sum of its children's target probabilities. Lossless with both thresholds at 1.
    - `rejection`: lossless speculative sampling. For top-k drafts, which are no random draws, a
      proposal is certain and a rejected child leaves the target's distribution (SafeAILab/EAGLE
      `evaluate_posterior`); with `sampled_drafts` a chain draws each token from the draft's q and
      accepts with min(1, p/q) (Leviathan et al. 2023, algorithm 1; SGLang
      `chain_speculative_sampling_triton`), with `block` jointly (Sun et al. 2024, algorithm 2).

    Attributes:
      threshold_single, threshold_acc: SGLang's `--speculative-accept-threshold-single` and `-acc`,
        for `target_only`: a token at least the first likely is accepted; the sum is divided by the
        second. Below 1 the text no longer follows the target.

    Raises:
      ConfigError: an unknown name, an option of another rule, a threshold outside [0, 1].
    """

    name: RuleName = "target_only"
    sampled_drafts: bool = False
    block: bool = False
    threshold_single: float = 1.0
    threshold_acc: float = 1.0

    def __post_init__(self):
        if self.name not in RULES:
            raise ConfigError(f"rule is {shorten(self.name)}, expected one of {', '.join(RULES)}")
        for name in ("threshold_single", "threshold_acc"):
            value = _number(name, getattr(self, name), 0.0, 1.0)
            object.__setattr__(self, name, value)
            if value != 1.0 and self.name != "target_only":
                raise ConfigError(f"{name} belongs to the rule target_only, not to {self.name}")
        if self.sampled_drafts and self.name != "rejection":
            raise ConfigError(f"sampled_drafts belongs to the rule rejection, not to {self.name}")
        if self.block and not self.sampled_drafts:
            raise ConfigError("block verification needs sampled_drafts=True")

    @property
    def lossless(self) -> bool:
        """Whether the emitted text follows the target's own distribution exactly."""
        return self.threshold_single == 1.0 and self.threshold_acc == 1.0

    def json(self) -> dict[str, Any]:
        """What a trace says of it."""
        return dataclasses.asdict(self) | {"lossless": self.lossless}


def accept_rule(
    rule: str | AcceptRule | None, sampling: SamplingConfig | None, topk: int
) -> AcceptRule:
    """The rule a call runs: `greedy` at temperature 0, else the one asked for or `target_only`.

    Raises:
      ConfigError: a rule that does not go with the temperature, or sampled drafts in a tree.
    """
    if isinstance(rule, str):
        rule = AcceptRule(rule)  # type: ignore[arg-type]
    if rule is not None and not isinstance(rule, AcceptRule):
        raise ConfigError(f"rule is {shorten(rule)}, expected a name or an AcceptRule")
    if sampling is None or sampling.greedy:
        if rule is not None and rule.name != "greedy":
            raise ConfigError(
                f"rule {rule.name} samples, expected sampling=SamplingConfig(temperature > 0)"
            )
        return GREEDY
    if rule is None:
        return AcceptRule("target_only")
    if rule.name == "greedy":
        raise ConfigError(
            f"rule greedy at temperature {sampling.temperature:g}, expected one that samples"
        )
    if rule.sampled_drafts and topk > 1:
        raise ConfigError(f"sampled_drafts needs a chain, found topk={topk}")
    return rule


def _number(name: str, value: Any, low: float, high: float, *, above: bool = False) -> float:
    bounds = f"{'(' if above else '['}{low:g}, {high:g}{')' if high == math.inf else ']'}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ConfigError(f"{name} is {shorten(value)}, expected a number in {bounds}")
    try:
        number = float(value)
    except OverflowError:
        raise ConfigError(
            f"{name} is too large for a float, expected a number in {bounds}"
        ) from None
    if not math.isfinite(number) or number < low or number > high or (above and number == low):
        raise ConfigError(f"{name} is {shorten(value)}, expected a number in {bounds}")
    return number


def _whole(name: str, value: Any, low: int) -> int:
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < low:
        raise ConfigError(f"{name} is {shorten(value)}, expected a whole number of at least {low}")
    return number


def _bias(given: Any) -> tuple[tuple[int, float], ...]:
    try:
        pairs = list(given.items() if isinstance(given, Mapping) else given)
        pairs = [(_token(token), value) for token, value in pairs]
    except (TypeError, ValueError):
        raise ConfigError(
            f"logit_bias is {shorten(given)}, expected {{token id: number}}"
        ) from None
    found: dict[int, float] = {}
    for key, value in pairs:
        token = _whole("logit_bias: a token id", key, 0)
        if token >= 2**31:
            raise ConfigError(f"logit_bias: a token id is {shorten(token)}, which is no 32-bit id")
        if token in found:
            raise ConfigError(f"logit_bias has token {shorten(token)} twice")
        found[token] = _number(
            f"logit_bias of token {shorten(token)}", value, -MOST_BIAS, MOST_BIAS
        )
    return tuple(sorted(found.items()))


def _token(given: Any) -> Any:
    """A JSON key as the number it spells; `"1_0"` and `"01"` spell none and stay texts."""
    number = None
    if isinstance(given, str):
        with contextlib.suppress(ValueError):
            number = int(given)
    return number if number is not None and str(number) == given else given


def _seeds(given: Any) -> int | tuple[int, ...]:
    many = isinstance(given, Sequence) and not isinstance(given, str)
    if getattr(given, "ndim", 0) == 1:
        given, many = list(given), True
    seeds = tuple(_whole("seed", s, 0) for s in (given if many else [given]))
    wrong = next((s for s in seeds if s >= 2**32), None)
    if wrong is not None:
        raise ConfigError(f"seed is {shorten(wrong)}, expected at most {2**32 - 1}")
    return seeds if many else seeds[0]


GREEDY = AcceptRule("greedy")
