"""Two engine runs side by side, without any model: the first place where they part."""

from collections.abc import Sequence

from eagle3_jax.comparison import first_difference
from eagle3_jax.crosscheck.noise import Noise, measure
from eagle3_jax.crosscheck.pair_requests import Pair, compare_requests
from eagle3_jax.crosscheck.result import Divergence, Kind, Line, Result, Tie, sentence
from eagle3_jax.crosscheck.types import CrosscheckError, EngineRequest, EngineRun

SETTINGS = ("engine", "version", "dtype", "page_size", "tp_size", "target", "draft")


def compare_runs(run: EngineRun, other: EngineRun, *, dtype: str | None = None) -> Result:
    """An engine's run beside another of the same prompts: batch 1 against n, versions, page sizes.

    Args:
      run: the one under suspicion. other: what it should equal.
      dtype: of the engines, None for what they say, else float32.

    Raises:
      CrosscheckError: no prompt is in both.
    """
    pairs, notes = _matched(run, other)
    notes += [*run.notes, *other.notes, *_changed(run, other)]
    stated = dtype or other.settings.dtype or run.settings.dtype
    if stated is None:
        notes.append("neither says its dtype: bounds of float32")
    noise = _noise(pairs, stated or "float32")
    found: list[Divergence] = []
    ties: list[Tie] = []
    lines: list[Line] = []
    undecided: list[str] = []
    for i, (a, b) in enumerate(pairs):
        faults, tied, line, open_ = compare_requests(Pair(i, a, b, run, other, noise))
        found += faults
        ties += tied
        lines.append(line)
        undecided += open_
    found.sort(key=lambda d: (d.order, d.request))
    first = found[0] if found else None
    kind: Kind = "equal up to ties" if ties else "equal"
    why = f"{len(pairs)} requests in both"
    sampled = sum(bool(a.temperature or b.temperature) for a, b in pairs)
    if sampled:
        kind, first = "not decidable", None
        why = f"{sampled} requests were sampled at a temperature: no text is expected"
    elif not any(line.checked for line in lines):
        kind, why = "not decidable", "nothing in them has the same name: nothing was compared"
    elif first is not None:
        kind = first.kind
    elif undecided:
        kind, why = "not decidable", undecided[0]
    return Result(
        kind=kind,
        verdict=sentence(kind, first, why),
        first=first,
        others=found[1:] if first is not None else found,
        ties=ties,
        lines=lines,
        notes=list(dict.fromkeys([*notes, *undecided])),
        noise=noise.json(),
        settings={name: [getattr(r.settings, name) for r in (run, other)] for name in SETTINGS},
    )


def _matched(
    run: EngineRun, other: EngineRun
) -> tuple[list[tuple[EngineRequest, EngineRequest]], list[str]]:
    left = list(other.requests)
    pairs, missing = [], 0
    for request in run.requests:
        own = next((r for r in left if r.prompt == request.prompt), None)
        if own is None:
            missing += 1
            continue
        left.remove(own)
        pairs.append((request, own))
    if not pairs:
        raise CrosscheckError(f"{run.source} and {other.source} have no prompt in common")
    notes = [f"{missing} requests of {run.source} are not in the other"] if missing else []
    if left:
        notes.append(f"{len(left)} requests of {other.source} are not in the other")
    return pairs, notes


def _changed(run: EngineRun, other: EngineRun) -> list[str]:
    found = []
    for name in (*SETTINGS, "tree"):
        a, b = getattr(run.settings, name), getattr(other.settings, name)
        if a != b and a is not None and b is not None:
            found.append(f"{name}: {a} beside {b}")
    return found


def _noise(pairs: Sequence[tuple[EngineRequest, EngineRequest]], dtype: str) -> Noise:
    """From logprobs where both wrote the same tokens after the same text."""
    off = []
    for a, b in pairs:
        at = first_difference(a.output, b.output)
        upto = len(a.output) if at is None else at
        if a.output_logprobs is not None and b.output_logprobs is not None and upto:
            off.append(a.output_logprobs[:upto] - b.output_logprobs[:upto])
    return measure(dtype, off, how="logprobs of both at tokens they agree on" if off else "")
