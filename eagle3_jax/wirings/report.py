"""A diagnosis in words: the sentence, the evidence, what to change, what is still open."""

import dataclasses
from typing import Any

from eagle3_jax.doctor import Diagnosis
from eagle3_jax.wirings import patch
from eagle3_jax.wirings.engine import POLICIES
from eagle3_jax.wirings.judge import Candidate
from eagle3_jax.wirings.wiring import Wiring, joint_shift, show_boundaries

UNOBSERVABLE = (
    "a constant offset of all positions: rotary embedding is relative",
    "a scale on the embedding: norm_embed removes it",
)
CAPTURE = "eagle3 record make --target T --prompts P --max-new-tokens 256 --all-boundaries --out R"
SERVER = "eagle3 record from-sglang --url URL --prompts P --target T --boundaries {} --out R"


def sentence(d: Diagnosis, ids: tuple[int, ...] | None = None) -> str:
    """The verdict in one sentence; `ids` are the checkpoint's own layer ids."""
    length, best = d.configured.accept_length, d.best.accept_length
    where = f"accept length {length:.2f} on {d.rounds} rounds of {d.tree.num_steps} drafts"
    where += _tree_words(d) if d.best is d.configured else ""
    if d.stated is not None:
        return _unrecorded(d, d.stated)
    if d.verdict == "vocab_differs":
        assert d.learned is not None
        return (
            "The vocabulary map is not this head's: the draft's rows follow the text "
            f"({d.learned.right:.0%} of {d.learned.places} places foretold by what follows each "
            f"row elsewhere), and d2t is right at {d.learned.given:.0%}: give the right map with "
            "--map, or convert the draft with it."
        )
    if d.verdict == "wiring_differs":
        text = f"The wiring differs from the config: {d.best.words}; accept length {length:.2f} "
        text += f"-> {best:.2f} on the same {d.rounds} rounds"
        return f"{text}{_tree_words(d)}{_engine_words(d)}{_reading(d, ids)}."
    if d.verdict == "no_wiring_fits":
        return (
            f"No wiring fits: {where} is what the draft reaches with the states of other tokens "
            f"({d.shuffled.accept_length:.2f}); another target, another training, or states in "
            "another space (a rotated target: --rotation)."
        )
    if d.verdict == "engine_differs":
        first = next(a for a in d.agreements if a.name == "refresh").first
        assert first is not None
        why = "nothing tried here explains its rounds"
        if d.explained is not None:
            why = f"its rounds are those of: {POLICIES.get(d.explained, d.explained)}"
        return (
            f"The wiring is right, the engine differs at round {first[1]} of sequence {first[0]}: "
            f"replay gives {where}; {why}."
        )
    if d.verdict == "not_matched":
        return (
            f"The wiring is as configured and the best of {d.tried}, but the draft does not match "
            f"this target: {where}."
        )
    if d.verdict == "not_acceptance":
        return (
            f"Not an acceptance problem: the engine's {d.rounds} rounds are the replay's, {where}"
            f"{_reading(d, ids)}."
        )
    if d.verdict == "undecided":
        rival = max(d.table, key=lambda c: c.z)
        if rival.z < d.needed:
            return (
                f"Not decided: {where} is too little text to tell it from the states of other "
                f"tokens ({d.shuffled.accept_length:.2f}): record more text."
            )
        return (
            f"Not decided: no wiring of {d.tried} accepts clearly more ({where}), but the record's "
            f"tokens are likelier under {rival.words} ({rival.z:.1f} standard errors): record more "
            "text."
        )
    return f"As configured is best of {d.tried} wirings: {where}{_reading(d, ids)}."


def _unrecorded(d: Diagnosis, stated: Wiring) -> str:
    have, best = d.best.wiring.boundaries, d.best.accept_length
    text = (
        f"The record lacks the configured boundaries {show_boundaries(stated.boundaries)}; with "
        f"{show_boundaries(have)} the draft reaches accept length {best:.2f} on {d.rounds} rounds "
        f"(states of other tokens: {d.shuffled.accept_length:.2f})"
    )
    if d.verdict == "wiring_differs":
        return f"{text}, and the engine's rounds are those: it served other boundaries than stated."
    return f"{text}: whether the configured ones give more is not decided, capture them all."


def _tree_words(d: Diagnosis) -> str:
    u = d.under_tree
    if u is None:
        return ""
    if d.best.wiring == d.configured.wiring:
        return f", under the tree {u.tree} {u.best:.2f}"
    clear = "" if u.gain.low > 0 else ", within the noise"
    return (
        f", under the tree {u.tree} {u.configured:.2f} -> {u.best:.2f} (gain {u.gain.mean:+.2f} "
        f"[{u.gain.low:+.2f}, {u.gain.high:+.2f}]{clear})"
    )


def _engine_words(d: Diagnosis) -> str:
    if not d.agreements:
        return ""
    if d.explained == "refresh":
        return ", and the engine's rounds are those of this wiring"
    if d.explained is not None:
        words = POLICIES.get(d.explained, d.explained)
        return f"; the engine's rounds are those of: {words}"
    return ""


