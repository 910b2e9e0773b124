"""The passes that run before differentiation."""
