"""Benchmarks of gnncompile against eager PyTorch and `torch.compile`: `python -m benchmarks --help`.

Correctness comes before speed: no time is reported for a row whose outputs or gradients are not right.
"""
