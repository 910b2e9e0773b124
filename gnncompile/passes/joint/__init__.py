"""The passes that run between differentiation and its division into a forward graph and a backward graph."""
