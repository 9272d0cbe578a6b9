"""An export as JSON values and as a few lines of text."""

import dataclasses
from typing import Any

from eagle3_jax.export import Export


def summary(export: Export, out: str, verified: bool) -> dict[str, Any]:
    """The export as JSON values."""
    return {
        "out": out,
        "dialect": export.form.name,
        "config": export.config_json,
        "tensors": {
            name: {"dtype": planned.dtype_of(name), "shape": list(shape), "from": planned.canonical}
            for planned in export.tensors
            for name, shape in zip(planned.names, planned.shapes, strict=True)
        },
        "findings": [dataclasses.asdict(item) for item in export.findings],
        "convert_flags": export.convert_flags(),
        "verified": verified,
    }


def report(export: Export, out: str, verified: bool) -> str:
    """The export in a few lines of text."""
    count = sum(len(planned.names) for planned in export.tensors)
    kinds = sorted({p.dtype for p in export.tensors if p.canonical != "draft_to_target"})
    flags = " ".join(export.convert_flags())
    checked = "read back: config and tensors are the same" if verified else "not read back"
    lines = [
        f"{out}: {export.form.name} draft, {count} tensors, {', '.join(kinds)}; {checked}",
        *(f"  {item.severity} [{item.code}] {item.message}" for item in export.findings),
        f"  to convert it again: python -m convert.from_torch {out} --out DIR {flags}".rstrip(),
    ]
    return "\n".join(lines)
