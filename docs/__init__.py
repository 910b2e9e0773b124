"""The documentation: pages by hand, and :mod:`docs.writer`, which makes those parts of it that code knows best."""
