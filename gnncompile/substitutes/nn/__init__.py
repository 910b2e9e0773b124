"""Substitutes for modules of ``torch_geometric.nn``."""
