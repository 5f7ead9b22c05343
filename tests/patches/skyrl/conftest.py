"""Fixtures that run once for each release."""

import pytest
from rigs.skyrl.releases import RELEASES


@pytest.fixture(scope="module", params=RELEASES, ids=lambda release: release.name)
def release(request):
    return request.param


@pytest.fixture(params=["early", "late"])
def patched(request, needed):
    """Of what was found (by a fixture of the test's own), that with the patch, activated before or after SkyRL."""
    return needed[request.param]
