"""Writes a region as C++ source; builds, caches and calls the kernel."""
