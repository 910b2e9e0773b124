"""Writes a region as Triton or C++ source; builds, caches and launches the kernel."""
