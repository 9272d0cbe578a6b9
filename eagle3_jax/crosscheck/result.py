"""What a comparison found: one verdict in a sentence, its evidence, and exit status."""

import dataclasses
from typing import Any, Literal

from eagle3_jax.crosscheck.metrics import Distance

Kind = Literal[
    "equal",
    "equal up to ties",
    "target differs",
    "draft differs",
    "tree differs",
    "acceptance differs",
    "statistics differ",
    "not an acceptance problem",
    "not decidable",
]
FINE: tuple[Kind, ...] = ("equal", "equal up to ties", "not an acceptance problem")


@dataclasses.dataclass(frozen=True)
class Divergence:
    """One place where the engine and this implementation part beyond rounding.

    Attributes:
      kind: the verdict it leads to. request: its number, -1 where all requests together show it.
      round: number, None before the first or where no rounds are known. node: of the tree, or row.
      tensor: by the names of `types.DumpedRound`. position: in the text, where it is a token.
      detail: found and expected, in words. code: of the named cause, such as `KV_FULL_ACCEPT_HOLE`.
      cause: the cause in words, empty when none is known. order: what was computed first is lower.
    """

    kind: Kind
    request: int
    detail: str
    round: int | None = None
    node: int | None = None
    tensor: str | None = None
    position: int | None = None
    distance: Distance | None = None
    code: str | None = None
    cause: str = ""
    order: tuple[int, int] = (0, 0)

    def json(self) -> dict[str, Any]:
        """As a dictionary."""
        made = dataclasses.asdict(self)
        del made["order"]
        made["distance"] = None if self.distance is None else self.distance.json()
        return made


@dataclasses.dataclass(frozen=True)
class Tie:
    """A difference that rounding explains."""

    request: int
    detail: str
    gap: float
    bound: float
    round: int | None = None
    position: int | None = None


@dataclasses.dataclass(frozen=True)
class Line:
    """One request in the table of the report.

    Attributes:
      tokens: compared. equal_until: of them before the first difference beyond a tie.
      rounds: the engine's, ours on its text. accept_length: tokens per round, likewise.
      checked: what of it was compared: `tokens`, `statistics`, `states`, `rounds`.
    """

    name: str
    tokens: int
    equal_until: int
    rounds: tuple[int | None, int | None]
    accept_length: tuple[float | None, float | None]
    checked: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of `compare` or `compare_runs`.

    Attributes:
      kind: the verdict's kind. verdict: the one sentence.
      first: the divergence it speaks of, upstream of all `others`.
      ties: differences that rounding explains. lines: one a request.
      notes: what could not be compared, and what was assumed.
    """

    kind: Kind
    verdict: str
    first: Divergence | None
    others: list[Divergence]
    ties: list[Tie]
    lines: list[Line]
    notes: list[str]
    noise: dict[str, Any] | None = None
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def status(self) -> int:
        """0 when nothing is wrong, 1 when the engine differs, 2 when it cannot be told."""
        if self.kind in FINE:
            return 0
        return 2 if self.kind == "not decidable" else 1

    def json(self) -> dict[str, Any]:
        """Everything, with finite numbers only."""
        return {
            "verdict": self.verdict,
            "kind": self.kind,
            "status": self.status,
            "first": None if self.first is None else self.first.json(),
            "others": [d.json() for d in self.others],
            "ties": [dataclasses.asdict(t) for t in self.ties],
            "requests": [dataclasses.asdict(line) for line in self.lines],
            "notes": self.notes,
            "noise": self.noise,
            "settings": self.settings,
        }

    def text(self, shown: int = 12) -> str:
        """One page."""
        lines = [self.verdict, ""]
        if self.first is not None:
            lines += _evidence(self.first)
        lines.append(
            f"{'request':<34} {'tokens':>7} {'equal':>6} {'rounds':>13} {'accept':>13}  checked"
        )
        for line in self.lines[:shown]:
            rounds = "/".join("-" if r is None else str(r) for r in line.rounds)
            accept = "/".join("-" if a is None else f"{a:.2f}" for a in line.accept_length)
            name = line.name if len(line.name) <= 34 else "…" + line.name[-33:]
            lines.append(
                f"{name:<34} {line.tokens:>7} {line.equal_until:>6} {rounds:>13} {accept:>13}  "
                + ", ".join(line.checked)
            )
        if len(self.lines) > shown:
            lines.append(f"... and {len(self.lines) - shown} more (--json has all)")
        if self.others:
            lines += ["", f"also ({len(self.others)}):"]
            lines += [f"  {where(d)}: {d.detail}" for d in self.others[:5]]
        if self.ties:
            lines += ["", f"ties ({len(self.ties)}):"]
            lines += [
                f"  request {t.request}: {t.detail}; {t.gap:.3g} is within {t.bound:.3g}"
                for t in self.ties[:5]
            ]
        if self.noise is not None:
            n = self.noise
            lines += [
                "",
                f"rounding ({n['dtype']}): logits may change places within {n['logit']:.2g} (cap "
                f"{n['cap_logit']:g}), states are equal within {n['state']:.2g} relative L2 (cap "
                f"{n['cap_state']:g}); {n['how']}",
            ]
        if self.notes:
            lines += ["", *(f"note: {note}" for note in self.notes[:8])]
        return "\n".join(lines)


def where(d: Divergence) -> str:
    """Request, round, node of a divergence."""
    parts = ["all requests" if d.request < 0 else f"request {d.request}"]
    if d.round is not None:
        parts.append(f"round {d.round}")
    if d.node is not None:
        parts.append(f"node {d.node}")
    if d.position is not None:
        parts.append(f"output token {d.position}")
    return ", ".join(parts)


def sentence(kind: Kind, first: Divergence | None, why: str = "") -> str:
    """The verdict in one sentence."""
    if first is None:
        return (
            f"{kind} ({why})" if kind == "not decidable" else f"{kind}{f': {why}' if why else ''}"
        )
    head: str = kind
    if kind == "draft differs":
        head = f"draft differs at {first.tensor}"
    elif kind == "acceptance differs" and first.round is not None:
        head = f"acceptance differs at round {first.round}"
    because = f" ({first.cause})" if first.cause else ""
    return f"{head}: {where(first)}: {first.detail}{because}"


def _evidence(first: Divergence) -> list[str]:
    rows = [("where", where(first)), ("tensor", first.tensor or ""), ("found", first.detail)]
    if first.distance is not None:
        rows.append(("distance", str(first.distance)))
    if first.cause or first.code:
        code = f" [{first.code}]" if first.code else ""
        rows.append(("cause", f"{first.cause}{code}"))
    return [*(f"  {name:<9} {text}" for name, text in rows if text), ""]
