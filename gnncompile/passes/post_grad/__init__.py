"""The passes that run after differentiation, on each graph."""
