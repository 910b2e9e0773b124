"""Passes for models over one part of a graph: index spaces, and one rule per operation on rows that parts share."""
