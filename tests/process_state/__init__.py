"""The inventory of what outlives a model in Megatron, Megatron-Bridge and the frameworks: docs/process-state.csv.

scan   finds it in a package's sources
table  the file, which people write: what each entry depends on, its key, who resets it, and a verdict

tests/pages/process_state.py makes a page of it. `python -m process_state PROJECT FOLDER` prints what a release has
and the file lacks, and the other way round.
"""
