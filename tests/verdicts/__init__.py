"""docs/verdicts.md: what each diagnosis says of each release."""
