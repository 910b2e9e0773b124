"""How it is measured: correctness first, then time, memory and compiles."""
