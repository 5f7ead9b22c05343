"""The command line: megapatch doctor, list, explain, run and demo."""
