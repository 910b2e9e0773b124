"""Writes a region as Triton or C++ source, and builds, keeps and launches the kernel."""
