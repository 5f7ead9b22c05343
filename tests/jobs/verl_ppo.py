"""verl's main_ppo, whose trainer's process and workers are actors of a local Ray that it starts.

verl_ppo.py OVERRIDES. Rollouts, rewards, the engine's side of a weight sync and the logger are ours.
"""

import sys

from rigs.jobs.local_ray import local_ray
from verl.trainer import main_ppo

if __name__ == "__main__":
    with local_ray(start=False, num_cpus=8) as options:
        sys.argv += [f"++ray_kwargs.ray_init.{name}={value}" for name, value in options.items()]
        main_ppo.main()
