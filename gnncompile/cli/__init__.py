"""The command line, `python -m gnncompile`: one file per command."""
