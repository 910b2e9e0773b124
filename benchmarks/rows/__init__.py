"""The ways to run what is measured: each is a row of a table."""
