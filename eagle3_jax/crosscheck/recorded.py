"""A target that is only remembered: its states at each position of one text, and nothing else.

A round on a given text needs no more: what a node off the text would have given is never used.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle3_jax.cache import KVCache
from eagle3_jax.config import Boundary, ConfigError, RopeConfig, TargetConfig, TreeConfig
from eagle3_jax.crosscheck.ours import RECORDED, Ours, Taught
from eagle3_jax.crosscheck.types import CrosscheckError, EngineRequest, EngineRun
from eagle3_jax.draft import Eagle3Draft, Shared
from eagle3_jax.layers import Buffer, Rows
from eagle3_jax.modules import Folder
from eagle3_jax.trace import Round
from eagle3_jax.tree import DraftAttention


class RecordedTarget(nnx.Module):
    """States [T, A, E] of the tokens of one text, by position, in the draft's slot order.

    Its logits are zeros: only texts that are followed give meaningful rounds. States before `first`
    are unknown and read as zeros.
    """

    def __init__(
        self,
        aux: np.ndarray,
        draft: Eagle3Draft,
        shared: Shared | None,
        *,
        first: int = 0,
        slots: int,
        num_layers: int | None = None,
    ):
        config = draft.config
        rows, A, E = aux.shape
        if (config.num_aux, config.target_hidden_size) != (A, E):
            raise ConfigError(
                f"states are [{rows}, {A}, {E}], the draft takes {config.num_aux} of width "
                f"{config.target_hidden_size}"
            )
        named = config.aux_boundaries
        numbers = [b for b in named if isinstance(b, int)] if isinstance(named, tuple) else [12]
        self.config = TargetConfig(
            architecture=RECORDED,
            hidden_size=E,
            intermediate_size=1,
            num_layers=num_layers or max([*numbers, 1]),
            num_heads=1,
            num_kv_heads=1,
            head_dim=2,
            vocab_size=config.vocab_size,
            rms_norm_eps=1e-5,
            rope=RopeConfig(),
            max_position_embeddings=2**30,
        )
        self.folder = Folder()
        table = np.zeros((slots, A, E), np.float32)
        table[first : first + rows] = np.asarray(aux, np.float32)[: slots - first]
        dtype = draft.dtype
        self.table = Buffer(jnp.asarray(table, dtype))
        empty = jnp.zeros((1, config.hidden_size), dtype)
        self.embedding = Buffer(empty if shared is None else shared.embedding)
        self.head = Buffer(empty if shared is None else shared.head)

    @property
    def dtype(self) -> jnp.dtype:
        """Of the draft it is for."""
        return self.table[...].dtype

    def new_cache(self, batch: int, slots: int) -> KVCache:
        """Nothing is kept."""
        return KVCache.zeros(1, batch, slots, 1, 2, self.dtype)

    def states(
        self, tokens: jax.Array, rows: Rows, cache: KVCache, boundaries: Sequence[Boundary] = ()
    ) -> tuple[jax.Array, jax.Array, KVCache]:
        """The remembered states at the rows' positions, whatever the tokens."""
        aux = jnp.take(self.table[...], rows.positions, axis=0, mode="clip")
        return aux[:, :, 0], aux, cache

    def logits(self, states: jax.Array) -> jax.Array:
        """Zeros [..., V]."""
        shape = (*states.shape[:-1], self.config.vocab_size)
        return jnp.zeros(shape, jnp.promote_types(self.dtype, jnp.float32))

    def shared(self) -> Shared:
        """The matrices the draft may use."""
        return Shared(self.embedding[...], self.head[...])


def draft_states(run: EngineRun, draft: Eagle3Draft) -> EngineRun:
    """A record's states cut to the draft's slots, in its order; other runs as they are.

    Raises:
      CrosscheckError: the record lacks a boundary of the draft's.
    """
    held = run.settings.other.get("boundaries")
    if held is None:
        return run
    config = draft.config
    if isinstance(config.aux_boundaries, str):
        config = config.resolve(run.settings.other.get("num_layers") or 0)
    missing = [b for b in config.aux_boundaries if b not in held]
    if missing:
        raise CrosscheckError(
            f"{run.source}: holds boundaries {list(held)}, the draft takes "
            f"{list(config.aux_boundaries)}"
        )
    slots = [held.index(b) for b in config.aux_boundaries]
    requests = [
        dataclasses.replace(r, aux=None if r.aux is None else np.asarray(r.aux)[:, slots])
        for r in run.requests
    ]
    return dataclasses.replace(run, requests=requests)


class RecordedOurs(Ours):
    """Our rounds on texts whose states were recorded; no target runs and no text is judged.

    Args:
      requests: each with `aux`, in the draft's slot order or one row [A * E].
      shared: the target's embedding and head, for drafts that use them.
      num_layers: of the target, for drafts that leave their boundaries to it.
    """

    def __init__(
        self,
        requests: Sequence[EngineRequest],
        draft: Eagle3Draft,
        shared: Shared | None,
        tree: TreeConfig,
        draft_attention: DraftAttention | None = None,
        num_layers: int | None = None,
    ):
        longest = max(len(r.prompt) + len(r.output) for r in requests)
        slots = -(-(longest + tree.window + 1) // 64) * 64
        A, E = draft.config.num_aux, draft.config.target_hidden_size
        self._targets: dict[tuple[int, ...], RecordedTarget] = {}
        self._states: dict[tuple[int, ...], np.ndarray] = {}
        for request in requests:
            assert request.aux is not None
            text = (*request.prompt, *request.output)
            aux = np.asarray(request.aux)
            if aux.size != len(aux) * A * E:
                raise CrosscheckError(
                    f"request {request.name}: states of width {aux[0].size}, the draft takes {A} "
                    f"of {E}"
                )
            aux = aux.reshape(len(aux), A, E)
            self._targets[text] = RecordedTarget(
                aux, draft, shared, first=request.first, slots=slots, num_layers=num_layers
            )
            whole = np.zeros((len(text) - 1, A, E), np.float32)
            part = aux[: len(whole) - request.first].astype(np.float32)
            whole[request.first : request.first + len(part)] = part
            self._states[text] = whole
        super().__init__(next(iter(self._targets.values())), draft, tree, draft_attention)

    def teach(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        boundaries: Sequence[Boundary] | None = None,
        listed: np.ndarray | None = None,
    ) -> Taught:
        """The text as it stands; other boundaries than the draft's are not known."""
        n = len(output)
        return Taught(
            predicted=np.asarray(output, np.int32),
            margins=np.full(n, np.inf, np.float32),
            logprobs=np.full(n, np.nan),
            second=np.zeros(n, np.int32),
            size=0.0,
            aux=self._states[(*prompt, *output)],
        )

    def _rounds(
        self, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
    ) -> Iterator[Round]:
        self.target = self._targets[(*prompts[0], *outputs[0])]
        return super()._rounds(prompts, outputs)
