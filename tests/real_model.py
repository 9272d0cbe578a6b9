"""The real 135M target for tests marked smollm2: the demo's own download and conversion."""

import functools
import importlib.util
from pathlib import Path
from types import ModuleType

DEMO = Path(__file__).parent.parent / "demo"


@functools.cache
def demo_model() -> ModuleType:
    """demo/model.py as a module; demo/ is no package."""
    spec = importlib.util.spec_from_file_location("demo_model", DEMO / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def smollm2_folder() -> Path:
    """The converted target; downloaded when this machine has none yet."""
    return demo_model().ensure_model()
