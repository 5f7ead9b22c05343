"""Asks the diagnoses of one project's sites about a release, in a rank, which is for it alone.

``cells`` are by patch and module; ``errors`` say what could not be looked at, or cannot be watched by the audit.
CUDA has stubs, and what the projects import of others has stand-ins of the tests' rigs. No diagnosis looks at
those.
"""

import importlib
import sys
from pathlib import Path

import megapatch
from megapatch._python.finding import find_module

from .releases import project_of

ABSENT = ("absent", "no such module")
DOES_WITHOUT = {"skyrl": ("cloudpickle",), "skyrl-train": ("cloudpickle",)}
"""Modules that a project imports if they are there, and without which it fails later, on something else."""


def look(project):
    """(cells, errors) of the project that can be imported here."""
    sites = [(one.patch.name, site) for one in megapatch.report().patches for site in one.sites]
    modules = dict.fromkeys(site.module for _, site in sites if project_of(site.module) == project)
    here = [module for module in modules if find_module(module)]
    errors = {}
    for module in list(here):
        try:
            importlib.import_module(module)
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and error.name == module:
                here.remove(module)  # only the finder of stand-ins has it
                continue
            errors[module] = f"{module} cannot be imported: {type(error).__name__}: {error}"
    cells = []
    for one in megapatch.report().patches:
        for site in one.sites:
            if site.module not in modules or site.module in errors:
                continue
            verdict = (site.verdict, site.reason) if site.module in here else ABSENT
            of_the_audit = one.patch.name.startswith("audit.")
            if verdict[0] is None or (of_the_audit and verdict[0] not in ("needed", "absent")):
                errors[site.module] = f"{one.patch.name} at {site.module} is {site.status.value}: {site.reason}"
            if not of_the_audit:
                cells.append([one.patch.name, site.module, *verdict])
    return cells, list(errors.values())


def lacks(project):
    """Say what of DOES_WITHOUT is not installed."""
    missing = [name for name in DOES_WITHOUT.get(project, ()) if find_module(name) is None]
    return [f"importing {project} takes {name}, which is not installed here" for name in missing]


def find(project):
    """From now on the project can be imported, without what it needs and no diagnosis asks for."""
    if project == "megatron-bridge":
        importlib.import_module("rigs.megatron.bridge").find_bridge()
        importlib.import_module("rigs.megatron.exporters").find_conversions()
    elif project in ("mbridge", "mcore-bridge"):
        importlib.import_module("rigs.megatron.exporters").find_exporters()
    elif project in ("slime", "miles"):
        importlib.import_module("rigs.slime.train").find_slime()
    elif project in ("skyrl", "skyrl-train"):
        importlib.import_module("rigs.skyrl.releases").find_skyrl()
    elif project == "verl":
        importlib.import_module("rigs.verl.engine").find_verl()
    elif project == "ms-swift":
        importlib.import_module("rigs.ms_swift.trainer").find_swift()
    elif project == "areal":
        importlib.import_module("rigs.areal.engine").find_areal()
    elif project == "roll":
        importlib.import_module("rigs.roll.strategy").find_roll()
    elif project == "nemo-rl":
        _find_nemo_rl()


def _find_nemo_rl():
    rig = importlib.import_module("rigs.nemo_rl.worker")
    others = ["nemo_automodel", "vllm"]
    if not (Path(rig.CHECKOUT) / "nemo_rl/models/policy/workers").is_dir():  # up to v0.5.0
        rig.WORKER = rig.WORKER.replace(".workers", "")
    if not find_module("megatron.training"):  # which its own fork of Megatron has, up to v0.5.0
        others += ["megatron.inference", "megatron.training"]
    importlib.import_module("rigs.nemo_rl.dtensor").find_workers()
    backported = "NeMoAutoModelForTokenClassification"  # NeMo-RL insists that Automodel has none
    sys.modules[f"nemo_automodel.{backported}"] = None
    stand_ins = importlib.import_module("rigs.stand_ins")

    def make(module, name):
        if name == backported:
            raise AttributeError(name)
        return stand_ins.Anything(name, (), {})

    sys.meta_path.insert(0, stand_ins.StandIns(others, make))


def cells_and_errors(rank, world_size, project, folders):
    """(cells, errors) of the project in these folders, in a rank that has imported nothing of it."""
    sys.path[:0] = folders
    if errors := lacks(project):
        return [], errors
    find(project)
    megapatch.audit.start()
    return look(project)
