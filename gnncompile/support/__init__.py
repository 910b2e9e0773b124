"""What of PyG is supported, found out by running it: ``python -m gnncompile support``."""
