"""A rank's findings on each release of SkyRL, computed once for all tests of a module."""

import functools

import pytest

from rigs.cells import AUDITED
from rigs.skyrl.releases import RELEASES


def found_once(found_by, modules):
    """Return a function of a release: what found_by(release, module) finds in a rank, or that it has no module."""
    return functools.cache(
        lambda release: release.ranks(_found_in_module, 1, release, modules, found_by, env=AUDITED)[0]
    )


def _found_in_module(rank, world_size, release, modules, found_by):
    try:
        module = release.module_of(modules)
    except ModuleNotFoundError as error:
        return str(error)
    return found_by(release, module)


def of_those_that_need(names, found_for):
    """Return a fixture: what was found of each release with one of these names, and of the checkout.

    A checkout that does not need the patch skips the test.
    """

    @pytest.fixture(params=[one for one in RELEASES if one.name in (*names, "checkout")], ids=lambda one: one.name)
    def needed(request):
        found = found_for(request.param)
        if request.param.name == "checkout" and (isinstance(found, str) or found["verdict"][0] != "needed"):
            pytest.skip("this checkout does not need it")
        return found

    return needed
