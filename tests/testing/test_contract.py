"""The contract finds what is wrong with a patch; each of these has one thing wrong."""

from __future__ import annotations

import functools
import random
import sys
import types

import pytest

from megapatch._layers import MARK
from megapatch.patch import ABSENT, FIXED, NEEDED, Patch, Site, Verdict, unpatched
from megapatch.testing import check_contract

DOC = "Colours say that they were repaired."


def verdict_of(module, function="rgb_to_hsv"):
    """The defect, for these tests: black is (0.0, 0.0, 0)."""
    if unpatched(getattr(module, function)).__name__ == function:
        return Verdict(NEEDED, "it says black")
    return Verdict(FIXED, "it does not")


def repaired(function):
    @functools.wraps(function)
    def patched_function(*args, **kwargs):
        return "repaired", function(*args, **kwargs)

    return patched_function


def works(function="rgb_to_hsv"):
    import colorsys

    assert getattr(colorsys, function)(0, 0, 0)[0] == "repaired"


def make_patch(name, diagnose=verdict_of, factory=repaired, target="rgb_to_hsv", module="colorsys"):
    site = Site(module=module, diagnose=diagnose, replace={target: factory})
    return Patch(name=f"test.{name}", doc=DOC, upstream="https://example.com/1", sites=(site,))


def test_a_good_patch_keeps_it():
    check_contract({make_patch("good"): works})


# ------------------------------------------------------------------------ one mistake each
def careless(module):
    random.random()
    return verdict_of(module, "rgb_to_hls")


def imports(module):
    """Leaves its trace the first time only."""
    sys.modules.setdefault("megapatch_contract_trace", types.ModuleType("megapatch_contract_trace"))
    return Verdict(FIXED, "it does not")


def blind(module):
    """Looks at the patched function: it sees its own repair."""
    patched = hasattr(module.hls_to_rgb, MARK)
    return Verdict(FIXED if patched else NEEDED, "it says black")


def moody(module):
    """Depends on what else was imported before."""
    held = "megapatch_contract_holder" in sys.modules
    return Verdict(ABSENT if held else NEEDED, "it says black")


def denies(module):
    return Verdict(FIXED, "upstream has repaired it")


def exaggerates(module):
    return Verdict(NEEDED, "it says black")


def unwrapped(function):
    return lambda *arguments: ("repaired", function(*arguments))


def idle(function):
    @functools.wraps(function)
    def patched_function(*args):
        return function(*args)

    return patched_function


def narrow(function):
    """Knows today's parameters only."""

    @functools.wraps(function)
    def patched_function(text):
        return "repaired", function(text)

    return patched_function


def dropping(function):
    @functools.wraps(function)
    def patched_function(text, **kwargs):
        return "repaired", function(text)

    return patched_function


def for_good(function):
    """Changes more than its target, which restore() does not know of."""
    sys.modules["colorsys"].ONE_THIRD = 0.3
    return repaired(function)


def does_nothing():
    pass


def hex_works():
    import quopri

    assert quopri.unhex(b"1F")[0] == "repaired"


def is_hex_works():
    import quopri

    assert quopri.ishex(b"1")[0] == "repaired"


def needs(function):
    return functools.partial(works, function)


def test_what_is_wrong_is_told():
    sites = make_patch("undocumented", denies).sites
    undocumented = Patch(name="test.undocumented", doc="No sentence", upstream="?", sites=sites)
    broken = {
        make_patch("careless", careless, target="rgb_to_hls"): needs("rgb_to_hls"),
        make_patch("imports", imports): does_nothing,
        make_patch("blind", blind, target="hls_to_rgb"): needs("hls_to_rgb"),
        make_patch("moody", moody, target="hsv_to_rgb"): needs("hsv_to_rgb"),
        make_patch("denies", denies, target="rgb_to_hsv"): needs("rgb_to_hsv"),
        make_patch("exaggerates", exaggerates, target="rgb_to_yiq"): does_nothing,
        make_patch("unwrapped", exaggerates, unwrapped, target="yiq_to_rgb"): needs("yiq_to_rgb"),
        make_patch("idle", exaggerates, idle, target="_v"): needs("_v"),
        make_patch("for-good", verdict_of, for_good): works,
        make_patch("narrow", exaggerates, narrow, "unhex", "quopri"): hex_works,
        make_patch("dropping", exaggerates, dropping, "ishex", "quopri"): is_hex_works,
        undocumented: does_nothing,
    }
    with pytest.raises(AssertionError) as caught:
        check_contract(broken)
    told = str(caught.value)
    for expected in (
        "test.careless: its diagnosis changes Python's random numbers",
        "test.imports: its diagnosis changes the modules that are loaded",
        "test.blind: once patched, its verdict is fixed (",
        "held by name: test.moody at colorsys is ",
        "test.denies: its scenario fails without the patch, although the diagnosis says that it is not needed",
        "test.exaggerates: its scenario works without the patch, although the diagnosis says that it is needed",
        "colorsys:yiq_to_rgb has another signature: (*arguments)",
        "colorsys:yiq_to_rgb has lost its name or docstring",
        "colorsys:yiq_to_rgb cannot be pickled by pickle",
        "test.idle: its scenario fails with the patch",
        "test.narrow: its scenario fails once upstream adds a keyword to its targets, which it must pass on",
        "test.dropping: quopri:ishex does not pass on a keyword that upstream may add",
        "test.for-good: restore() leaves colorsys:ONE_THIRD changed",
        "test.undocumented: the first line of its docstring is not a sentence",
        "test.undocumented: its upstream is not the URL of an issue or pull request: ?",
    ):
        assert expected in told, told
    assert "test.good" not in told
