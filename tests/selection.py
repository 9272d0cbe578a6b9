"""Which of many alike cases run by default."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def by_default(values: Iterable[Any], keep: Callable[[int, Any], bool]) -> list:
    """Parameters: those that `keep(index, value)` always, the others with `--exhaustive`."""
    return [
        pytest.param(value, marks=[] if keep(i, value) else [pytest.mark.exhaustive])
        for i, value in enumerate(values)
    ]


def every_other(values: Iterable[Any]) -> list:
    """The first, the third, ... by default."""
    return by_default(values, lambda i, _: i % 2 == 0)
