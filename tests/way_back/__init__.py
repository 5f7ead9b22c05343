"""Sequences of what a trainer does besides going forward: loads, aborts, saves, swaps, other models and layouts.

A sequence is data, a list of names of operations, as `search.drawn` draws it, or pasted into a test:

    Sequence("moe", ("step", "save", "step", "abort in the backward pass", "load"))

`plan` says without running anything which steps and loads count after it: an abort or an evaluation does not.
Ranks run the sequence and two more steps, and those two steps in a fresh model that has done only what counts.
Both have to be bit-equal: losses, gradient norms, rates, weights, main parameters, moments, expert biases and
logged losses.

layouts      how the model is divided, what it is made of, and how it is saved
plan         which operation can follow which, what counts of a sequence, and what is known to differ
trainer      a model with its optimizer, schedule and checkpoints, and what a trainer does with them
operations   the operations, by their names
streams      random streams
faults       places in a step that raise
checkpoints  saving and loading, with state dicts or by Megatron's distributed checkpoints
pictures     everything that a step reads, as numbers, and where two of them differ
ranks        the job that the ranks run, and what counts of a sequence, done in a fresh model
search       drawing sequences, and running them
"""
