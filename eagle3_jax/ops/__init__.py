"""Attention: the reference and, on a GPU, the kernel."""
