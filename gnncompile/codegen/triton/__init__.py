"""Writes a region as Triton source, and builds, keeps and launches the kernels."""
