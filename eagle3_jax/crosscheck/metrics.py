"""How far two tensors are apart: SGLang's measure, and those that say how."""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Distance:
    """Of a found tensor from the expected one, in float64.

    Attributes:
      rel_diff: `1 - 2 <x, y> / (|x|^2 + |y|^2)`, SGLang's (`debug_utils/comparator`): blind to
        nothing, but quadratic: 1e-6 is one part in a thousand.
      max_abs: largest absolute difference. rel_l2: `|x - y| / |y|`.
      norm_ratio: `|x| / |y|`. cosine: of the angle between them, blind to scale.
      where: index of the largest difference.
      finite: no NaN or infinity on either side; the numbers are NaN otherwise.
    """

    rel_diff: float
    max_abs: float
    rel_l2: float
    norm_ratio: float
    cosine: float
    where: tuple[int, ...]
    finite: bool = True

    def __str__(self) -> str:
        if not self.finite:
            return "NaN or infinity"
        return (
            f"rel_diff {self.rel_diff:.2e}, max abs {self.max_abs:.3g}, relative L2 "
            f"{self.rel_l2:.2e}, norm ratio {self.norm_ratio:.4f}, cosine {self.cosine:.4f}"
        )

    def json(self) -> dict[str, Any]:
        """Finite numbers only, as JSON wants them; None for the others."""
        numbers = dataclasses.asdict(self) | {"where": list(self.where)}
        return {
            k: None if isinstance(v, float) and not np.isfinite(v) else v
            for k, v in numbers.items()
        }


def distance(found: np.ndarray, expected: np.ndarray) -> Distance:
    """Both of one shape, any number dtype.

    Raises:
      ValueError: another shape.
    """
    x, y = (np.asarray(v).astype(np.float64) for v in (found, expected))
    if x.shape != y.shape:
        raise ValueError(f"shapes {x.shape} and {y.shape} have no distance")
    if not x.size:
        return Distance(0.0, 0.0, 0.0, 1.0, 1.0, ())
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        bad = np.argwhere(~(np.isfinite(x) & np.isfinite(y)))[0]
        nan = float("nan")
        return Distance(nan, nan, nan, nan, nan, tuple(int(i) for i in bad), finite=False)
    dot, xx, yy = float((x * y).sum()), float((x * x).sum()), float((y * y).sum())
    off = np.abs(x - y)
    where = np.unravel_index(int(off.argmax()), off.shape)
    both = xx + yy
    return Distance(
        rel_diff=0.0 if both == 0 else max(0.0, 1 - 2 * dot / both),
        max_abs=float(off.max()),
        rel_l2=_ratio(float(np.sqrt((off * off).sum())), yy**0.5),
        norm_ratio=_ratio(xx**0.5, yy**0.5),
        cosine=1.0 if xx == yy == 0 else _ratio(dot, (xx * yy) ** 0.5),
        where=tuple(int(i) for i in where),
    )


def _ratio(a: float, b: float) -> float:
    if b:
        return a / b
    return 0.0 if a == 0 else float("inf")
