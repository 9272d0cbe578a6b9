"""What a compiled step is made of, and what in it is a fault."""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import hlo
import ptx
from hlo import Module, Op

KERNEL_CALLS = ("__gpu$xla.gpu.triton", "triton_kernel_call", "mosaic_gpu")
"""Parts of the custom-call targets under which Pallas kernels run."""
COUNTERS = ("s4", "u4", "s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64", "pred")


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a program must hold, by its shapes.

    Attributes:
      kernel: the attention kernel's name. calls: how often one round runs it. others: the same of
        the other kernels.
      cache, weights: element counts of one layer's cache and of each large weight, whole and as
        one device has it.
      batch, slots: a mask has more than batch x slots elements.
      budget: bytes of temporaries. donated: arrays of the state, each to be overwritten in place.
      prompt: tokens of a prefill, of which no array may be the square.
      tma: whether the kernel copies by TMA, from the first row of a tile each time.
    """

    kernel: str
    calls: int
    cache: frozenset[int]
    weights: frozenset[int]
    batch: int
    slots: int
    budget: int
    donated: int
    prompt: int | None = None
    tma: bool = False
    others: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Fault:
    """One reason to fail."""

    code: str
    message: str

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


@dataclasses.dataclass
class Row:
    """One compiled program."""

    program: str
    calls: int = 0
    expected_calls: int = 0
    registers: int = 0
    spills: int = 0
    shared: int = 0
    temporaries: int = 0
    collectives: dict[str, int] = dataclasses.field(default_factory=dict)
    collective_bytes: int = 0
    copies: int = 0
    launches: int = 0
    graphs: int = 0
    blocks: int = 0
    seconds: float = 0.0
    faults: list[Fault] = dataclasses.field(default_factory=list)


def examine(
    program: str,
    module: Module,
    kernels: Sequence[ptx.Kernel],
    thunks: str,
    temporaries: int,
    expected: Expected,
    seconds: float = 0.0,
) -> Row:
    """Everything `make check-gpu` says about one program.

    Shared memory is what XLA asks for at the launch: ptxas does not know what is dynamic.

    What runs every round is looked at: the bodies of the entry's while loops where it has any that
    hold the step, else the whole entry.
    """
    names = every_round(module)
    ops = list(module.ops(*names))
    mine = [k for k in kernels if k.name.startswith(expected.kernel)]
    copied = list(copies(module, ops, expected))
    sent = [op for op in ops if op.opcode.removesuffix("-start") in hlo.COLLECTIVES]
    launches, graphs = ptx.launches(thunks)
    own = [launch for launch in launches if launch.name.startswith(expected.kernel)]
    faults = [
        *kernel_faults(kernels, launches),
        *(Fault("TILES", f"{k.name}: {k.within_tiles} copies") for k in mine if k.within_tiles),
        *(Fault("TILES", f"{k.name}: no copy by TMA") for k in mine if expected.tma and not k.tma),
        *(Fault("COPY", text) for text in copied),
        *(Fault("MASK", text) for text in masks(module, expected)),
        *(Fault("HOST", text) for text in host_calls(module)),
    ]
    if temporaries > expected.budget:
        faults.append(Fault("TEMPORARIES", f"{temporaries} bytes, the budget is {expected.budget}"))
    for name, times in {expected.kernel: expected.calls, **expected.others}.items():
        found = sum(is_kernel(op, name) for op in ops)
        if found != times:
            faults.append(Fault("KERNEL", f"{name} is called {found} times, not {times}"))
    if module.aliases < expected.donated:
        faults.append(
            Fault(
                "DONATION",
                f"{module.aliases} of the state's {expected.donated} arrays are written in place",
            )
        )
    return Row(
        program=program,
        calls=sum(is_kernel(op, expected.kernel) for op in ops),
        expected_calls=expected.calls,
        registers=max((k.registers for k in mine), default=0),
        spills=sum(k.spills for k in kernels),
        shared=max((launch.shared for launch in own), default=0),
        temporaries=temporaries,
        collectives=dict(Counter(op.opcode.removesuffix("-start") for op in sent)),
        collective_bytes=sum(op.results[-1].bytes for op in sent),
        copies=len(copied),
        launches=len(launches),
        graphs=graphs,
        blocks=max((launch.blocks for launch in own), default=0),
        seconds=seconds,
        faults=faults,
    )


def every_round(module: Module) -> tuple[str, ...]:
    """The computations one round runs: of the largest loop body, or of a program without one."""
    bodies = [module.run_by(body) for body in module.bodies()]
    whole = module.run_by(module.entry)
    if not bodies:
        return whole
    largest = max(bodies, key=lambda names: sum(1 for _ in module.ops(*names)))
    count = sum(1 for _ in module.ops(*largest))
    outside = sum(1 for _ in module.ops(*module.run_by(module.entry, loops=False)))
    return largest if count > outside else whole


def is_kernel(op: Op, name: str) -> bool:
    """Whether it runs the Pallas kernel of that name; others may mention it in their code."""
    if op.opcode != "custom-call" or not any(part in op.target for part in KERNEL_CALLS):
        return False
    if "mosaic_gpu" in op.target:  # the kernel's function stands in the operation's path
        return f"/{name}/" in op.attributes
    return f'name = "{name}"' in op.attributes


def kernel_faults(kernels: Iterable[ptx.Kernel], launches: Iterable[ptx.Launch]) -> list[Fault]:
    """Spilled registers, and launches that ask for more shared memory than a block can have."""
    spilled = [
        Fault("SPILLS", f"{k.name}: {k.spills} bytes at {k.registers} registers")
        for k in kernels
        if k.spills
    ]
    large = {launch.name: launch.shared for launch in launches if launch.shared > ptx.SHARED_LIMIT}
    return spilled + [
        Fault("SHARED", f"{name}: {shared} bytes, a block has {ptx.SHARED_LIMIT}")
        for name, shared in large.items()
    ]


def copies(module: Module, ops: Iterable[Op], expected: Expected) -> Iterable[str]:
    """Results as large as a cache or a weight that are written as a whole."""
    sizes = [(count, "cache") for count in expected.cache]
    sizes += [(count, "weight") for count in expected.weights]
    for op in ops:
        if op.opcode in hlo.PASSED_ON or is_kernel(op, expected.kernel):
            continue
        for index, array in enumerate(op.results):
            # Padded to a tile it is still that array.
            what = next((w for n, w in sizes if n <= array.count <= 1.05 * n), None)
            if what is None or not array.floating or module.writes_in_place(op, index):
                continue
            yield f"{what}-sized {array} written by {op.opcode} {op.name}{_source(op)}"
            break


def masks(module: Module, expected: Expected) -> Iterable[str]:
    """Anywhere in the program: integers or truth values over rows x slots, a prompt's square."""
    for name, ops in module.computations.items():
        for op in ops:
            for array in op.results:
                mask = (
                    array.dtype in COUNTERS
                    and expected.slots in array.dims
                    and array.count > expected.batch * expected.slots
                )
                if mask or array.dims.count(expected.prompt) > 1:
                    yield f"{array} made by {op.opcode} {op.name} in {name}{_source(op)}"


