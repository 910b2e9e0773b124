"""Packages: one file that holds a model and its kernels, for servers without Python."""
