"""The state of every patch in this process, as text, as JSON and as facts that ranks compare."""
