"""One comparison: an engine's requests checked, taught, measured, compared and judged."""

import dataclasses
from collections.abc import Sequence

from eagle3_jax.config import TreeConfig
from eagle3_jax.crosscheck import causes, probes
from eagle3_jax.crosscheck.counts import COUNTED, check_counts, check_totals, rounded_counts
from eagle3_jax.crosscheck.evidence import Evidence, to_target, tree_of
from eagle3_jax.crosscheck.measuring import measured, settings_of, usable
from eagle3_jax.crosscheck.noise import Noise
from eagle3_jax.crosscheck.ours import Ours, Taught
from eagle3_jax.crosscheck.result import Divergence, Kind, Line, Result, Tie, sentence
from eagle3_jax.crosscheck.rounds import Context, Seen, compare_round
from eagle3_jax.crosscheck.sampled import Sampled
from eagle3_jax.crosscheck.sampled_rule import (
    judge_rule,
    said_rule,
    uncut_counts,
    whole_rounds,
)
from eagle3_jax.crosscheck.states import check_states
from eagle3_jax.crosscheck.suspects import explain_statistics, pinned_at_maximum
from eagle3_jax.crosscheck.tokens import (
    Checked,
    check_logprobs,
    check_stop,
    check_tokens,
    listed_ids,
)
from eagle3_jax.crosscheck.types import CrosscheckError, EngineRequest, EngineRun
from eagle3_jax.targets.base import Target
from eagle3_jax.trace import Round


