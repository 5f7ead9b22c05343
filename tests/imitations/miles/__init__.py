"""An imitation of miles, whose code is slime's under another name."""
