class ImageReadMode:
    RGB = "RGB"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing


def _missing(*_args, **_kwargs):
    raise NotImplementedError("a stand-in for imports only")
