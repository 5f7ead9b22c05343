"""A split train step in NeMo-RL: its four calls, for each kind of its workers and policies.

The patches `nemo_rl.split-train-step*` add these to NeMo-RL's classes, and name them as text, so that none is
loaded before NeMo-RL is. They are plain functions of importable modules: a worker class that Ray pickles by value
refers to them by these names, and unpickling it imports megapatch.
"""
