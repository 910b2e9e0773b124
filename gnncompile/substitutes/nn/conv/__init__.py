"""Substitutes for PyG's layers with typed edges, without their loop over boolean masks (whose sizes depend on data).

What is not PyG's own layer on a plain edge list (a subclass with another message, a sparse matrix) is traced as
written.
"""
