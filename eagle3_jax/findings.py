"""What a conversion found: stable codes, and the one error that stops it."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

ALLOWABLE: dict[str, str] = {
    "CONFIG_SIZE_DISAGREES": "the tensors' sizes win over config.json",
    "POS_SLIDING_WINDOW_UNCLEAR": "the draft attends to all positions",
    "VOCAB_MAP_ALL_ZERO": "draft ids are the first target ids",
    "VOCAB_MAP_MISSING": "draft ids are the first target ids",
    "WEIGHT_NOT_FINITE": "NaN and infinity are copied as they are",
}
"""Codes `--allow` takes, each with what happens when it is allowed."""


class ConvertError(ValueError):
    """One precise reason why a draft cannot be converted, with a stable `code`."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code

    def about(self, path: Path) -> "ConvertError":
        """The same error, its message opened by the path unless it names it already."""
        named = str(path) in str(self) or self.code == "USAGE"
        return self if named else ConvertError(self.code, f"{path}: {self}")


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something the user should know though the conversion went on."""

    code: str
    severity: Literal["note", "warning"]
    message: str


class Findings:
    """Collects findings; a check that fails raises unless its code was allowed.

    Raises:
      ConvertError: `allow` names an unknown code or one that must not be allowed.
    """

    def __init__(self, allow: Iterable[str] = ()):
        self.allowed = frozenset(allow)
        self.items: list[Finding] = []
        for code in sorted(self.allowed - ALLOWABLE.keys()):
            raise ConvertError(
                "USAGE", f"--allow {code}: not a code that can be allowed: {', '.join(ALLOWABLE)}"
            )

    def note(self, code: str, message: str):
        """Records something expected but worth a line."""
        self.items.append(Finding(code, "note", message))

    def warn(self, code: str, message: str):
        """Records something that may make the numbers differ from what the user expects."""
        self.items.append(Finding(code, "warning", message))

    def refuse(self, code: str, message: str):
        """Stops the conversion, or records a warning when `--allow` names the code."""
        if code in self.allowed:
            self.warn(code, f"{message} (allowed: {ALLOWABLE[code]})")
        elif code in ALLOWABLE:
            raise ConvertError(code, f"{message}; --allow {code}: {ALLOWABLE[code]}")
        else:
            raise ConvertError(code, message)
