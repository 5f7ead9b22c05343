"""How `megapatch run` reaches the Python processes below a command."""
