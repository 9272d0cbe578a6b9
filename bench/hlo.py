"""Optimised HLO as text, read far enough to see what a step copies, calls and sends."""

import dataclasses
import math
import re
from collections.abc import Iterator

ARRAY = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([\d,]*)\]")
CALLED = re.compile(
    r"(calls|to_apply|body|condition|branch_computations|called_computations|"
    r"true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
    "all-to-all",
    "collective-broadcast",
    "ragged-all-to-all",
)
PASSED_ON = {
    "parameter",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "while",
    "conditional",
    "call",
    "optimization-barrier",
    "copy-done",
    "async-done",
    "async-update",
    "domain",
    "constant",
}
"""Opcodes whose result is a buffer that another one wrote."""
BITS = {"pred": 8, "s4": 4, "u4": 4, "c64": 64, "c128": 128, "token": 0, "opaque": 0}


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an instruction's result."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        if self.dtype in BITS:
            return self.count * BITS[self.dtype] // 8
        number = re.search(r"\d+", self.dtype)
        return self.count * (int(number.group()) if number else 8) // 8

    @property
    def floating(self) -> bool:
        return self.dtype.startswith(("f", "bf"))

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True)
class Op:
    """One instruction."""

    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @property
    def called(self) -> dict[str, tuple[str, ...]]:
        """Attribute -> names of the computations it calls."""
        found: dict[str, tuple[str, ...]] = {}
        for kind, names in CALLED.findall(self.attributes):
            listed = re.findall(r"[\w.\-]+", names)
            found[kind] = found.get(kind, ()) + tuple(listed)
        return found

    @property
    def target(self) -> str:
        """Of a custom call: what it calls; else empty."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found.group(1) if found else ""


@dataclasses.dataclass(frozen=True)
class Module:
    """A program: its computations by name, and how many results take over an argument's buffer."""

    computations: dict[str, tuple[Op, ...]]
    entry: str
    aliases: int

    def ops(self, *names: str) -> Iterator[Op]:
        """All instructions, or those of the computations named."""
        for name in names or self.computations:
            yield from self.computations[name]

    def bodies(self) -> tuple[str, ...]:
        """The bodies of the while loops the entry itself runs."""
        run = self.run_by(self.entry, loops=False)
        found = [op.called["body"][0] for op in self.ops(*run) if op.opcode == "while"]
        return tuple(found)

    def run_by(self, name: str, *, loops: bool = True) -> tuple[str, ...]:
        """The computation and those it runs as sequences of their own: calls, branches, loops.

        Not those within fusions, reductions and sorts.
        """
        seen, left = [], [name]
        while left:
            name = left.pop()
            if name in seen:
                continue
            seen.append(name)
            for op in self.computations[name]:
                kinds = {"call": ("to_apply",), "async-start": ("calls", "called_computations")}
                kinds["conditional"] = (
                    "branch_computations",
                    "true_computation",
                    "false_computation",
                )
                if loops:
                    kinds["while"] = ("body",)
                for kind in kinds.get(op.opcode, ()):
                    left += op.called.get(kind, ())
        return tuple(seen)

    def writes_in_place(self, op: Op, index: int) -> bool:
        """Whether a result is an operand's buffer of which only a part is written."""
        if op.opcode in ("dynamic-update-slice", "scatter"):
            return True
        if "output_to_operand_aliasing" in op.attributes:
            return True
        if op.opcode != "fusion":
            return False
        inner = {o.name: o for o in self.computations[op.called["calls"][0]]}
        root = next(o for o in inner.values() if o.is_root)
        if root.opcode == "tuple":
            root = inner[root.operands[index]]
        root = _through_bitcasts(root, inner)
        if root.opcode not in ("dynamic-update-slice", "scatter"):
            return False
        return _through_bitcasts(inner[root.operands[0]], inner).opcode == "parameter"


def _through_bitcasts(op: Op, inner: dict[str, Op]) -> Op:
    while op.opcode == "bitcast":
        op = inner[op.operands[0]]
    return op


def parse(text: str) -> Module:
    """Reads what `compiled.as_text()` gives.

    Raises:
      ValueError: no entry computation, or an instruction that is not understood.
    """
    computations: dict[str, tuple[Op, ...]] = {}
    entry, name, ops = "", None, []
    for line in text.splitlines():
        if name is None:
            header = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
            if header and not line.startswith("HloModule"):
                name, ops = header.group(2), []
                entry = name if header.group(1) else entry
        elif line.startswith("}"):
            computations[name], name = tuple(ops), None
        elif line.strip():
            ops.append(_op(line))
    if not entry:
        raise ValueError("no ENTRY computation: is this HLO text?")
    head = text.split("\n", 1)[0]
    alias = re.search(r"input_output_alias=\{(.*?)\}, \w+=", head)
    return Module(computations, entry, alias.group(1).count("-alias") if alias else 0)


def _op(line: str) -> Op:
    found = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
    if found is None:
        raise ValueError(f"not an HLO instruction: {line.strip()[:80]}")
    rest = line[found.end() :]
    end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    start = rest.index("(")
    end = _closing(rest, start)
    inside = re.sub(r"/\*.*?\*/", "", rest[start + 1 : end - 1])
    operands = tuple(re.findall(r"%([\w.\-]+)", inside) or re.findall(r"[\w.\-]+", inside))
    results = tuple(
        Array(dtype, tuple(int(d) for d in dims.split(",") if d))
        for dtype, dims in ARRAY.findall(kind)
    )
    return Op(found.group(2), rest[:start], results, operands, rest[end:], bool(found.group(1)))


def _closing(text: str, start: int) -> int:
    """The index after the parenthesis that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index + 1
    raise ValueError(f"unbalanced parentheses: {text[:80]}")
