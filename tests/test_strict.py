"""MEGAPATCH_STRICT: what needs attention is an error, and stays one."""

from __future__ import annotations

import importlib
import sys

import pytest
from rigs.command import run
from rigs.engine import TARGET, activated, make_engine, make_patch, status_of

from megapatch import StrictError
from megapatch._engine import strict
from megapatch.patch import UNKNOWN, Verdict


@pytest.fixture(autouse=True)
def _nobody_is_kept_out_afterwards(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(strict, "_finder", strict._KeepsOut())


def refuse(module):
    return Verdict(UNKNOWN, "it whispers otherwise")


@pytest.mark.parametrize("bug", [{"diagnose": refuse}, {"diagnose": lambda module: 1 / 0}])
def test_the_import_fails_and_so_does_every_later_one(modules, bug):
    name = modules.write(TARGET)
    engine = activated(make_patch(name, **bug), strict_value="1")
    for _ in range(3):
        with pytest.raises(StrictError):
            importlib.import_module(name)
        with pytest.raises(StrictError):
            engine.apply()
        assert name not in sys.modules
    assert status_of(engine) in ("refused", "failed")


def test_the_error_names_the_patch_the_reason_and_how_to_disable_it(modules):
    name = modules.write(TARGET)
    activated(make_patch(name, diagnose=refuse), strict_value="1")
    for _ in range(2):
        with pytest.raises(StrictError) as caught:
            importlib.import_module(name)
        assert str(caught.value) == (
            f"test.louder is refused at {name}: it whispers otherwise (MEGAPATCH_STRICT makes this an error; "
            "MEGAPATCH_DISABLE=test.louder does without the patch)"
        )


def test_code_around_optional_imports_does_not_swallow_it(modules):
    name = modules.write(TARGET)
    user = modules.write(f"try:\n    import {name}\nexcept ImportError:\n    pass\n", stem="user")
    activated(make_patch(name, diagnose=refuse), strict_value="1")
    for _ in range(2):
        with pytest.raises(StrictError):
            importlib.import_module(user)


@pytest.mark.parametrize("again", ["import {package}.{name}", "from {package} import {name}"])
def test_a_module_that_was_there_before_is_kept_out_from_then_on(modules, again):
    package = modules.write("", stem="package")
    (modules.folder / f"{package}.py").unlink()
    (modules.folder / package).mkdir()
    (modules.folder / package / "inner.py").write_text(TARGET)
    importlib.import_module(name := f"{package}.inner")
    engine = make_engine(make_patch(name, diagnose=refuse), strict_value="1")
    with pytest.raises(StrictError):
        engine.activate()
    with pytest.raises(StrictError):
        engine.apply()
    with pytest.raises(StrictError):
        exec(again.format(package=package, name="inner"), {})


def test_what_is_fine_is_not_affected(modules):
    good, bad = modules.write(TARGET), modules.write(TARGET)
    activated(make_patch(good), make_patch(bad, diagnose=refuse, name="test.other"), strict_value="1")
    assert importlib.import_module(good).greet("you") == "hello you!"
    with pytest.raises(StrictError, match=r"test\.other"):
        importlib.import_module(bad)


def test_a_disabled_patch_is_no_error(modules):
    name = modules.write(TARGET)
    make_engine(make_patch(name, diagnose=refuse), strict_value="1", disable=("test.louder",)).activate()
    assert importlib.import_module(name).greet("you") == "hello you"


def test_an_overwritten_target_makes_every_apply_an_error_until_it_is_in_place_again(modules):
    target = importlib.import_module(name := modules.write(TARGET))
    engine = activated(make_patch(name), strict_value="1")
    ours = target.greet
    target.greet = lambda who: "shout"
    for _ in range(2):
        with pytest.raises(StrictError, match="overwritten"):
            engine.apply()
    assert importlib.import_module(name) is target
    target.greet = ours
    engine.apply()


# ------------------------------------------------------------------------ the package, in processes of its own
BROKEN = "class DistributedDataParallel:\n    pass\n"
MODULE = "megatron.core.distributed.distributed_data_parallel"


@pytest.fixture
def broken_megatron(fake_megatron):
    return fake_megatron(BROKEN)


def test_importing_megapatch_after_a_target_fails_each_time_and_patches_nothing_twice(broken_megatron):
    script = f"""
import sys, {MODULE}
sys.modules["keep"] = sys.modules["{MODULE}"]
for attempt in range(2):
    try:
        import megapatch
    except Exception as error:
        print(type(error).__name__, "megatron.forward-pre-hook is refused" in str(error))
try:
    import {MODULE}
except Exception as error:
    print(type(error).__name__)
"""
    shown = run("-c", script, path=broken_megatron, MEGAPATCH_STRICT="1")
    assert shown.stdout.splitlines() == ["StrictError True", "StrictError True", "StrictError"], shown.stderr


def test_doctor_reports_as_ever(broken_megatron):
    shown = run("doctor", path=broken_megatron, MEGAPATCH_STRICT="1")
    assert shown.returncode == 1
    assert "not in place: megatron.forward-pre-hook" in shown.stderr
    assert "StrictError" not in shown.stderr
    assert "Traceback" not in shown.stderr


def test_a_value_that_means_nothing_is_said_and_taken_for_yes(broken_megatron):
    script = f"import megapatch\ntry:\n    import {MODULE}\nexcept megapatch.StrictError:\n    print('strict')"
    shown = run("-c", script, path=broken_megatron, MEGAPATCH_STRICT="maybe")
    assert shown.stdout == "strict\n"
    assert "MEGAPATCH_STRICT=maybe is neither 1 nor 0; it is taken for 1" in shown.stderr
