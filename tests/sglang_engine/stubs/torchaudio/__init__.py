"""Importable and nothing else: the wheels on PyPI do not load beside a CPU build of torch."""

__version__ = "2.11.0"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing


def _missing(*_args, **_kwargs):
    raise NotImplementedError("a stand-in for imports only")