def host_calls(module: Module) -> Iterable[str]:
    """Anything that waits for the host."""
    for op in module.ops():
        back = op.opcode == "custom-call" and "callback" in op.target
        if back or op.opcode in ("infeed", "outfeed", "send", "recv"):
            yield f"{op.opcode} {op.name} {op.target}".rstrip()


def _source(op: Op) -> str:
    found = re.search(r'op_name="([^"]*)"', op.attributes)
    return f" ({found.group(1)})" if found else ""


def extrapolate(shallow: Row, deep: Row, layers: tuple[int, int], full: int) -> dict[str, float]:
    """Straight through two depths to the whole one: what grows with every layer."""
    low, high = layers
    names = ("calls", "temporaries", "collective_bytes", "copies", "launches")
    found: dict[str, float] = {"layers": full}
    for name in names:
        a, b = getattr(shallow, name), getattr(deep, name)
        found[name] = a + (b - a) * (full - low) / (high - low)
    for kind in shallow.collectives | deep.collectives:
        a, b = shallow.collectives.get(kind, 0), deep.collectives.get(kind, 0)
        found[kind] = a + (b - a) * (full - low) / (high - low)
    return found


HEAD = (
    "program",
    "kernels",
    "regs",
    "spills",
    "shared",
    "temporaries",
    "collectives",
    "copies",
    "blocks",
    "launches",
    "graphs",
    "s",
)


def table(rows: Sequence[Row]) -> str:
    """All programs, one a line."""
    lines = [HEAD]
    for row in rows:
        sent = ", ".join(f"{n} {kind}" for kind, n in row.collectives.items()) or "none"
        lines.append(
            (
                row.program,
                f"{row.calls}/{row.expected_calls}",
                str(row.registers),
                str(row.spills),
                str(row.shared),
                f"{row.temporaries / 2**20:.1f} MiB",
                sent,
                str(row.copies),
                str(row.blocks),
                str(row.launches),
                str(row.graphs),
                f"{row.seconds:.0f}",
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
