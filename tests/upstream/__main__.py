"""Run upstream's own tests of a checkout, without and with megapatch, and compare how each of them ends.

    python -m upstream FOLDER [SUITE ...] [--out FOLDER] [--ranks N]

FOLDER is a checkout of Megatron-LM or Megatron-Bridge, of which a SUITE is named in `SUITES`. Prints a table with a
row for each suite. A test that ends otherwise with megapatch is run twice more in both ways; one that differs each
time, and that differences.txt does not name, is printed, and the exit code is 1.
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
    "moe": [f"{UNIT}/transformer/moe/test_{name}*.py" for name in ("aux_loss", "routers", "qb_routing", "moe_layer")],
    "parallel_state": [f"{UNIT}/test_parallel_state.py", f"{UNIT}/test_process_groups_config.py"],
    "training": [
        *(f"{UNIT}/test_{name}.py" for name in ("training", "checkpointing", "start_eval_at_iter", "eval_batch_size")),
        f"{UNIT}/test_num_microbatches_calculator.py",
        f"{UNIT}/test_wrap_model_chunks_with_ddp.py",
        f"{UNIT}/tensor_parallel/test_random.py",
        f"{UNIT}/training/**/test_*.py",
        f"{UNIT}/**/test_rerun_state_machine*.py",
    ],
    "bridge": [f"{UNIT}/{name}/**/test_*.py" for name in ("training", "peft")],
}
"""Files by suite. A pattern without files, and a suite without any, is not of that release."""

PATIENCE = 150
"""Seconds without a line of results after which a test hangs: longer than some timeouts of collectives (30 s)."""
WAYS = {"without": "", "with": "1"}
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
    command = [sys.executable, "-m", "pytest", "-p", "upstream.plugin", "-p", "no:cacheprovider", "-W", "ignore", "-q"]
    command += ["--continue-on-collection-errors"]
    processes = []
    for rank in range(ranks):
        with (folder / f"log{rank}").open("ab") as log:
            environment.update(RANK=str(rank), LOCAL_RANK=str(rank))
            processes.append(
                subprocess.Popen(
                    [*command, *files], cwd=checkout, env=environment, stdout=log, stderr=log, start_new_session=True
                )
            )
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
    tests = without.keys() | with_megapatch.keys()
    nothing = ("missing", {}, "")
    return sorted(test for test in tests if without.get(test, nothing)[0] != with_megapatch.get(test, nothing)[0])


def expected(text):
    """Return the reasons of differences.txt, by test: lines of a test, two spaces and a reason."""
    lines = (line.split("  ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {test: reason.strip() for test, reason in lines}


def row(suite, without, with_megapatch, differ, seconds):
    """Return the suite's row of the table."""

    def ends(results):
        counts = collections.Counter(outcome for outcome, _, _ in results.values())
        return " / ".join(str(counts[name]) for name in ("passed", "failed", "skipped"))

    reached = collections.Counter(patch for _, calls, _ in with_megapatch.values() for patch in calls)
    patches = ", ".join(f"{patch} {count}" for patch, count in reached.most_common()) or "none: it proves nothing"
    calling = sum(1 for _, calls, _ in with_megapatch.values() if calls)
    cells = (suite, len(without), ends(without), ends(with_megapatch), len(differ), calling, patches, f"{seconds:.0f} s")
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
    print("| suite | tests | passed / failed / skipped without | with | different | call patches | tests by patch | time |")
    print("| --- " * 8 + "|", flush=True)
    reasons, unexpected = expected(DIFFERENCES.read_text()), []
    for suite in options.suites or SUITES:
        files = sorted({str(f.relative_to(checkout)) for pattern in SUITES[suite] for f in checkout.glob(pattern)})
        if not files:
            continue
        begin = time.monotonic()
        without, with_megapatch = _both(checkout, files, out / suite, options.ranks)
        differ = different(without, with_megapatch)
        for again in ("again", "a third time") if differ else ():
            differ = [test for test in different(*_both(checkout, differ, out / suite / again, options.ranks))]
            if not differ:
                break
        print(row(suite, without, with_megapatch, differ, time.monotonic() - begin), flush=True)
        unexpected += [(test, without.get(test), with_megapatch.get(test)) for test in differ if test not in reasons]
    for test, *ends in unexpected:
        print(f"\n{test}")
        for way, end in zip(WAYS, ends, strict=True):
            print(f"  {way} megapatch: {end[0] if end else 'not collected'}\n{end[2] if end else ''}")
    return 1 if unexpected else 0


def _both(checkout, files, folder, ranks):
    return [run(checkout, files, folder / way, patched, ranks) for way, patched in WAYS.items()]


if __name__ == "__main__":
    sys.exit(main())
