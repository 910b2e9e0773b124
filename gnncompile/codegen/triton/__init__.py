"""Writes a region as Triton source; builds, caches and launches the kernels."""
