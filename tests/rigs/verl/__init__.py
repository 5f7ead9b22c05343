"""verl's engine and checkpoint manager, and what is run with them."""
