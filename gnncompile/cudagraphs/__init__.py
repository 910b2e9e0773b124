"""Captures forward, backward and whole steps in CUDA graphs, and replays them."""
