"""Patches of modules made for a test, to test the engine with."""

import functools

from megapatch._engine.engine import Engine
from megapatch._engine.settings import Settings
from megapatch.patch import NEEDED, Patch, Site, Verdict

TARGET = """
def greet(name):
    return "hello " + name

class Greeter:
    def greet(self, name):
        return "hello " + name
"""


def louder(greet):
    @functools.wraps(greet)
    def patched_greet(*args):
        return greet(*args) + "!"

    return patched_greet


def needed(module):
    return Verdict(NEEDED, "it is too quiet")


def make_patch(module, *paths, diagnose=needed, factory=louder, name="test.louder", changes_numbers=False):
    replace = {path: factory for path in paths or ("greet",)}
    site = Site(module=module, diagnose=diagnose, replace=replace)
    return Patch(
        name=name,
        doc="Greetings are loud.\n\nSymptom   whispers",
        upstream="https://example.com/issues/1",
        sites=(site,),
        changes_numbers=changes_numbers,
    )


def make_engine(*patches, **settings):
    return Engine(patches, Settings(**{"quiet_value": "1", **settings}))


def activated(*patches, **settings):
    """Return an engine that has been activated."""
    engine = make_engine(*patches, **settings)
    engine.activate()
    return engine


def status_of(engine, position=0):
    record = engine.records[position]
    record.refresh()
    return record.status.value
