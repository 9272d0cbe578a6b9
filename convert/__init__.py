"""Command-line converters: `python -m convert.from_torch`, `python -m convert.from_gguf`."""