def _reading(d: Diagnosis, ids: tuple[int, ...] | None) -> str:
    if ids is None:
        return ""
    step = joint_shift(ids, d.best.wiring.boundaries)
    if step == 0:
        return f"; its layer ids {list(ids)} are boundaries (vLLM's reading)"
    if step == 1:
        return f"; its layer ids {list(ids)} are block outputs, boundaries minus 1 (SGLang's)"
    return ""


def as_json(d: Diagnosis, ids: tuple[int, ...] | None = None) -> dict[str, Any]:
    """Everything, for machines."""
    return {
        "verdict": d.verdict,
        "sentence": sentence(d, ids),
        "configured": _candidate(d.configured),
        "best": _candidate(d.best),
        "table": [_candidate(c) for c in d.table],
        "shuffled": _candidate(d.shuffled),
        "tried": d.tried,
        "standard_errors_needed": d.needed,
        "rounds": d.rounds,
        "pinned": d.pinned,
        "num_steps": d.tree.num_steps,
        "engine": [
            {"explanation": a.name, "rounds": a.rounds, "different": a.different, "first": a.first}
            for a in d.agreements
        ],
        "explained": d.explained,
        "under_tree": None if d.under_tree is None else dataclasses.asdict(d.under_tree),
        "not_tried": d.not_tried,
        "patch": patch.patches(d.stated or d.configured.wiring, d.best.wiring, d.num_layers),
        "overridden_by": patch.overriding(d.best.wiring),
        "undecided": d.undecided,
        "stated_boundaries": None if d.stated is None else list(d.stated.boundaries),
        "learned_map": None if d.learned is None else dataclasses.asdict(d.learned),
        "not_observable": list(UNOBSERVABLE),
        "norms": d.norms,
    }


def lines(d: Diagnosis, ids: tuple[int, ...] | None = None) -> list[str]:
    """The report, line by line."""
    kind = "the engine's rounds" if d.pinned else "all places to draft from"
    found = [sentence(d, ids), ""]
    found.append(f"{d.tried} wirings on {d.rounds} of {kind}, chains of {d.tree.num_steps}:")
    found.append("  accept   gain, 99% interval    log loss better by    wiring")
    found += [_row(c, c is d.best or c.wiring == d.best.wiring) for c in d.table]
    found.append(f"  {d.shuffled.accept_length:6.2f}{'':45s}states of other tokens (chance)")
    found.append(f"  a winner needs {d.needed:.1f} standard errors and an interval above 0")
    if d.agreements:
        found += ["", "The engine's rounds beside:"]
        for a in d.agreements[:4]:
            at = "" if a.first is None else f", first: sequence {a.first[0]} round {a.first[1]}"
            name = POLICIES.get(a.name, a.name)
            found.append(f"  {a.different:5d} of {a.rounds} differ{at}: {name}")
    if d.verdict == "vocab_differs" and d.learned is not None:
        rows = list(d.learned.rows.items())[:6]
        shown = ", ".join(f"row {row}: id {token}" for row, token in rows)
        found += ["", f"Rows as the text shows them: {shown}, ..."]
    lines = patch.patches(d.stated or d.configured.wiring, d.best.wiring, d.num_layers)
    changes = [f"  {name}: {patch.show(p)}" for name, p in lines.items() if any(p.values())]
    if changes and (d.stated is None or d.verdict == "wiring_differs"):
        found += ["", "To serve it so:", *changes]
    over = patch.overriding(d.best.wiring)
    if over:
        found += ["", "Overridden by:", *(f"  {text}" for text in over)]
    if d.not_tried:
        found += ["", "Not tried:", *(f"  {text}" for text in d.not_tried)]
    found += ["", "Not decidable from this record:", *(f"  {text}" for text in d.undecided)]
    if any(text.startswith("boundaries: the record") for text in d.undecided):
        found.append(f"  {CAPTURE}")
    if any(text.startswith("cache policy") for text in d.undecided):
        found.append(f"  {SERVER.format(','.join(map(str, d.best.wiring.boundaries)))}")
    found += ["Not observable:", *(f"  {text}" for text in UNOBSERVABLE)]
    if d.verdict in ("no_wiring_fits", "not_matched"):
        shown = ", ".join(f"{b}: {x:.3g}" for b, x in d.norms.items())
        found += ["", f"Root mean square of the states by boundary (a rotation keeps it): {shown}"]
    return found


def _candidate(c: Candidate) -> dict[str, Any]:
    wiring = dataclasses.asdict(c.wiring)
    wiring["boundaries"] = list(c.wiring.boundaries)
    return {
        "words": c.words,
        "accept_length": c.accept_length,
        "gain": c.gain.mean,
        "interval": [c.gain.low, c.gain.high],
        "standard_errors": c.z,
        "nll": None if c.nll != c.nll else c.nll,
        "outside_draft_vocabulary": c.outside,
        "wiring": wiring,
    }


def _row(c: Candidate, best: bool) -> str:
    mark = ">" if best else " "
    interval = f"{c.gain.mean:+.2f}  [{c.gain.low:+.2f}, {c.gain.high:+.2f}]"
    return f"{mark} {c.accept_length:6.2f}   {interval:22s}{c.z:+8.1f} std errors     {c.words}"
