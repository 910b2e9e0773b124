"""Writes a region as C++ source, and builds, keeps and calls the kernel."""
