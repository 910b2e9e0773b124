"""Benchmarks of gnncompile against eager PyTorch and `torch.compile`: `python -m benchmarks --help`.

Correctness comes before speed: a row with wrong outputs or gradients gets no time.
"""
