"""Runs the kernels of regions in each step."""
