"""Finds out which parts of PyG are supported by running them: ``python -m gnncompile support``."""
