"""Replacements pass on all arguments, also those that no Megatron has today and a fork may add."""

import ast
from pathlib import Path

import megapatch.patches

FOLDER = Path(megapatch.patches.__file__).parent


def calls_that_drop(source):
    """Return the calls that pass on *args or **kwargs of the function around them, but not both."""
    return [
        f"line {call.lineno}: {ast.unparse(call)}"
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.FunctionDef) and function.args.vararg and function.args.kwarg
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and len(passed_on(call, function.args)) == 1
    ]


def passed_on(call, arguments):
    starred = {ast.unparse(one.value) for one in call.args if isinstance(one, ast.Starred)}
    starred |= {ast.unparse(one.value) for one in call.keywords if one.arg is None}
    return starred & {arguments.vararg.arg, arguments.kwarg.arg}


def test_no_patch_drops_an_argument():
    files = {path.relative_to(FOLDER): path.read_text() for path in FOLDER.rglob("*.py")}
    assert {path: dropped for path, source in files.items() if (dropped := calls_that_drop(source))} == {}


def test_a_call_that_drops_some_is_seen():
    wrapper = "def patched(self, *args, **kwargs):\n    return original(self, {})"
    assert calls_that_drop(wrapper.format("*args, **kwargs")) == []
    assert len(calls_that_drop(wrapper.format("*args"))) == len(calls_that_drop(wrapper.format("**kwargs"))) == 1
