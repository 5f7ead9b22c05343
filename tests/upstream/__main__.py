"""Run upstream's own tests of a checkout, without and with megapatch, and compare how each of them ends.

    python -m upstream FOLDER [SUITE ...] [--out FOLDER] [--ranks N] [--audit]

FOLDER is a checkout of Megatron-LM; with Megatron on PYTHONPATH also of Megatron-Bridge, or of verl. Prints a
table with a row for each of `SUITES`, and how many tests reached each patch. Files with tests that end otherwise
with megapatch are run twice more in both ways. --audit runs those that passed once more, with the audit, whose
findings fail a test. The exit code is 1 if a test differs each time, or fails with the audit, and differences.txt
does not name it. Tests that have a result in --out are not run again.
"""

from __future__ import annotations

import argparse
import collections
import functools
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
        f"{UNIT}/transformer/moe/test_{name}*.py"
        for name in ("aux_loss", "routers", "qb_routing", "moe_layer", "token_d")
    ],
    "attention": [f"{UNIT}/transformer/test_attention.py"],
    "resharding": [f"{UNIT}/resharding/test_*.py"],
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
    "verl": ["tests/**/test_*_on_cpu.py"],
}
"""Files by suite. A pattern without files, and a suite without any, is not of that release."""


Ended = collections.namedtuple("Ended", "outcome calls why", defaults=({}, ""))
"""How a test ended: its outcome, the calls of patched functions by file, and its error."""
PATIENCE = 150
"""Seconds without a line of results after which a test hangs: longer than some timeouts of collectives (30 s)."""
WAYS = {"without": "", "with": "1"}
AUDIT = "audit"
HEAD = "| suite | tests | passed / failed / skipped without | with | different | call patches | audit | time |"
DIFFERENCES = Path(__file__).with_name("differences.txt")


# ------------------------------------------------------------------------------------------ one run
def run(checkout, files, folder, patched, ranks, but=()):
    """Run test files in one way, but not some tests, and return how each test ended."""
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        results = _results(folder, ranks)
        (folder / "done.json").write_text(json.dumps([*results, *but]))
        if _wait(_start(checkout, files, folder, patched, ranks), folder) or results == _results(folder, ranks):
            return _results(folder, ranks)


def _start(checkout, files, folder, patched, ranks):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MEGAPATCH_")}
    folders = (checkout, checkout / "src", Path(__file__).parents[1], environment.get("PYTHONPATH", ""))
    path = os.pathsep.join(map(str, folders))
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
    """Return how each test ended: with the worst outcome of any rank; one without an end has failed."""
    found = {}
    for rank in range(ranks):
        path = folder / f"{rank}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            told = json.loads(line)
            by_rank = found.setdefault(told.pop("test"), {})
            by_rank[rank] = Ended(**{"outcome": "failed", "why": "did not end", **told})
    results = {}
    for test, by_rank in found.items():
        ends = [by_rank.get(rank, Ended("failed", why="did not begin")) for rank in range(ranks)]
        worst = min(ends, key=lambda end: ("failed", "skipped", "passed").index(end.outcome))
        calls = sum((collections.Counter(end.calls) for end in ends), collections.Counter())
        results[test] = worst._replace(calls=calls)
    return results


# ------------------------------------------------------------------------------------------ the verdict
def compare(run_suite, files, folder):
    """Run files without and with megapatch; return how their tests ended, and which differ each of three times."""
    ends = [run_suite(files, folder / way, patched) for way, patched in WAYS.items()]
    differ = different(*ends)
    for again in ("again", "a third time"):
        if files := sorted({test.partition("::")[0] for test in differ}):
            found = different(*(run_suite(files, folder / again / way, patched) for way, patched in WAYS.items()))
            differ = [test for test in differ if test in found]
    return ends, differ


def different(without, with_megapatch):
    """Return the tests that end otherwise with megapatch; one that was not collected has no end."""
    one, other = ({(test, end.outcome) for test, end in results.items()} for results in (without, with_megapatch))
    return sorted({test for test, _ in one ^ other})


def expected(text):
    """Return the reasons of differences.txt, by test: lines of a test, two spaces and a reason."""
    lines = (line.split("  ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {test: reason.strip() for test, reason in lines}


def row(suite, without, with_megapatch, differ, audited, seconds):
    """Return the suite's row of the table."""
    counts = [collections.Counter(end.outcome for end in ends.values()) for ends in (without, with_megapatch)]
    ends = [" / ".join(str(count[name]) for name in ("passed", "failed", "skipped")) for count in counts]
    calls = sum(bool(end.calls) for end in with_megapatch.values()) or "none: it proves nothing"
    failed = sum(end.outcome == "failed" for end in audited.values())
    audit = f"{failed} of {len(audited)}" if audited else ""
    cells = (suite, len(without), *ends, len(differ), calls, audit, f"{seconds:.0f} s")
    return f"| {' | '.join(map(str, cells))} |"


def reached(results):
    """Return in words how many tests of all suites reached each file of patches, and which files none did."""
    counts = collections.Counter(name for ends in results for end in ends.values() for name in end.calls)
    patches = {path.stem for path in (Path(__file__).parents[2] / "megapatch/patches/megatron").glob("[a-z]*.py")}
    by_patch = ", ".join(f"{name} {count}" for name, count in counts.most_common())
    return f"Tests that reached a patch: {by_patch}.\nNot reached: {', '.join(sorted(patches - counts.keys()))}."


def main():
    parser = argparse.ArgumentParser(prog="python -m upstream", description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path, metavar="FOLDER")
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(SUITES))
    parser.add_argument("--out", type=Path, help="where results and logs are kept")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--audit", action="store_true")
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    if not (checkout / "tests").is_dir():
        parser.error(f"{options.checkout}: expected a checkout that has tests")
    out = (options.out or Path(tempfile.mkdtemp())).resolve()
    print(f"{HEAD}\n{'| --- ' * (HEAD.count('|') - 1)}|", flush=True)
    reasons, unexpected, results = expected(DIFFERENCES.read_text()), [], []
    for suite in options.suites or SUITES:
        files = sorted({str(f.relative_to(checkout)) for pattern in SUITES[suite] for f in checkout.glob(pattern)})
        if not files:
            continue
        begin, run_suite = time.monotonic(), functools.partial(run, checkout, ranks=options.ranks)
        ends, differ = compare(run_suite, files, out / suite)
        seconds, audited = time.monotonic() - begin, {}
        if options.audit:
            passed = {test: end for test, end in ends[-1].items() if end.outcome == "passed"}
            audited = run_suite(files, out / suite / AUDIT, AUDIT, but=ends[-1].keys() - passed.keys())
            differ += different(passed, audited)
        print(row(suite, *ends, differ, audited, seconds), flush=True)
        results.append((*ends, audited))
        unexpected += [(test, *results[-1]) for test in differ if test not in reasons]
    print(f"\n{reached([with_megapatch for _, with_megapatch, _ in results])}")
    for test, *ends in unexpected:
        print(f"\n{test}")
        for way, by_test in zip((*WAYS, AUDIT), ends, strict=True):
            if test in by_test:
                print(f"  {way}: {by_test[test].outcome}\n{by_test[test].why}")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
