"""An audit is one object: the next one begins with nothing, and no module keeps anything beside it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from rigs.audit import running_audit
from rigs.imported import run_with_megatron
from rigs.megatron.options import BOTH, UNPATCHED

import megapatch
from megapatch import audit
from megapatch.testing import init_parallel, tiny_gpt

FILES = sorted(Path(audit.__file__).parent.glob("*.py"))


# ------------------------------------------------------------------------ the next audit
def used_again(model, step):
    """Step on gradients that are added to those of the last step."""
    model.forward_backward(step)
    model.optimizer.step()


def read(model, step):
    """Read parameters that a step may have left to be gathered."""
    model.chunks[0].state_dict()


def read_too_early(model, step):
    model.train_step(step)
    read(model, step)


DEFECTS = {  # options, the defect, a sign of it that takes knowledge of the last step, and the rule
    "used again": ({}, used_again, used_again, "fresh-gradients"),
    "read too early": (BOTH, read_too_early, read, "gathered-when-read"),
}


def found():
    return {each.rule: (each.step, each.count) for each in (*audit.findings(), *audit.notes())}


def restarted(options, defect, sign, rule):
    audit.start(every=1)
    megapatch.restore("*")  # the audit stays
    model = tiny_gpt(**options)
    for step in range(3):
        defect(model, step)
    first = found()
    audit.stop()
    defect(model, 3)
    stopped = found()
    audit.start(every=1)
    begun = found()
    sign(model, 4)
    unknown = found()
    defect(model, 5)
    again = found()
    audit.stop()
    return first, stopped, begun, unknown, again


def job(rank, world_size):
    init_parallel()
    return {name: restarted(*defect) for name, defect in DEFECTS.items()}


@pytest.fixture(scope="module")
def ranks():
    return run_with_megatron(job, 2, env=UNPATCHED)


@pytest.mark.parametrize("name", DEFECTS)
def test_an_audit_knows_nothing_of_the_one_before_and_watches_the_same_model(ranks, name):
    *_, rule = DEFECTS[name]
    for defects in ranks:
        first, stopped, begun, unknown, again = defects[name]
        assert first.keys() == {rule}
        assert stopped == first  # nothing more is found
        assert begun == unknown == {}
        assert again.keys() == {rule}
        assert again[rule][0] == 1  # step
        assert again[rule][1] < first[rule][1]


def test_findings_stay_until_the_next_start(nothing_left):
    audit.start()
    running_audit().ledger.report("stepped-once", "again", "it steps again")
    audit.start()  # only changes its settings
    audit.stop()
    audit.stop()  # does nothing
    assert len(audit.findings()) == 1
    audit.start()
    assert audit.findings() == []
    audit.stop()


# ------------------------------------------------------------------------ the modules
IMMUTABLE = {
    "MappingProxyType",
    "ParamSpec",
    "Reader",
    "SideTable",
    "TypeVar",
    "getLogger",
    "object",
    "str",
    "timedelta",
    "tuple",
}
"""Calls whose result a module may keep. In a side table are facts about objects, gone with them."""
PROCESS = ("__init__.py", "_PROCESS")
"""The one place that knows the audit of this process."""


def kept(value):
    """Yield what is mutable, or may be, among the values that a module or a class keeps."""
    if isinstance(value, ast.Tuple):
        for element in value.elts:
            yield from kept(element)
    elif isinstance(value, ast.Call):
        name = value.func.attr if isinstance(value.func, ast.Attribute) else ast.unparse(value.func)
        if name not in IMMUTABLE:
            yield value
    elif not isinstance(value, (ast.BinOp, ast.Constant, ast.JoinedStr, ast.Name, ast.UnaryOp, type(None))):
        yield value


def mutables(path):
    """Yield (file, text) of whatever a module of the audit keeps beside the Audit."""
    tree = ast.parse(path.read_text())
    bodies = [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    classes = {node.name for node in bodies[1:]}
    for statement in (statement for body in bodies for statement in body.body):
        if isinstance(statement, (ast.Assign, ast.AnnAssign)):
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            is_type = isinstance(statement, ast.AnnAssign) and ast.unparse(statement.annotation) == "TypeAlias"
            if ast.unparse(target) != "__all__" and not is_type:
                yield from ((path.name, ast.unparse(target)) for _ in kept(statement.value))
        for decorator in getattr(statement, "decorator_list", ()):
            if "cache" in ast.unparse(decorator):
                yield path.name, statement.name
    for node in ast.walk(tree):
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            yield path.name, ast.unparse(node)
        is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_set and ast.unparse(node.value) in classes | {"cls"}:
            yield path.name, ast.unparse(node)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_module_keeps_anything_beside_the_audit(path):
    assert list(mutables(path)) == [PROCESS] * (path.name == PROCESS[0])


@pytest.mark.parametrize(
    "source",
    [
        "seen = []",
        "seen: dict[str, int] = {}",
        "seen = weakref.WeakSet()",
        "pair = (1, [])",
        "class Counts:\n    seen = set()",
        "class Counts:\n    seen = 0\n\ndef note():\n    Counts.seen += 1",
        "def note():\n    global seen",
        "@functools.cache\ndef seen(): ...",
    ],
)
def test_anything_else_that_is_kept_is_noticed(tmp_path, source):
    (tmp_path / "module.py").write_text(source)
    assert len(list(mutables(tmp_path / "module.py"))) == 1
