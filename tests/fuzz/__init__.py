"""Random programs over nodes, edges and graphs: what eager computes, a compiled model computes.

``python -m tests.fuzz --count 200`` tries 200 programs; it prints the first finding as a shrunken, runnable script.
"""
