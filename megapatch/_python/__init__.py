"""What is read of Python: modules, loaded or not; layers of functions; attributes at a path; the user's lines."""
