"""The README and the doctor's page say what is so."""

from __future__ import annotations

import re
from pathlib import Path

from megapatch import report
from megapatch.patch import Status

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCTOR = (ROOT / "docs" / "doctor.md").read_text()


def test_the_commands_to_set_it_up_stand_alone():
    blocks = re.findall(r"^```sh\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert blocks == ['pip install ".[demo]" && megapatch demo\n', "pip install tox && tox\n"]


def test_ci_runs_the_command_for_users():
    assert "pip install tox && tox\n" in README
    steps = (ROOT / ".ci" / "run").read_text()
    assert "\npip install tox && tox\n" in steps
    assert steps.rstrip().splitlines()[-1].startswith("tox -p 2 -m full ")


def test_every_status_is_explained():
    for status in Status:
        assert f"| `{status.value}` |" in DOCTOR


def test_every_key_of_the_json_is_documented():
    def keys(found):
        for key, value in found.items():
            yield key
            for entry in value if isinstance(value, list) else ():
                yield from keys(entry) if isinstance(entry, dict) else ()

    for key in keys(report().to_dict()):
        assert f"`{key}`" in DOCTOR, key
