"""Substitutes for PyG's layers with typed edges. PyG loops over boolean masks, which make data-dependent sizes.

A substitute serves PyG's own layer on a plain edge list. A subclass with another message, or a layer on a sparse
matrix, is traced as written.
"""
