"""Which of an operation's programs runs: the kernel, the kernel interpreted, or plain XLA."""

import contextlib
import functools
import importlib.util
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
from jax import lax

Implementation = Literal["xla", "pallas", "mosaic", "interpret"]

_chosen = jax.make_user_context(None)


def use_attention(implementation: Implementation | None) -> contextlib.AbstractContextManager:
    """`with use_attention("xla"):` says what attention inside runs by, in this thread.

    What stands around it goes by the same word: the rotation, the writes to the cache (for
    `"mosaic"` the kernels of Pallas's Triton backend, as for what it does not take). `"mosaic"` was
    compiled, emulated and never run on a card (docs/gpu.md). The choice is part of the key of every
    `jax.jit` cache: no program of another one is reused.

    Raises:
      ValueError: an unknown name.
    """
    return _chosen(checked(implementation))


def checked(implementation: Implementation | None) -> Implementation | None:
    """The same.

    Raises:
      ValueError: an unknown name.
    """
    names = get_args(Implementation)
    if implementation is not None and implementation not in names:
        raise ValueError(f"implementation is {implementation!r}, expected {', '.join(names)}")
    return implementation


def chosen(implementation: Implementation | None = None) -> Implementation | None:
    """The call's own word, else that of `use_attention`.

    Raises:
      ValueError: an unknown name.
    """
    return _chosen.value if implementation is None else checked(implementation)


@functools.cache
def _cuda_is_possible() -> bool:
    """Whether this installation can compile for CUDA at all: a GPU, or jax's plugin for one.

    Where it cannot, the kernels would be traced for nothing, which takes as long as the rest of a
    round. A program lowered for another machine all the same asks for them by `use_attention`.
    """
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    installed = any(importlib.util.find_spec(name) is not None for name in plugins)
    return installed or jax.default_backend() == "gpu"


def run(
    plain: Callable,
    kernel: Callable,
    arrays: tuple,
    *,
    takes: bool,
    implementation: Implementation | None = None,
) -> Any:
    """One of two functions of `arrays`; of None, the kernel in programs for CUDA, if this
    installation can compile one (a GPU, or jax's plugin for it), else the plain one.

    Args:
      kernel: takes `interpret` besides.
      takes: whether the kernel computes these arrays at all.
    """
    which = chosen(implementation)
    if which == "xla" or not takes or (which is None and not _cuda_is_possible()):
        return plain(*arrays)
    if which is None:

        def compiled(*arrays):
            return kernel(*arrays, interpret=False)

        return lax.platform_dependent(*arrays, cuda=compiled, default=plain)
    return kernel(*arrays, interpret=which == "interpret")
