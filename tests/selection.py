"""Which of many alike cases run by default."""

from collections.abc import Iterable

import pytest


def every_other(names: Iterable[str]) -> list:
    """Parameters: the first, the third, ... always, the others with `--exhaustive`."""
    return [
        pytest.param(name, marks=[pytest.mark.exhaustive] if i % 2 else [])
        for i, name in enumerate(names)
    ]
