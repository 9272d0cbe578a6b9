"""The version, in a file that packaging reads without importing jax, and those it ran with."""

import importlib.metadata

__version__ = "0.1.0"


def installed(*packages: str) -> dict[str, str]:
    """This package's version and those of the packages named."""
    found = {name: importlib.metadata.version(name) for name in packages}
    return {"eagle3_jax": __version__, **found}
