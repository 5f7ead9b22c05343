"""ROLL's strategy, and what is run with it."""
