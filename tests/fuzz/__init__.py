"""A fuzzer: random programs over nodes, edges and graphs must give the same results compiled and eager.

``python -m tests.fuzz --count 200`` tries 200 programs, and prints the first finding as a small, runnable script.
"""
