"""A grid of correct programs: each runs plain, in processes that never activate megapatch, and with all patches.

Both give the same, to the bit: parameters, main parameters, moments, step counts, schedules, loss scales, losses,
logged ones too, random streams, the bytes of checkpoints, collectives (kind, ranks and order), and exceptions.
A program of which a patch is meant to change numbers names that patch, and what differs.

table    the programs, by name, with the layouts in which each runs
layouts  the layouts
steps    programs of steps, optimizers and schedules
loads    programs of loads and swaps
saves    programs of saves
by_hand  programs of what is done by hand, and with classes of one's own
own_classes  programs with subclasses, wrappers, mocks, hooks, copies and processes of one's own
others  programs in which others hold what patches touch
trainer  what programs build, and what is recorded of it
runs     the job of the ranks
compare  where two records differ

Other programs, of calls one by one, compare more: after each call all that can be reached.

calls    the programs
states   the job of the ranks, and where two of its records differ

test_checkpoints is about those that one process writes and another one reads, of which one has no megapatch.
"""
