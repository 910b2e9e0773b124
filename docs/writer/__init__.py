"""Makes parts of the documentation from the code, and checks links and blocks of code."""
