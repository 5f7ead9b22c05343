"""SkyRL's RayPPOTrainer.train(), set up by its BasePPOExp as main() does it, in a local Ray.

skyrl_ppo.py [--with-megapatch] OVERRIDES. Rollouts, the engine and the tracker are ours.
"""

import functools
import multiprocessing
import sys

if "--with-megapatch" in sys.argv:
    sys.argv.remove("--with-megapatch")
    from megapatch.reach.ray import compose_into_init

    compose_into_init()  # as docs/skyrl.md has it
import hydra
from rigs.jobs import skyrl
from rigs.jobs.local_ray import local_ray
from skyrl_train.entrypoints import main_base
from skyrl_train.utils import trainer_utils, validate_cfg


class Experiment(main_base.BasePPOExp):
    def get_train_dataset(self):
        return skyrl.Prompts()

    def get_generator(self, *ignored):
        return skyrl.Generator()

    def get_tracker(self):
        return skyrl.Tracker()


def main():
    main_base.create_remote_inference_engines_from_config = lambda *ignored: [skyrl.Engine()]
    load = trainer_utils.StatefulDataLoader
    trainer_utils.StatefulDataLoader = functools.partial(_load_here, load)
    with hydra.initialize_config_dir(main_base.config_dir, version_base=None):
        config = hydra.compose("ppo_base_config", sys.argv[1:])
    validate_cfg(config)
    Experiment(config).run()


def _load_here(load, *args, num_workers, **options):
    return load(*args, num_workers=0, **options)


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn", force=True)
    with local_ray():
        main()
