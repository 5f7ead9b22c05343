"""Change one small thing of the package at a time, and see whether a test notices: ``tox -e mutants -- ROOM``.

Why not a tool that others keep:

- **cosmic-ray** 8.7 removes no statement, no guard, no argument and no ``finally``, which is what goes wrong in a
  package of wrappers. It mutates annotations (44 of its 139 mutations of streaming/_pump.py), runs one test
  command a session, takes no sample, and names a mutation by a running number, so that a list of equivalents is
  wrong after the next edit.
- **mutmut** 3.8 keeps all mutations of a function in one module behind a trampoline. Here names, signatures and
  sources of functions are part of what is tested: a patch installs plain functions, and diagnoses read sources. It
  first runs the whole suite to learn which tests to run, and that takes more than an hour.

With either one the operators, the choice of tests, the sample and the list of equivalents would still be ours.
All that remains is to write a file and start pytest.

- `find`: which mutations a file has.
- `chosen_tests.txt`: which tests notice a mutation of a file most likely, the cheapest first.
- `equivalents.txt`: mutations that change nothing, with the reason.
- `runs`: a copy of the tree, and pytest in it.
"""
