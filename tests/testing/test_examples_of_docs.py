"""The examples of docs/ that have a file name work as printed."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rigs.megatron.save import minor
from rigs.where import needs_megatron

from megapatch.testing import run_ranks
from megapatch.testing._tiny_gpt import _work_without_transformer_engine as work_without_transformer_engine

pytestmark = needs_megatron
DOCS = Path(__file__).parent.parent.parent / "docs"


def example(page, name):
    return re.search(rf"<!-- {re.escape(name)} -->\n```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)[1]


def test_losses_of_two_stages(tmp_path):
    (tmp_path / "test_losses.py").write_text(example("testing.md", "test_losses.py"))
    shown = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert "1 passed" in shown.stdout


def training(rank, world_size, source):
    work_without_transformer_engine()  # which megatron-core 0.12 needs for the distributed optimizer
    found = {"__name__": "train_loop"}
    exec(source, found)
    return found["train"]()


def test_a_loop_of_your_own():
    first, second = run_ranks(training, 2, example("megatron.md", "train_loop.py"))
    assert len(first) == 8
    for losses in (first, second):
        assert_learns(losses)


def assert_learns(losses):
    """The first loss is about that of guessing one of 64 tokens: Megatron divides one that is no copy."""
    assert losses[0] == pytest.approx(math.log(64), abs=0.1)
    assert losses[-1] < 0.8 * losses[0]


def test_the_page_shows_that_loss():
    shown = re.search(r"^step 0: loss (\S+),", (DOCS / "first-ten-minutes.md").read_text(), re.MULTILINE)[1]
    assert float(shown) == pytest.approx(math.log(64), abs=0.1)


def test_the_first_ten_minutes_without_a_gpu(tmp_path):
    if minor() == 12:
        pytest.skip("takes Transformer Engine for the distributed optimizer")
    for page, name in (("megatron.md", "train_loop.py"), ("first-ten-minutes.md", "on_cpu.py")):
        (tmp_path / name).write_text(example(page, name))

    def run(*arguments, **environment):
        command = [sys.executable, "-m", *arguments]
        environment = {**os.environ, **environment}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
        )

    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node=2")
    trained = run(*torchrun, "on_cpu.py", MEGAPATCH_AUDIT="1", MEGAPATCH_REPORT="report")
    assert trained.returncode == 0, trained.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d: loss (\S+),", trained.stdout, re.MULTILINE)]
    assert len(losses) == 8
    assert_learns(losses)
    assert trained.stderr.count(" applies patches; ") == 1
    assert trained.stderr.count(" patches applied; alike on 2 ranks\n") == 1
    assert lacking(trained.stderr, "on_cpu.py", 2) == []
    compared, audited = run("megapatch", "doctor", "report"), run("megapatch", "audit", "report")
    assert (compared.returncode, audited.returncode) == (0, 0)
    assert lacking(compared.stdout + audited.stdout, "megapatch audit report") == []
    if minor() >= 17:  # older ones raise other errors
        assert lacking(run("megapatch", "doctor").stdout, "megapatch doctor") == []


def lacking(output, command, lines=None):
    """Return the lines that the page shows after a command and its output lacks; numbers do not count."""
    block = (DOCS / "first-ten-minutes.md").read_text().partition(f"{command}\n```")[2].partition("```text\n")[2]
    shown = [masked(line) for line in block.partition("```")[0].splitlines()[:lines] if line != "..."]
    assert shown
    return [line for line in shown if line not in masked(output)]


def masked(text):
    return re.sub(r"\b([0-9a-f]{16}|\d[\w.+]*)", "#", " ".join(text.split()))
