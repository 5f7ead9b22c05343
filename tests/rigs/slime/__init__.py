"""slime's (or miles') train(), actor and group."""
