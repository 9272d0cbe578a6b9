"""The sampling arguments of `eagle3 generate` and `eagle3 speculate`."""

import argparse
import contextlib
import json
from typing import Any

from eagle3_jax.config import AcceptRule, SamplingConfig
from eagle3_jax.sampling_config import RULES, accept_rule
from eagle3_jax.source_config import shorten

RULE_FLAGS = ("sampled_drafts", "block", "threshold_single", "threshold_acc")


def add_sampling_arguments(parser: argparse.ArgumentParser, *, rules: bool):
    """SGLang's names; `rules`: those of verification too."""
    group = parser.add_argument_group("sampling", "prompt i of a call has the seed S + i")
    add = group.add_argument
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (0)")
    add("--top-k", type=int, metavar="K", help="most likely tokens kept")
    add("--top-p", type=float, default=1.0, metavar="P", help="the fewest reaching this mass")
    add("--min-p", type=float, default=0.0, metavar="P", help="as a fraction of the likeliest")
    add("--repetition-penalty", type=float, default=1.0, metavar="X", help="on new tokens (1)")
    add("--presence-penalty", type=float, default=0.0, metavar="X")
    add("--frequency-penalty", type=float, default=0.0, metavar="X")
    add("--logit-bias", type=_bias, metavar="JSON", help='such as {"7": -100}')
    add("--seed", type=int, default=0, metavar="S", help="(0)")
    if not rules:
        parser.set_defaults(rule=None, **dict.fromkeys(RULE_FLAGS))
        return
    names = [name for name in RULES if name != "greedy"]
    add("--rule", choices=names, help="who accepts a drafted token at a temperature (target_only)")
    add("--sampled-drafts", action="store_true", help="rejection: draw a chain's drafts from q")
    add("--block", action="store_true", help="rejection: verify drawn drafts jointly")
    add("--threshold-single", type=float, metavar="X", help="target_only: SGLang's; 1 is lossless")
    add("--threshold-acc", type=float, metavar="X", help="target_only: SGLang's; 1 is lossless")


def sampling_of(args: argparse.Namespace) -> tuple[SamplingConfig | None, AcceptRule | None]:
    """What the arguments ask for; None, None for plain greedy decoding.

    Raises:
      ConfigError: values that SGLang would refuse, or options that do not go together.
    """
    config = SamplingConfig(
        args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        logit_bias=args.logit_bias or (),
        seed=args.seed,
    )
    given: dict[str, Any] = {name: getattr(args, name) for name in RULE_FLAGS}
    given = {name: value for name, value in given.items() if value not in (None, False)}
    rule = None
    if args.rule is not None or given:
        drawn = "sampled_drafts" in given or "block" in given
        rule = AcceptRule(args.rule or ("rejection" if drawn else "target_only"), **given)
    topk = getattr(args, "topk", 1)
    accept_rule(rule, config, topk)
    plain = config.greedy and not config.penalises and not config.logit_bias
    return (None, None) if plain else (config, rule)


def _bias(text: str) -> tuple[tuple[str, Any], ...]:
    """The pairs of a JSON object as written, which `SamplingConfig` checks one by one."""
    found = None
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(text, object_pairs_hook=tuple)
    if not isinstance(found, tuple):
        raise argparse.ArgumentTypeError(
            f"{shorten(text)}, expected a JSON object of token ids and numbers"
        )
    return found
