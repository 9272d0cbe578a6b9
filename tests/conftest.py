"""Paths and converted drafts for every test, and the check of skipped tests."""

import gc
import os
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
sys.path.insert(0, str(TESTS))

import skip_check  # noqa: E402


def pytest_addoption(parser: pytest.Parser):
    skip_check.add_option(parser)
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="also the tests marked so: more draws, prompts and trees of what the others show",
    )


def pytest_configure(config: pytest.Config):
    skip_check.register(config)
    import jax

    # Commands in their own process compile anew, not from what this machine ran before.
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"
    # A broadcast over a missing axis, or a silent change of dtype, is a bug in this code.
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]):
    # The long files first, so that no worker is left alone with them at the end.
    items.sort(key=lambda item: item.parent.get_closest_marker("smollm2") is None)
    if config.getoption("--exhaustive"):
        return
    left = [item for item in items if item.get_closest_marker("exhaustive") is not None]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item.get_closest_marker("exhaustive") is None]


def pytest_collection_finish():
    """What is imported by now stays: the collector need not walk it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _programs(request: pytest.FixtureRequest):
    """Compiled programs hold memory maps, of which a process may have only so many.

    Most files compile much and run little: without most of XLA's optimisations they take a quarter
    less. Marked ones, and all with `--exhaustive`, are compiled as users run them.
    """
    import jax

    whole = request.node.get_closest_marker("full_compile") is not None
    quick = not whole and not request.config.getoption("--exhaustive")
    jax.config.update("jax_disable_most_optimizations", quick)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def sglang_models() -> Path:
    """The tiny target and its drafts, as PyTorch checkpoints."""
    return TESTS / "data/sglang/models"


@pytest.fixture(scope="session")
def variant_folder(sglang_models, tmp_path_factory):
    """A tiny draft by name; some keep their config.json only and have the plain draft's weights."""
    import shutil

    made = tmp_path_factory.mktemp("variants")

    def folder(name: str) -> Path:
        source = sglang_models / name
        if (source / "model.safetensors").exists():
            return source
        whole = made / name
        if not whole.exists():
            shutil.copytree(source, whole)
            shutil.copy(sglang_models / "draft/model.safetensors", whole)
        return whole

    return folder


@pytest.fixture(scope="session")
def converted(tmp_path_factory):
    """`converted(draft folder, *flags)` runs the converter's command once per argument list."""
    from convert import from_torch

    folder = tmp_path_factory.mktemp("converted")
    done: dict[tuple[str, ...], Path] = {}

    def convert(source: Path, *flags: str) -> Path:
        key = (str(source), *flags)
        if key not in done:
            out = folder / f"{len(done):02d}-{source.name}"
            assert from_torch.main([str(source), "--out", str(out), *flags]) == 0
            done[key] = out
        return done[key]

    return convert


@pytest.fixture(scope="session")
def tiny_target(sglang_models):
    import eagle3_jax

    return eagle3_jax.load_target(sglang_models / "target")


@pytest.fixture(scope="session")
def tiny_draft(sglang_models, tiny_target, converted):
    """The trained tiny draft, through the converter."""
    import eagle3_jax

    folder = converted(sglang_models / "draft", "--target", str(sglang_models / "target"))
    return eagle3_jax.load_draft(folder, target=tiny_target)


@pytest.fixture(scope="session")
def smollm2_target():
    """The demo's target, downloaded and converted when this machine has none."""
    from real_model import smollm2_folder

    import eagle3_jax

    return eagle3_jax.load_target(smollm2_folder())


@pytest.fixture(scope="session")
def smollm2_drafts(smollm2_target, converted, tmp_path_factory):
    """The demo's draft by the owner of its embedding: `target`, or `draft` (a bf16 copy)."""
    import numpy as np
    from real_model import DEMO, smollm2_folder
    from smollm2_goldens import with_own_embedding

    import eagle3_jax

    folder = str(smollm2_folder())
    table = np.asarray(smollm2_target.shared().embedding)
    own = with_own_embedding(table, tmp_path_factory.mktemp("smollm2") / "own_embedding")
    sources = {
        "target": converted(DEMO / "draft", "--target", folder),
        "draft": converted(own, "--target", folder, "--embed", "draft"),
    }
    return {
        owner: eagle3_jax.load_draft(path, target=smollm2_target) for owner, path in sources.items()
    }
