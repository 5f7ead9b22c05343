"""docs/verdicts.csv: what each diagnosis says of each release."""
