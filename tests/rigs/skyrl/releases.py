"""The releases of SkyRL in SKYRL_RELEASES, and the checkout in SKYRL_CHECKOUT.

Each is loaded in processes of its own, since their code has the same names. Packages that play no part in the
tests have stand-ins: inference engines, web servers, datasets, Ray.
"""

import importlib
import inspect
import os
import sys
import typing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from rigs import releases
from rigs.imported import of_family
from rigs.releases import needs
from rigs.stand_ins import Anything, StandIns

STAND_INS = (
    "aiohttp",
    "cloudpathlib",
    "datasets",
    "fastapi",
    "httpx",
    "huggingface_hub",
    "hydra",
    "jaxtyping",
    "loguru",
    "megatron.bridge",
    "mbridge",
    "nvidia_resiliency_ext",
    "omegaconf",
    "orjson",
    "pandas",
    "peft",
    "pybase64",
    "ray",
    "requests",
    "rich",
    "safetensors",
    "skyrl_gym",
    "torchdata",
    "tqdm",
    "transformers",
    "uvicorn",
)


@dataclass(frozen=True)
class Release(releases.Release):
    """A release; `backend` is the package that drives Megatron and engines, `trainer` that of the trainers."""

    @property
    def there(self):
        return self.old or (Path(self.folder) / "skyrl/backends").is_dir()

    @property
    def old(self):
        """Whether it is older than the renaming of the package."""
        return (Path(self.folder) / "skyrl_train").is_dir()

    @property
    def backend(self):
        return "skyrl_train" if self.old else "skyrl.backends.skyrl_train"

    @property
    def trainer(self):
        return "skyrl_train" if self.old else "skyrl.train"

    def file(self, name):
        """The path of a module of the backend."""
        return Path(self.folder) / self.backend.replace(".", "/") / f"{name}.py"

    def has(self, *names):
        return all(self.file(name).exists() for name in names)

    def module_of(self, modules):
        """Import the one of a patch's modules that is of this package, old or new."""
        (name,) = (name for name in modules if name.startswith("skyrl_train." if self.old else "skyrl."))
        return importlib.import_module(name)

    def wrapped(self, chunks, optimizer=None):
        """Return SkyRL's MegatronModelWrapper around these, with the settings that its tests need."""
        module = importlib.import_module(f"{self.backend}.workers.megatron.megatron_model_wrapper")
        reduce_with_adapters = "finalize_model_grads_with_expert_adapter_sync"
        if hasattr(module, reduce_with_adapters):  # Bridge's, around Megatron's, for experts' LoRA adapters
            finalize = importlib.import_module("megatron.core.distributed").finalize_model_grads
            setattr(module, reduce_with_adapters, finalize)
        settings = SimpleNamespace(use_sample_packing=False, remove_microbatch_padding=False)
        settings.trainer = settings
        known = inspect.signature(module.MegatronModelWrapper).parameters
        others = {name: None for name in ("hf_config", "tf_config") if name in known}  # of skyrl-train 0.2.0
        return module.MegatronModelWrapper(
            config=settings, actor_module=chunks, actor_optimizer=optimizer, **others
        )

    def ranks(self, function, world_size, *args, setup=None, **options):
        """Call run_with_megatron in processes that find this release."""
        return self.ranks_of("SKYRL_RELEASE", function, world_size, *args, setup=setup or find_skyrl, **options)


def _within(checkout):
    places = [Path(checkout) / place for place in (".", "skyrl-train", "skyrl")]
    return next(place for place in places if Release("", str(place)).there)


RELEASES = releases.releases("SKYRL", Release, _within)
needs_skyrl = needs("SKYRL", RELEASES)


def has_correctness_fixes(release):
    """Return whether it has SkyRL's PR 1212, by the text of its files, which no diagnosis looks at."""
    return "grad_scale_func" in release.file("workers/megatron/megatron_model_wrapper").read_text()


@of_family("skyrl")
def find_skyrl(real=()):
    """Make the release in SKYRL_RELEASE importable: the setup of a rank. Packages in `real` get no stand-ins."""
    sys.path.insert(0, os.environ["SKYRL_RELEASE"])
    sys.meta_path.insert(0, StandIns(set(STAND_INS) - set(real), lambda module, name: Anything(name, (), {})))
    if sys.version_info < (3, 12):  # pydantic insists, where SkyRL says that 3.11 is good enough
        typing.TypedDict = importlib.import_module("typing_extensions").TypedDict
