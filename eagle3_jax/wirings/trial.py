"""What the doctor tries wirings on: the record's slots, the configured wiring, the search."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from eagle3_jax.config import ConfigError, RopeConfig, TreeConfig, default_boundaries
from eagle3_jax.draft import Eagle3Draft, Shared
from eagle3_jax.record import Record, RecordError
from eagle3_jax.records.checks import check_fits
from eagle3_jax.wirings.candidates import singles
from eagle3_jax.wirings.explain import engine_steps, engine_tree
from eagle3_jax.wirings.material import Material
from eagle3_jax.wirings.pack import Pack, pack
from eagle3_jax.wirings.search import Search
from eagle3_jax.wirings.wiring import Wiring, configured


@dataclasses.dataclass(frozen=True)
class Trial:
    """One draft on one record.

    Attributes:
      base: the configured wiring. stated: what the config says where the record lacks its
        boundaries, so that `base` has the record's own. as_stated: nobody changed the config's.
      tree: what the engine drafted, if anything says. steps: drafts per chain that are scored.
      options: all wirings one change away from one.
    """

    record: Record
    draft: Eagle3Draft
    shared: Shared | None
    packed: Pack
    material: Material
    search: Search
    base: Wiring
    stated: Wiring | None
    as_stated: bool
    tree: TreeConfig | None
    steps: int
    options: Callable[[Wiring], list[Wiring]]

    @property
    def drafted(self) -> TreeConfig | None:
        """The tree that is served, None for a chain."""
        return self.tree if self.tree is not None and self.tree.topk > 1 else None

    @property
    def shuffled(self) -> Wiring:
        """The configured wiring with the states of other tokens."""
        return dataclasses.replace(self.base, rows="shuffled")

    @property
    def tree_is_scored(self) -> bool:
        """Whether the chains are as long as the tree is deep."""
        return self.tree is not None and self.tree.num_steps == self.steps

    def refuse_missing_boundaries(self):
        """Raises what a capture of the record would need; nothing was found without it."""
        assert self.stated is not None
        self.material.index(
            next(b for b in self.stated.boundaries if b not in self.record.boundaries)
        )

    def norms(self) -> dict[str, float]:
        """Root mean square of each boundary's states over the first slots."""
        high = min(len(self.packed.tokens), 256)
        found = {}
        for i, boundary in enumerate(self.material.boundaries):
            x = self.packed.states([i], 0, high)
            found[str(boundary)] = float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))
        return found


def prepare(
    record: Record,
    draft: Eagle3Draft,
    shared: Shared | None,
    *,
    wiring: Wiring | None,
    changes: Mapping[str, Any],
    extra: Mapping[str, np.ndarray],
    side_map: np.ndarray | None,
    rotation: np.ndarray | None,
    target_rope: RopeConfig | None,
    num_steps: int | None,
    tree: TreeConfig | None,
    max_tokens: int,
    say: Callable[[str], None],
) -> Trial:
    """Checks what `doctor.diagnose` was given, whose arguments and errors these are."""
    check_fits(record, draft.config)
    _check_tree(draft, tree, num_steps)
    tree = tree or engine_tree(record)
    steps = num_steps or (tree.num_steps if tree else None) or engine_steps(record) or 3
    packed = pack(record, steps=steps, max_tokens=max_tokens)
    material = Material(packed, record.boundaries, draft, shared, extra, side_map, rotation)
    base = dataclasses.replace(wiring or _configured(record, draft), **changes)
    stated = None
    if any(b not in record.boundaries for b in base.boundaries):
        stated, base = base, _recorded(record, base)
    _check(material, base)
    ropes = [base.rope, *([target_rope] if target_rope else [])]
    for rope in ropes:
        rope.check_sections(draft.config.attention().rotary_dim)
    if any(rope.kind == "dynamic" for rope in ropes):
        material.form = dataclasses.replace(material.form, dynamic=True)

    def options(one: Wiring) -> list[Wiring]:
        return singles(material, one, num_layers=record.num_layers, target_rope=target_rope)

    return Trial(
        record=record,
        draft=draft,
        shared=shared,
        packed=packed,
        material=material,
        search=Search(material, options, say),
        base=base,
        stated=stated,
        as_stated=stated is None and wiring is None and not changes,
        tree=tree,
        steps=steps,
        options=options,
    )


def _configured(record: Record, draft: Eagle3Draft) -> Wiring:
    boundaries = draft.config.aux_boundaries
    if isinstance(boundaries, str):
        have = [b for b in record.boundaries if isinstance(b, int)]
        all_there = sorted(have) == list(range(len(have)))  # then the last is the depth
        if record.num_layers is None and not all_there:
            raise RecordError(
                f"the draft's boundaries are {boundaries} and the record does not know the "
                "target's depth L: say it with --num-layers when recording"
            )
        boundaries = default_boundaries(record.num_layers or max(have))
    return configured(draft.config, boundaries)


def _recorded(record: Record, base: Wiring) -> Wiring:
    """A wiring of boundaries the record has, as many as `base` reads, the wanted ones kept."""
    wanted = [b for b in base.boundaries if b in record.boundaries]
    spare = [b for b in record.boundaries if b not in wanted]
    if len(record.boundaries) < len(base.boundaries):
        raise ConfigError(
            f"the record has boundaries {list(record.boundaries)}, the draft reads "
            f"{len(base.boundaries)}: {list(base.boundaries)}"
        )
    if len(record.boundaries) == len(base.boundaries):
        return dataclasses.replace(base, boundaries=record.boundaries)
    filled = (b if b in wanted else spare.pop(0) for b in base.boundaries)
    return dataclasses.replace(base, boundaries=tuple(filled))


def _check_tree(draft: Eagle3Draft, tree: TreeConfig | None, num_steps: int | None):
    if tree is None:
        return
    if num_steps not in (None, tree.num_steps):
        raise ConfigError(f"num_steps is {num_steps}, the tree's is {tree.num_steps}: give one")
    if tree.topk > draft.config.draft_vocab_size:
        raise ConfigError(
            f"topk={tree.topk} exceeds the draft vocabulary of {draft.config.draft_vocab_size}"
        )


def _check(material: Material, base: Wiring):
    for boundary in base.boundaries:
        material.index(boundary)
    if base.vocab not in material.maps:
        raise ConfigError(f"vocab {base.vocab!r}: expected one of {', '.join(material.maps)}")
    for what in ("embed", "head"):
        if getattr(base, what) not in material.owns(what):
            raise ConfigError(
                f"the draft uses the {getattr(base, what)}'s {what}, which is not here: pass "
                "shared=, or --target"
            )
