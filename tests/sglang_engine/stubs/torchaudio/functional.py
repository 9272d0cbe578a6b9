from torchaudio import __getattr__, _missing

__all__ = ["__getattr__", "_missing"]
