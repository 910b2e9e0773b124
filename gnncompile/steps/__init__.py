"""Training steps that are compiled and replayed as a whole."""
