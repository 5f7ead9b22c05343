"""The four calls of a split train step, for each kind of NeMo-RL's workers and policies.

Plain functions of importable modules: a worker class that Ray pickles by value refers to them by these names, and
whoever unpickles it imports megapatch.
"""
