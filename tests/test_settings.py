"""What users type into the environment."""

from __future__ import annotations

import pytest

from megapatch._engine.settings import Settings

NAMES = ["megatron.forward-pre-hook", "megatron.train-reentry", "slime.train-reentry"]


def off(**environment):
    settings = Settings.from_environment({f"MEGAPATCH_{name}": value for name, value in environment.items()})
    return [name for name in NAMES if settings.why_disabled(name)], settings.complaints(NAMES)


@pytest.mark.parametrize(
    ("environment", "disabled"),
    [
        ({}, []),
        ({"DISABLE": "", "ONLY": ""}, []),
        ({"DISABLE": "megatron.train-reentry"}, NAMES[1:2]),
        ({"DISABLE": " slime.* , *.forward-pre-hook,"}, [NAMES[0], NAMES[2]]),
        ({"DISABLE": "*"}, NAMES),
        ({"ONLY": "megatron.*"}, NAMES[2:]),
        ({"ONLY": "megatron.*", "DISABLE": "*.train-reentry"}, NAMES[1:]),
    ],
)
def test_names_and_globs(environment, disabled):
    assert off(**environment) == (disabled, [])


def test_an_unknown_name_is_said_once_with_near_matches():
    assert off(DISABLE="megatron.forward-prehook,xyz", ONLY="slime.*")[1] == [
        "MEGAPATCH_DISABLE: no patch is called 'megatron.forward-prehook'; "
        "did you mean megatron.forward-pre-hook or megatron.train-reentry?",
        f"MEGAPATCH_DISABLE: no patch is called 'xyz'; known patches: {', '.join(NAMES)}.",
    ]


def test_a_family_needs_an_asterisk():
    assert off(DISABLE="megatron")[1] == [
        "MEGAPATCH_DISABLE: no patch is called 'megatron'; did you mean megatron.*?"
    ]


def test_the_reason_names_the_variable_and_what_was_typed():
    assert Settings(disable=("m*",)).why_disabled("me.too") == "switched off by MEGAPATCH_DISABLE=m*"
    assert Settings(only=("a", "b")).why_disabled("me.too") == "not named by MEGAPATCH_ONLY=a,b"


@pytest.mark.parametrize("variable", ["STRICT", "NO_ENTRY_POINTS"])
def test_switches(variable):
    for value, on in {
        "": False,
        "0": False,
        " no ": False,
        "OFF": False,
        "1": True,
        "True": True,
        "yes": True,
    }.items():
        settings = Settings.from_environment({f"MEGAPATCH_{variable}": value})
        assert (getattr(settings, variable.lower()), settings.complaints(NAMES)) == (on, [])
    settings = Settings.from_environment({f"MEGAPATCH_{variable}": "perhaps"})
    assert getattr(settings, variable.lower())
    assert settings.complaints(NAMES) == [f"MEGAPATCH_{variable}=perhaps is neither 1 nor 0; it is taken for 1"]
