"""What became of every patch in this process, as text, JSON and facts that ranks compare."""
