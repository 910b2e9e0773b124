"""The region IR: its nodes, builder, verifier, printer, reference interpreter and gradient."""
