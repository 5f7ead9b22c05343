"""Run upstream's own tests of a checkout, without and with megapatch, and compare how each of them ends.

    python -m upstream FOLDER [SUITE ...] [--out FOLDER] [--ranks N]

FOLDER is a checkout of Megatron-LM or Megatron-Bridge. Prints a table with a row for each of `SUITES`. Files with
tests that end otherwise with megapatch are run twice more in both ways. The exit code is 1 if a test differs each
time, and differences.txt does not name it.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

UNIT = "tests/unit_tests"
SUITES = {
    "distributed": [f"{UNIT}/distributed/test_*.py"],
    "dist_checkpointing": [f"{UNIT}/dist_checkpointing/test_*.py", f"{UNIT}/dist_checkpointing/models/test_*.py"],
    "optimizer": [f"{UNIT}/optimizer/test_*.py", f"{UNIT}/test_*optimizer*.py"],
    "pipeline_parallel": [f"{UNIT}/pipeline_parallel/test_*.py"],
    "moe": [
        f"{UNIT}/transformer/moe/test_{name}*.py" for name in ("aux_loss", "routers", "qb_routing", "moe_layer")
    ],
    "parallel_state": [f"{UNIT}/test_parallel_state.py", f"{UNIT}/test_process_groups_config.py"],
    "training": [
        f"{UNIT}/test_training.py",
        f"{UNIT}/test_checkpointing.py",
        f"{UNIT}/test_*eval*.py",
        f"{UNIT}/test_num_microbatches_calculator.py",
        f"{UNIT}/test_wrap_model_chunks_with_ddp.py",
        f"{UNIT}/tensor_parallel/test_random.py",
        f"{UNIT}/training/**/test_*.py",
        f"{UNIT}/**/test_rerun_state_machine*.py",
    ],
    "peft": [f"{UNIT}/peft/**/test_*.py"],
}
"""Files by suite. A pattern without files, and a suite without any, is not of that release."""

PATIENCE = 150
"""Seconds without a line of results after which a test hangs: longer than some timeouts of collectives (30 s)."""
NOT_COLLECTED = ("not collected", {}, "")
WAYS = {"without": "", "with": "1"}
HEAD = "| suite | tests | passed / failed / skipped without | with | different | call patches | by patch | time |"
DIFFERENCES = Path(__file__).with_name("differences.txt")


# ------------------------------------------------------------------------------------------ one run
def run(checkout, files, folder, patched, ranks):
    """Run test files or tests in one way, and return by test its outcome and the calls of patched functions."""
    folder.mkdir(parents=True, exist_ok=True)
    results = {}
    while True:
        processes = _start(checkout, files, folder, patched, ranks)
        ended = _wait(processes, folder)
        before, results = len(results), _results(folder, ranks)
        (folder / "done.json").write_text(json.dumps(list(results)))
        if ended or len(results) == before:
            return results


def _start(checkout, files, folder, patched, ranks):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MEGAPATCH_")}
    path = os.pathsep.join([str(checkout), str(Path(__file__).parents[1]), environment.get("PYTHONPATH", "")])
    environment.update(
        PYTHONPATH=path, UPSTREAM_FOLDER=str(folder), UPSTREAM_PORT=str(port), UPSTREAM_PATCHED=patched,
        WORLD_SIZE=str(ranks), OMP_NUM_THREADS="1", MKL_NUM_THREADS="1",
    )  # fmt: skip
    command = f"{sys.executable} -m pytest -p upstream.plugin -p no:cacheprovider -W ignore --quiet".split()
    command += ["--continue-on-collection-errors", "--override-ini=addopts=", *files]
    settings = {"cwd": checkout, "start_new_session": True}
    processes = []
    for rank in range(ranks):
        with (folder / f"log{rank}").open("ab") as log:
            environment.update(RANK=str(rank), LOCAL_RANK=str(rank))
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, **settings)
            processes.append(process)
    return processes


def _wait(processes, folder):
    """Wait for the ranks, and return whether they came to an end; end them where one died or nothing happens."""
    moved, size = time.monotonic(), -1
    try:
        while any(process.poll() is None for process in processes):
            time.sleep(0.5)
            now = sum(path.stat().st_size for path in folder.glob("*.jsonl"))
            if now != size:
                moved, size = time.monotonic(), now
            died = any(process.poll() not in (None, 0, 1) for process in processes)
            if time.monotonic() - moved > (10 if died else PATIENCE):
                return False
        return all(process.returncode in (0, 1, 5) for process in processes)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()


def _results(folder, ranks):
    """Return by test ``(outcome, calls, why)``: an outcome is the worst of any rank, and failed without an end."""
    found = {}
    for rank in range(ranks):
        path = folder / f"{rank}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            told = json.loads(line)
            by_rank = found.setdefault(told["test"], {})
            by_rank[rank] = (told.get("outcome", "failed"), told.get("calls", {}), told.get("why", "did not end"))
    results = {}
    for test, by_rank in found.items():
        ends = [by_rank.get(rank, ("failed", {}, "did not begin")) for rank in range(ranks)]
        outcome = next(name for name in ("failed", "skipped", "passed") if name in {end[0] for end in ends})
        calls = sum((collections.Counter(end[1]) for end in ends), collections.Counter())
        results[test] = (outcome, calls, next(end[2] for end in ends if end[0] == outcome))
    return results


# ------------------------------------------------------------------------------------------ the verdict
def different(without, with_megapatch):
    """Return the tests that end otherwise with megapatch; one that was not collected has no end."""
    one, other = ({(test, end[0]) for test, end in results.items()} for results in (without, with_megapatch))
    return sorted({test for test, _ in one ^ other})


def expected(text):
    """Return the reasons of differences.txt, by test: lines of a test, two spaces and a reason."""
    lines = (line.split("  ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {test: reason.strip() for test, reason in lines}


def row(suite, without, with_megapatch, differ, seconds):
    """Return the suite's row of the table."""
    counts = [collections.Counter(outcome for outcome, *_ in ends.values()) for ends in (without, with_megapatch)]
    ends = [" / ".join(str(count[name]) for name in ("passed", "failed", "skipped")) for count in counts]
    calls = [told for _, told, _ in with_megapatch.values() if told]
    reached = collections.Counter(patch for told in calls for patch in told)
    patches = ", ".join(f"{patch} {count}" for patch, count in reached.most_common()) or "none: it proves nothing"
    cells = (suite, len(without), *ends, len(differ), len(calls), patches, f"{seconds:.0f} s")
    return f"| {' | '.join(map(str, cells))} |"


