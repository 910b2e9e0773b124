"""Tells a user what the compiler did."""
