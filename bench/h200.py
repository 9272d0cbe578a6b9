"""An H200 to compile for, on a machine that has none.

XLA takes the card's description as text. Programs compiled for it cannot run here; what the
compiler made of them can be read.
"""

import atexit
import dataclasses
import functools
import os
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

CARD = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32
  shared_memory_per_block: 49152  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048  core_count: 132  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000  l2_cache_size: 62914560  clock_rate_ghz: 1.98
  device_memory_size: 150000000000
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 28 patch: 1 }
device_description_str: "NVIDIA H200"
"""


def mesh(data: int = 1, model: int = 1) -> Mesh:
    """A mesh of H200s that exist only for the compiler."""
    described = topologies.get_topology_desc(
        platform="cuda",
        topology_name="h200",
        target_config=CARD,
        topology=f"1x1x{data * model}",
    )
    devices = np.asarray(described.devices).reshape(data, model)
    return Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))


def place(shapes: Any, on: Mesh, specs: Any = None) -> Any:
    """The same shapes with a sharding each: `specs` in the same structure, or one copy a device."""
    if specs is None:
        specs = jax.tree.map(lambda _: PartitionSpec(), shapes)
    return jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(on, spec)),
        shapes,
        specs,
    )


@functools.cache
def _mosaic_folder() -> Path:
    """Where Mosaic GPU, which compiles its kernels itself, puts their PTX: one for the process."""
    folder = Path(tempfile.mkdtemp(prefix="mosaic-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ |= {"MOSAIC_GPU_DUMP_TO": str(folder), "MOSAIC_GPU_DUMP_PTX": "1"}
    return folder


_mosaic: dict[str, list[str]] = {}


def mosaic_ptx(hlo: str) -> list[str]:
    """PTX of a program's Mosaic kernels. A kernel met before is not compiled again."""
    hashes = re.findall(r'kernel_hash = "((?:[^"\\]|\\.)*)"', hlo)
    new = sorted(_mosaic_folder().glob("*.ptx"))
    texts = [path.read_text() for path in new]
    for path in _mosaic_folder().iterdir():
        path.unlink()
    for name in hashes:
        _mosaic.setdefault(name, texts)
    return [text for name in dict.fromkeys(hashes) for text in _mosaic[name]]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program for an H200.

    Attributes:
      hlo: the optimised HLO. ptx: one text a kernel. thunks: the order of launches, with grids,
      shared memory and which of them one CUDA graph holds.
      temporaries: bytes. seconds: of tracing and compiling.
    """

    hlo: str
    ptx: tuple[str, ...]
    thunks: str
    temporaries: int
    seconds: float


def compile_for(function: Any, *args: Any, on: Mesh, **options: Any) -> Compiled:
    """Compiles a jitted function; static arguments are passed as they are.

    Args:
      options: XLA's debug options, by name.
    """
    start = time.perf_counter()
    _mosaic_folder()
    with tempfile.TemporaryDirectory() as folder:
        # Without the abstract mesh jax 0.11 and later do not know which card Pallas compiles for.
        with jax.sharding.use_abstract_mesh(on.abstract_mesh):
            lowered = function.trace(*args).lower(lowering_platforms=("cuda",))
        dumps = {"xla_dump_to": folder, "xla_dump_emitter_re": "ptx"}
        compiled = lowered.compile(compiler_options=dumps | options)
        texts = [path.read_text() for path in sorted(Path(folder).glob("*.ptx"))]
        texts = [text for text in texts if text.strip()]  # that of the constants may be empty
        # Programs of a few launches have no passes over thunks, so no list after them.
        texts += mosaic_ptx(compiled.as_text())
        thunks = max(Path(folder).glob("*.thunk_sequence*.txt"), key=lambda path: len(path.name))
        order = thunks.read_text()
    return Compiled(
        hlo=compiled.as_text(),
        ptx=tuple(texts),
        thunks=order,
        temporaries=compiled.memory_analysis().temp_size_in_bytes,
        seconds=time.perf_counter() - start,
    )
