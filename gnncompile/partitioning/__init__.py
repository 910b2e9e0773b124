"""Cuts one graph into parts, one for each process: parts of nodes, their halos, and losses over all parts."""
