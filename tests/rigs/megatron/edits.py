"""Upstream functions as a fork might have edited them, made from the code that is installed.

An edit is a function of the syntax tree of a function's definition. It changes the tree, and returns whether it
found anything to change.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
import types
from unittest import mock

from megapatch._dotted import find


# ------------------------------------------------------------------------------------------ harmless edits
def attribute(function):
    """Read an attribute that the fork has added."""
    first = _parameters(function)[:1]
    return first == ["self"] and _begin(function, "if self.added_by_fork: pass")


def option(function):
    """Read an option that the fork has added to the config, wherever the function gets the config from."""
    code = ast.unparse(function)
    for config in ("self.config", "self.ddp_config", "config"):
        held = config in _parameters(function) if config == "config" else f"{config}." in code
        if held:
            return _begin(function, f"if {config}.added_by_fork: pass")
    return False


def option_of_ddp(function):
    """Read such an option in a method of DistributedDataParallel that reads none."""
    names = ("disable_forward_pre_hook", "enable_forward_pre_hook", "no_sync", "start_grad_sync")
    return function.name in names and _begin(function, "if self.ddp_config.added_by_fork: pass")


def runtime_errors(function):
    """Raise RuntimeError in place of an assertion."""

    class Edit(ast.NodeTransformer):
        edited = False

        def visit_Assert(self, node):
            self.edited = True
            message = [node.msg] if node.msg else []
            error = ast.Call(ast.Name("RuntimeError", ast.Load()), message, [])
            return ast.If(ast.UnaryOp(ast.Not(), node.test), [ast.Raise(error, None)], [])

    edit = Edit()
    edit.visit(function)
    return edit.edited


def profiled(function):
    return _around(
        function, "from torch.profiler import record_function\nwith record_function('added_by_fork'): pass"
    )


def profiled_by_torch(function):
    """The same, with the module's own torch, for which a diagnosis may have a stand-in."""
    uses = any(isinstance(node, ast.Name) and node.id == "torch" for node in ast.walk(function))
    return uses and _around(function, "with torch.profiler.record_function('added_by_fork'): pass")


def logged(function):
    return _begin(
        function,
        "from logging import getLogger as logger_of_fork\nlogger_of_fork('added.by.fork').debug('called')",
    )


def timed(function):
    return _begin(function, "from time import perf_counter as clock_of_fork\nbegun_by_fork = clock_of_fork()")


def guarded(function):
    return _around(function, "try: pass\nfinally: ended_by_fork = True")


def renamed(function):
    """Rename the variables that the function itself assigns."""
    scopes = [node for node in ast.walk(function) if isinstance(node, (ast.FunctionDef, ast.Lambda))]
    kept = {argument for scope in scopes for argument in _parameters(scope)}
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    kept |= {
        name for node in ast.walk(function) if isinstance(node, (ast.Global, ast.Nonlocal)) for name in node.names
    }
    own = {name.id for name in names if isinstance(name.ctx, ast.Store)} - kept
    for name in names:
        if name.id in own:
            name.id = f"{name.id}_of_fork"
    return bool(own)


def looked_up(function):
    """Read attributes of self by getattr()."""

    class Edit(ast.NodeTransformer):
        edited = False

        def visit_Attribute(self, node):
            self.generic_visit(node)
            if isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Name) and node.value.id == "self":
                self.edited = True
                return ast.Call(ast.Name("getattr", ast.Load()), [node.value, ast.Constant(node.attr)], [])
            return node

    edit = Edit()
    function.body = [edit.visit(statement) for statement in function.body]
    return edit.edited


HARMLESS = (
    attribute,
    option,
    option_of_ddp,
    runtime_errors,
    profiled,
    profiled_by_torch,
    logged,
    timed,
    guarded,
    renamed,
    looked_up,
)


# ------------------------------------------------------------------------------------------ harmful edits
def without(text):
    """Return an edit that removes the statements in which the text stands, but keeps what contains them."""

    def edit(function):
        class Edit(ast.NodeTransformer):
            edited = False

            def visit(self, node):
                simple = isinstance(node, ast.stmt) and not hasattr(node, "body")
                if simple and text in ast.unparse(node):
                    self.edited = True
                    return ast.Pass()
                return self.generic_visit(node)

        remover = Edit()
        function.body = [remover.visit(statement) for statement in function.body]
        return remover.edited

    edit.__name__ = f"without {text}"
    return edit


def with_name(old, new):
    """Return an edit that gives a name in the function's code, or a parameter, another one."""

    def edit(function):
        before = ast.dump(function)
        for node in ast.walk(function):
            for field in ("id", "attr", "arg"):
                if getattr(node, field, None) == old:
                    setattr(node, field, new)
        return ast.dump(function) != before

    edit.__name__ = f"{old} is called {new}"
    return edit


def empty(function):
    function.body = [ast.Pass()]
    return True


def another_body(function):
    """Do something else altogether, with what nobody knows."""
    function.body = ast.parse(
        "return self.added_by_fork" if _parameters(function)[:1] == ["self"] else "pass"
    ).body
    return True


# ------------------------------------------------------------------------------------------ making them
@contextlib.contextmanager
def edited(module, path, edit):
    """Put what the edit makes of the function at the path in its place; yields whether it changed anything."""
    owners, _, name = path.rpartition(".")
    owner = find(module, owners)
    found = inspect.getattr_static(owner, name)
    function = inspect.unwrap(found)
    made = None
    if isinstance(function, types.FunctionType):
        with contextlib.suppress(OSError):  # without a source
            made = _make(function, edit)
    if made is None:
        yield False
        return
    with mock.patch.object(owner, name, made):
        yield True


def _make(function, edit):
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    (definition,) = tree.body
    if not isinstance(definition, ast.FunctionDef) or not edit(definition):
        return None
    # What the function has from around it, __class__ of super() above all, are parameters of a function around it.
    outer = ", ".join(function.__code__.co_freevars)
    maker = ast.parse(f"def _make({outer}): return {definition.name}").body[0]
    maker.body.insert(0, definition)
    made: dict = {}
    code = compile(ast.fix_missing_locations(ast.Module([maker], [])), f"<edited {definition.name}>", "exec")
    exec(code, function.__globals__, made)
    return made["_make"](*(cell.cell_contents for cell in function.__closure__ or ()))


def _parameters(function):
    arguments = function.args
    return [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def _begin(function, text):
    function.body[_after_docstring(function) : _after_docstring(function)] = ast.parse(text).body
    return True


def _around(function, text):
    at = _after_docstring(function)
    *before, last = ast.parse(text).body
    last.body = function.body[at:] or [ast.Pass()]
    function.body[at:] = [*before, last]
    return True


def _after_docstring(function):
    return int(ast.get_docstring(function) is not None)
