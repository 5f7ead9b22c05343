"""Of a stack the user's own lines are shown, innermost first: not torch's, not Megatron's core, not ours."""

from __future__ import annotations

import threading

from megapatch._python import places

STACK = {  # outermost first
    "/job/train.py": True,
    "/lib/megatron/training/training.py": True,
    "/lib/megatron/core/pipeline_parallel/schedules.py": False,
    "/job/core/forward_step.py": True,
    "/lib/torch/autograd/function.py": False,
    places.__file__: False,
    "<string>": False,
}


def called_through(files):
    function = places.user_lines
    for file in reversed(files):
        names = {"inner": function}
        exec(compile("def call():\n    return inner()", file, "exec"), names)
        function = names["call"]
    return function


def test_the_lines_of_the_user():
    found = []
    thread = threading.Thread(target=lambda: found.extend((called_through([*STACK])(), places.user_lines())))
    thread.start()
    thread.join()
    lines, (here, *others) = found
    assert here.code.co_filename == __file__ and len(others) < 5  # to the end of the stack
    expected = [file for file, is_shown in STACK.items() if is_shown][::-1]
    assert [line.code.co_filename for line in lines[:3]] == expected
    assert places.in_words(lines)[-1] == "/job/core/forward_step.py:2 in call"


def test_they_are_the_innermost_six():
    files = [f"/job/{number}.py" for number in range(10)]
    assert [line.code.co_filename for line in called_through(files)()] == files[:3:-1]
