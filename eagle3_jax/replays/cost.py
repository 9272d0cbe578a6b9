"""What a tree costs and whether it pays: break-even, and the best of those replayed."""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from eagle3_jax.config import ConfigError, TreeConfig
from eagle3_jax.replays.result import TreeReplay

KEYS = ("decode", "draft", "extend", "verify")


@dataclasses.dataclass(frozen=True)
class Cost:
    """Times of one machine, all in the same unit.

    Attributes:
      decode: one plain decoding step. draft: one draft forward (topk rows).
      extend: the draft pass over accepted tokens; None for as much as `draft`.
      verify: by nodes, a target pass over so many tokens; between two the line is straight.
    """

    decode: float
    draft: float
    verify: Mapping[int, float]
    extend: float | None = None

    def __post_init__(self):
        values = {"decode": self.decode, "draft": self.draft, "extend": self.extend}
        values |= {f"verify of {n}": t for n, t in self.verify.items()}
        for name, value in values.items():
            if value is not None and not (value > 0 and value < float("inf")):
                raise ConfigError(f"cost: {name} is {value}, expected a time above 0")
        if not self.verify or min(self.verify) < 1:
            raise ConfigError("cost: verify needs times by number of nodes, such as verify=8:11.5")

    def round(self, tree: TreeConfig) -> float:
        """One round: num_steps - 1 draft forwards, the verification, the extend.

        Raises:
          ConfigError: more nodes than the largest measured verification.
        """
        extend = self.draft if self.extend is None else self.extend
        return (tree.num_steps - 1) * self.draft + self.verify_of(tree.num_draft_tokens) + extend

    def verify_of(self, nodes: int) -> float:
        """The verification of `nodes` tokens; one of 1 is a decoding step."""
        points = sorted({1: self.decode, **self.verify}.items())
        if nodes > points[-1][0]:
            raise ConfigError(
                f"cost: the largest verify time is for {points[-1][0]} nodes, the tree has {nodes}"
            )
        for (a, low), (b, high) in itertools.pairwise(points):
            if nodes <= b:
                return low + (high - low) * (nodes - a) / (b - a)
        return points[0][1]

    def break_even(self, tree: TreeConfig) -> float:
        """The accept length at which a round costs what it saves."""
        return self.round(tree) / self.decode


def read_cost(text: str) -> Cost:
    """`decode=10,draft=0.8,verify=4:11,verify=32:14[,extend=1]`, or a JSON file of the same keys.

    In a file `verify` is an object from nodes to times.

    Raises:
      ConfigError: neither a file nor such a list; unknown, missing or repeated keys; no numbers.
    """
    path = Path(text)
    if "=" not in text:
        if not path.is_file():
            raise ConfigError(f"cost {text}: no such file, expected one or decode=,draft=,verify=")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{path}: not JSON: {error}") from None
        if not isinstance(raw, dict):
            raise ConfigError(f"{path}: expected an object with {', '.join(KEYS)}")
        return _cost(raw, str(path))
    raw: dict = {}
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        if key == "verify":
            nodes, colon, time = value.partition(":")
            if not colon:
                raise ConfigError(f"cost: verify is {value!r}, expected NODES:TIME")
            raw.setdefault("verify", {})[nodes] = time
        elif key in raw:
            raise ConfigError(f"cost: {key} is given twice")
        else:
            raw[key] = value
    return _cost(raw, "cost")


def _cost(raw: dict, where: str) -> Cost:
    unknown = sorted(raw.keys() - set(KEYS))
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}, expected {', '.join(KEYS)}")
    missing = [key for key in ("decode", "draft", "verify") if key not in raw]
    if missing:
        raise ConfigError(f"{where}: {missing[0]} is missing, expected decode, draft and verify")
    verify = raw["verify"]
    if not isinstance(verify, dict):
        raise ConfigError(f"{where}: verify is {verify!r}, expected an object from nodes to times")
    try:
        times = {int(n): float(t) for n, t in verify.items()}
        extend = None if raw.get("extend") is None else float(raw["extend"])
        return Cost(float(raw["decode"]), float(raw["draft"]), times, extend)
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where}: expected numbers: {error}") from None


@dataclasses.dataclass(frozen=True)
class Priced:
    """A tree, what it accepts, what it costs."""

    tree: TreeConfig
    accept_length: float
    break_even: float

    @property
    def speedup(self) -> float:
        """Against plain decoding."""
        return self.accept_length / self.break_even

    @property
    def flags(self) -> str:
        """As SGLang's server takes them."""
        t = self.tree
        return (
            f"--speculative-num-steps {t.num_steps} --speculative-eagle-topk {t.topk} "
            f"--speculative-num-draft-tokens {t.num_draft_tokens}"
        )


def priced(trees: Sequence[TreeReplay], cost: Cost) -> list[Priced]:
    """Trees with rounds, the fastest first; of equals the one with fewer nodes."""
    found = [
        Priced(t.tree, t.accept_length, cost.break_even(t.tree))
        for t in trees
        if t.accept_length is not None
    ]
    return sorted(found, key=lambda p: (-p.speedup, p.tree.num_draft_tokens))


def sweep(draft_vocab_size: int) -> list[TreeConfig]:
    """Chains of 1 to 8 levels, and trees of topk 2, 4, 8 with the node counts servers use."""
    trees = [TreeConfig(steps) for steps in range(1, 9)]
    for topk in (2, 4, 8):
        for steps in (2, 3, 4, 5, 6, 8):
            most = topk + (steps - 1) * topk * topk + 1
            sizes = [n for n in (4, 8, 16, 32, 64) if steps < n <= most]
            trees += [TreeConfig(steps, topk, n) for n in sizes if topk <= draft_vocab_size]
    return trees
