"""What a call will need, in bytes, before anything is allocated or compiled."""

import dataclasses
import math
import os
from collections.abc import Iterable
from pathlib import Path

import jax

from eagle3_jax.config import ConfigError, DraftConfig, TargetConfig, TreeConfig
from eagle3_jax.ops.blockwise import SCORES
from eagle3_jax.precision import precision

MIB = 2**20


class NotEnoughMemoryError(ConfigError):
    """The estimate exceeds what is free; the message has the numbers and what would fit."""


@dataclasses.dataclass(frozen=True)
class Need:
    """Bytes one generation takes beside the weights."""

    caches: int
    temporaries: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.caches + self.temporaries


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes a program is compiled for."""

    batch: int
    prompt: int  # padded
    slots: int


def _scores(heads: int, prompt: int) -> int:
    """Bytes of float32 scores that exist at once: all of a short prompt's, a block's of a long."""
    return min(4 * heads * prompt**2, max(4 * SCORES, 4 * heads * 256**2))


def need(
    shape: Shape,
    target: TargetConfig,
    target_itemsize: int,
    draft: DraftConfig | None,
    draft_itemsize: int,
    tree: TreeConfig | None,
    *,
    sampled: bool = False,
) -> Need:
    """An upper estimate of caches and temporaries.

    Caches: keys and values of every layer and slot. Temporaries: the larger of prefill (one
    layer's attention scores four times in float32, those of a block where the prompt is long
    (`blockwise`), its MLP, the captured states) and a round
    (target logits and their copy, draft logits, attention scores, who is whose ancestor; `sampled`:
    counts, probabilities, their order and what is left of them).
    """
    models = [(target, target_itemsize)] + ([(draft, draft_itemsize)] if draft else [])
    caches = sum(
        c.num_layers * shape.batch * shape.slots * c.cache_width * size for c, size in models
    )
    prefill = max(
        4 * _scores(shape.batch * c.num_heads, shape.prompt)
        + 4 * shape.batch * shape.prompt * (3 * c.intermediate_size + 6 * c.hidden_size)
        for c, _ in models
    )
    nodes = 1
    if draft is not None and tree is not None:
        nodes = tree.num_draft_tokens
        aux = draft.num_aux * draft.target_hidden_size * target_itemsize
        prefill += shape.batch * shape.prompt * aux
    rounds = 2 * 4 * shape.batch * nodes * (target.vocab_size + target.num_heads * shape.slots)
    if draft is not None and tree is not None:
        rounds += 2 * 4 * shape.batch * tree.topk * draft.draft_vocab_size
        rounds += 12 * shape.batch * nodes**2
    if sampled:
        rounds += 5 * 4 * shape.batch * nodes * target.vocab_size
    return Need(caches, max(prefill, rounds))


def free_bytes() -> int | None:
    """Memory that can still be taken on the default device; None where nothing tells."""
    device = jax.devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    if device.platform != "cpu":
        return None
    available = Path("/proc/meminfo")
    if available.is_file():
        for line in available.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return min(int(line.split()[1]) * 1024, _cgroup_free())
    if "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _cgroup_free() -> int:
    """What a container's limit leaves (cgroup v2), or no bound."""
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file():
        text = limit.read_text().strip()
        if text.isdigit():
            return max(int(text) - int(used.read_text()), 0)
    return 2**62


def check_weights(
    where: str, shapes: Iterable[tuple[int, ...]], dtype: str, free: int | None = None
):
    """Refuses a model whose weights alone exceed the free memory, before a tensor is read.

    Args:
      free: bytes; None asks the machine (`free_bytes`).

    Raises:
      NotEnoughMemoryError: with both numbers, and whether a smaller dtype would fit.
    """
    tensors = sum(math.prod(shape) for shape in shapes) * precision(dtype).compute.itemsize
    free = free_bytes() if free is None else free
    if free is None or tensors <= free:
        return
    hint = ""
    if dtype in ("float32", "float64"):
        half = tensors // (2 if dtype == "float32" else 4)
        fits = "would fit" if half <= free else "would not fit either"
        hint = f"; dtype='bfloat16' takes {half / MIB:.0f} MiB and {fits}"
    raise NotEnoughMemoryError(
        f"{where}: the weights take {tensors / MIB:.0f} MiB as {dtype}, "
        f"{free / MIB:.0f} MiB are free{hint}"
    )


def check_need(asked: Need, free: int | None, per_sequence: int, batch: int):
    """Refuses a generation that does not fit.

    Args:
      per_sequence: bytes one sequence of this call takes, to tell the batch that fits.

    Raises:
      NotEnoughMemoryError: with the numbers and the options that would fit.
    """
    if free is None or asked.total <= free:
        return
    fits = free // per_sequence
    options = [f"a batch of {fits} instead of {batch}"] if 0 < fits < batch else []
    options += ["shorter prompts or a smaller max_new_tokens", "bfloat16 weights and caches"]
    raise NotEnoughMemoryError(
        f"this call needs about {asked.total / MIB:.0f} MiB ({asked.caches / MIB:.0f} for caches, "
        f"{asked.temporaries / MIB:.0f} for temporaries), {free / MIB:.0f} MiB are free; "
        f"what would fit: {', or '.join(options)}"
    )
