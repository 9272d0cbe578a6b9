"""Attention: the reference, the kernel for GPUs, and which of them runs."""
