"""AReaL's engine, and what is run with it."""
