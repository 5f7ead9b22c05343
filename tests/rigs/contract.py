"""The contract of a framework's patches, in ranks that find its code."""

import functools

from megapatch.testing import check_contract, run_ranks
from rigs.megatron.options import UNPATCHED
from rigs.renames import assert_renames_are_seen


def check_family(patches, scenarios, setup, monkeypatch, **env):
    """Check that each of a family's patches has its scenario, and keeps the contract with these variables set.

    And that no name of the framework's that a patch looks at can change unseen.
    """
    assert scenarios.keys() == set(patches)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert_renames_are_seen(patches[0].family, at_least=6 * len(patches), setup=setup, env={**env, **UNPATCHED})
    check_contract_in(setup, scenarios, monkeypatch)


def check_contract_in(setup, scenarios, monkeypatch):
    """Call check_contract() with its ranks set up by `setup`."""
    monkeypatch.setattr("megapatch.testing._contract.run_ranks", functools.partial(run_ranks, setup=setup))
    check_contract(scenarios)
