"""The command line, `python -m gnncompile`, with one file per command."""