class Comparison:
    """One call: checked, taught, measured, compared, judged."""

    ours: Ours
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    taught: list[Taught]
    rounds: list[list[Round]]
    noise: Noise
    sampled: Sampled

    def __init__(self, run: EngineRun, vocab_size: int):
        self.run = run
        self.requests, notes = usable(run, vocab_size)
        self.notes = [*run.notes, *notes]
        self.seen = [Seen() for _ in self.requests]
        self.counted_otherwise: list[Divergence] = []

    @property
    def tree(self) -> TreeConfig | None:
        """The engine's, None when drafts are not compared."""
        return self.ours.tree

    def settled_tree(self, tree: TreeConfig | None) -> TreeConfig | None:
        """The triple asked for, the run's own, or a chain's from its rounds; None for no drafts."""
        said = self.run.settings.tree
        spoken = any("spec_verify_ct" in r.stats or r.rounds for r in self.run.requests)
        if tree is not None and said is not None and tree != said:
            raise CrosscheckError(f"{self.run.source}: it ran tree {said}, asked to compare {tree}")
        if tree is None and said is None:
            tree = tree_of(self.run)
        found = tree or said
        if found is None and spoken:
            raise CrosscheckError(
                f"{self.run.source}: it does not say its tree: give --num-steps, --topk and "
                "--num-draft-tokens as the server had them"
            )
        if tree is None and found is not None and not spoken and not self.run.stats:
            self.notes.append("no statistics and no rounds in the results: drafts not compared")
            return None
        return found

    def result(self, reference: Target | None) -> Result:
        """Runs and judges."""
        self.taught = [
            self.ours.teach(r.prompt, r.output, listed=listed_ids(r)) for r in self.requests
        ]
        self.rounds = [[] for _ in self.requests]
        if self.tree is not None:
            self.rounds = self.ours.free(self.requests)
        self.sampled = Sampled(self.run, self.requests, self.ours, self.taught, self.rounds)
        self.notes += self.sampled.notes
        reported = [self.sampled.taught(i) or taught for i, taught in enumerate(self.taught)]
        self.noise, notes = measured(
            self.run, self.requests, self.ours, reported, self.rounds, reference
        )
        self.notes += notes
        found: list[Divergence] = []
        ties: list[Tie] = []
        lines: list[Line] = []
        for i, request in enumerate(self.requests):
            faults, tied, line = self._request(i, request)
            found += faults
            ties += tied
            lines.append(line)
        totals = check_totals(self.run, self.rounds, self.tree)
        if self.sampled:
            self.counted_otherwise += [d for d in totals if d.tensor == COUNTED[0]]
            found += self._sampled(lines)
        else:
            found += totals
        found.sort(key=lambda d: (d.order, d.request))
        found, rounded = rounded_counts(found, self.requests, self.rounds, self.noise)
        ties += rounded
        first = found[0] if found else None
        kind: Kind = "equal up to ties" if ties else "equal"
        if self.ours.recorded:
            kind = "not an acceptance problem"
        why = ""
        undecidable = self.sampled.undecidable
        if first is not None:
            first = self._explained(first)
            kind = first.kind
        elif undecidable:
            kind = "not decidable"
            number, reason = next(iter(undecidable.items()))
            why = (
                f"{len(undecidable)} requests were sampled at a temperature: no text is expected; "
                f"request {number}: {reason}"
            )
        else:
            why = self._summary(lines, ties)
        return Result(
            kind=kind,
            verdict=sentence(kind, first, why),
            first=first,
            others=found[1:] if first is not None else found,
            ties=ties,
            lines=lines,
            notes=list(dict.fromkeys(self.notes)),
            noise=self.noise.json(),
            settings=settings_of(self.run, self.ours),
        )

    def _sampled(self, lines: list[Line]) -> list[Divergence]:
        """What the sampled requests show: of their tokens, and of the rule that accepted drafts."""
        if self.sampled.undecidable and said_rule(self.run.settings) != "one_hot":
            self.counted_otherwise.clear()  # drafts were drawn, and from what is not known
        faults = self.sampled.faults(self.noise)
        for d in faults:
            if d.position is not None:
                until = min(lines[d.request].equal_until, d.position)
                lines[d.request] = dataclasses.replace(lines[d.request], equal_until=until)
        chain = self.tree is not None and self.tree.topk == 1
        groups, emitted = self.sampled.groups, self.sampled.emitted
        rule = judge_rule(self.run, self.requests, groups, self.counted_otherwise, emitted, chain)
        self.notes += rule.notes
        self.sampled.said = "; ".join(filter(None, (self.sampled.said, rule.said)))
        return faults + rule.faults

    def _request(self, i: int, request: EngineRequest) -> tuple[list[Divergence], list[Tie], Line]:
        taught: Taught | None = self.taught[i]
        rounds = self.rounds[i]
        if i in self.sampled:
            checked, taught = Checked(equal_until=len(request.output)), self.sampled.taught(i)
            did = [] if taught is None else ["distribution"]
        else:
            checked = check_tokens(i, request, self.taught[i], self.noise, rounds)
            did = [] if self.ours.recorded else ["tokens"]
        found = list(checked.faults)
        if not self.ours.recorded and taught is not None:
            found += check_logprobs(i, request, taught, self.noise.dtype, rounds)
        ignored = self.ignore_eos if self.ignore_eos is not None else request.ignore_eos
        stop = () if ignored else (*self.stop_ids, *(request.stop_token_ids or ()))
        faults, notes = check_stop(i, request, stop, rounds)
        found += faults
        self.notes += notes
        if request.aux is not None and not self.ours.recorded:
            fault, looked = check_states(i, request, self.ours, self.taught[i], self.noise)
            if fault is not None:
                found.append(self._placed(i, request, fault))
            did += ["states"] if looked else []
        ties = list(checked.ties)
        if self.tree is not None:
            drawn = i in self.sampled and said_rule(self.run.settings) != "one_hot"
            if request.rounds and not drawn:
                found += self._dumped(i, whole_rounds(request) if i in self.sampled else request)
                did.append("rounds")
                ties += self.seen[i].ties
            if any(name in request.stats for name in COUNTED):
                check = uncut_counts if i in self.sampled else check_counts
                counts = check(i, request, rounds, self.tree)
                apart = i in self.sampled and not any(d.code for d in counts)
                (self.counted_otherwise if apart else found).extend(counts)
                did.append("statistics")
        if request.missing:
            self.notes.append(f"request {i}: not in the answer: {', '.join(request.missing)}")
        if request.cached_tokens:
            self.notes.append(f"request {i}: {request.cached_tokens} prompt tokens from a cache")
        stats = request.stats
        ours = [r.num_correct_drafts for r in rounds]
        count = stats.get("spec_verify_ct")
        if count is None and request.rounds:
            count = len(request.rounds)
        line = Line(
            name=request.name,
            tokens=len(request.output),
            equal_until=checked.equal_until,
            rounds=(count, len(ours) if self.tree else None),
            accept_length=(
                stats.get("spec_accept_length"),
                len(request.output) / len(ours) if ours else None,
            ),
            checked=tuple(did),
        )
        return found, ties, line

    def _dumped(self, i: int, request: EngineRequest) -> list[Divergence]:
        """The first divergence among a request's dumped rounds."""
        seen = self.seen[i]
        faults: list[Divergence] = []
        first: Divergence | None = None
        table = to_target(self.ours.draft)
        logits = None
        assert self.tree is not None
        for theirs, mine in self.ours.pinned(request, self.rounds[i]):
            if "prefill.extend_logits" in mine.tensors:
                logits = mine.tensors["prefill.extend_logits"]
            context = Context(i, self.tree.topk, table, logits)
            fault = compare_round(theirs, mine, self.noise, context, seen)
            if fault is not None:
                first = first or causes.explain(fault, theirs, mine, self._evidence(i))
                faults.append(fault)
            logits = mine.tensors.get("extend_logits")
        if first is None:
            return []
        return [causes.over_rounds(first, faults, request, self.tree)]

    def _placed(self, i: int, request: EngineRequest, fault: Divergence) -> Divergence:
        """A state after the prompt belongs to a round, and a fault of that round explains it."""
        assert request.aux is not None
        assert fault.node is not None
        inside = (r for r in self.rounds[i] if r.length <= fault.node < r.length + r.accept_length)
        own = next(inside, None)
        if fault.code is not None or own is None or fault.node < len(request.prompt):
            return fault
        rows = request.aux[own.length - request.first :][: own.accept_length]
        named = probes.state_cause(
            rows.reshape(len(rows), -1, self.ours.target.config.hidden_size),
            own.index,
            own.length,
            self._evidence(i),
        )
        code, words = named or (None, "")
        order = (own.index, 899)
        kind = (
            "tree differs" if words and code and code.startswith(("TREE_", "POS_")) else fault.kind
        )
        return dataclasses.replace(
            fault, kind=kind, round=own.index, code=code, cause=words, order=order
        )

    def _evidence(self, i: int) -> Evidence:
        return Evidence(self.ours, self.requests, i, self.taught, self.noise, self.rounds[i])

    def _explained(self, first: Divergence) -> Divergence:
        """From statistics alone: what pins them, or which wrong wiring gives the same numbers."""
        if self.tree is None:
            return first
        pinned = pinned_at_maximum(self.requests, self.tree)
        if pinned is not None and first.tensor in ("output_ids", *COUNTED):
            return dataclasses.replace(first, code=pinned[0], cause=pinned[1])
        if first.kind != "statistics differ" or first.code is not None:
            return first
        return explain_statistics(first, self.run, self.requests, self.ours, self.notes)

    def _summary(self, lines: Sequence[Line], ties: Sequence[Tie]) -> str:
        tokens = sum(line.tokens for line in lines)
        rounds = sum(line.rounds[1] or 0 for line in lines)
        parts = [f"{len(lines)} requests", f"{tokens} tokens"]
        if self.tree is not None:
            parts.append(f"{rounds} rounds")
        if self.ours.recorded and rounds:
            correct = [r.num_correct_drafts + 1 for one in self.rounds for r in one]
            parts.append(f"accept length {sum(correct) / len(correct):.2f} as replayed")
        compared = sum(s.compared for s in self.seen)
        if compared:
            parts.append(f"{compared} tensors")
        if ties:
            parts.append(f"{len(ties)} near ties")
        if self.sampled.said:
            parts.append(self.sampled.said)
        return ", ".join(parts)