def main():
    parser = argparse.ArgumentParser(prog="python -m upstream", description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path, metavar="FOLDER")
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(SUITES))
    parser.add_argument("--out", type=Path, help="where results and logs are kept")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    if not (checkout / UNIT).is_dir():
        parser.error(f"{options.checkout}: expected a checkout that has {UNIT}")
    out = (options.out or Path(tempfile.mkdtemp())).resolve()
    print(f"{HEAD}\n{'| --- ' * (HEAD.count('|') - 1)}|", flush=True)
    reasons, unexpected = expected(DIFFERENCES.read_text()), []
    for suite in options.suites or SUITES:
        files = sorted({str(f.relative_to(checkout)) for pattern in SUITES[suite] for f in checkout.glob(pattern)})
        if not files:
            continue
        begin = time.monotonic()
        without, with_megapatch = _both(checkout, files, out / suite, options.ranks)
        differ = different(without, with_megapatch)
        for again in ("again", "a third time") if differ else ():
            files = sorted({test.partition("::")[0] for test in differ})
            found = different(*_both(checkout, files, out / suite / again, options.ranks)) if files else []
            differ = [test for test in differ if test in found]
        print(row(suite, without, with_megapatch, differ, time.monotonic() - begin), flush=True)
        unexpected += [(test, without, with_megapatch) for test in differ if test not in reasons]
    for test, *results in unexpected:
        print(f"\n{test}")
        for way, ends in zip(WAYS, results, strict=True):
            outcome, _, why = ends.get(test, NOT_COLLECTED)
            print(f"  {way} megapatch: {outcome}\n{why}")
    return 1 if unexpected else 0


def _both(checkout, files, folder, ranks):
    return [run(checkout, files, folder / way, patched, ranks) for way, patched in WAYS.items()]


if __name__ == "__main__":
    sys.exit(main())
