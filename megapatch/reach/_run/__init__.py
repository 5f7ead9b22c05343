"""`megapatch run`: reach the Python processes below a command."""
