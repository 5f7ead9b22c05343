"""Text that leaves megapatch has no secret, moves no cursor and forges no line, whatever others' text holds."""

from __future__ import annotations

import io
import json
import logging
import string
import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rigs.command import run

from megapatch import _printable
from megapatch._cli.doctor.examination import Examination
from megapatch._cli.doctor.origins import Package
from megapatch._reporting import terminal
from megapatch._reporting.report import PatchReport, Report, SiteReport
from megapatch.patch import PatchInfo, Status

FORGED = "all well: every patch that is needed is in place"
LETTERS = string.ascii_letters + string.digits
ANY = st.text(st.characters(exclude_categories=[]), max_size=30)  # surrogates as well
CONTROLS = st.sampled_from(
    ["\x1b[2J", "\x1b]0;title\x07", "\x9b1A", "\r", "\x08", "\x7f", "\x85", "\u2028", "\u202e"]
)
FORGERIES = st.sampled_from(["\n", "\r\n", "\x0b", "\x0c", "\x1c", "\x85", "\u2029"]).map(lambda end: end + FORGED)
SECRET = st.text(LETTERS, min_size=24, max_size=40).map("zq".__add__)
PASSWORD = st.text(LETTERS + "@:/#?!$%&*+,;='\"()[]{}|~^<>", min_size=8, max_size=30).map(
    lambda text: f"zq{text}qz"
)
WAYS = (
    "https://host.example/x?id=1&token={}&z=2",
    "https://host.example/x?{}",
    "s3://bucket/x#access_token={}",
    "https://{}@host.example/x",
    "HF_TOKEN={}",
    "MY_SERVICE_KEY={}",
    "export AWS_SECRET_ACCESS_KEY='{}'",
    "{{'WANDB_API_KEY': '{}', 'x': 1}}",
    '{{"db_password": "{}"}}',
    '\\"OPENAI_API_KEY\\": \\"{}\\"',
    "serve --api-key {} --port 8000",
    "Authorization: Bearer {}",
    "Authorization: ApiKey {} more",
    "Authorization:\n  ApiKey {}",
    "RuntimeError('Authorization:\\n  ApiKey {}')",
    "'Authorization:\\\\r\\\\n  ApiKey {}\\\\n more'",
    "{{'Authorization': 'Digest user=\"x\", response={}', 'x': 1}}",
    "Command '['python', 'train.py', '--hf-token', '{}']' returned non-zero exit status 1.",
    "['serve', '--token', '{}']",
    "    login(token='{}')",
    "DB_PASS={}",
    "{{'DB_PASS': '{}', 'x': 1}}",
    "RuntimeError('line 1\\nPG_URI={}')",
    "ghp_{}",
    "RuntimeError('line 1\\nghp_{} line 2')",  # as repr() has it
    "RuntimeError('line 1\\npassword={} line 2')",
    "github_pat_{}",
    "hf_{}",
    "sk-proj-{}",
    "glpat-{}",
    "nvapi-{}",
    "eyJhbGciOiJI.{}.x",
    "-----BEGIN OPENSSH PRIVATE KEY-----\n{}\n-----END OPENSSH PRIVATE KEY-----",
)
URLS = ("https://carol:{}@host.example/x", "git+ssh://carol:{}@host.example/x.git", "redis://:{}@host.example:1/0")


def foreign(secret: str) -> st.SearchStrategy[str]:
    """Text of others: anything, with forged lines, controls, and a secret as it may be written."""
    ways = st.sampled_from(WAYS).map(lambda way: way.format(secret))
    unnamed = ANY.filter(lambda text: secret not in text)
    return st.lists(st.one_of(unnamed, CONTROLS, FORGERIES, ways), min_size=1, max_size=5).map(" ".join)


def examination(text: str) -> Examination:
    site = SiteReport(text, Status.FAILED, text, None, (text,), (text,), (text,), (text,), f"Traceback\n{text}")
    site_of_another = site._replace(status=Status.DISABLED, foreign=())
    reports = (
        PatchReport(PatchInfo(f"acme.{text}", text, text, (text,), True), (site,)),
        PatchReport(PatchInfo(f"acme.x.{text}", text, text, (text,), False), (site_of_another,)),
    )
    return Examination(
        report=Report(reports, {"megapatch": text}),
        packages=[Package(text, text, "vcs", text, None)],
        settings=[("MEGAPATCH_DISABLE", text, text)],
        reach={"Ray": text},
        problems=[text],
        exit_code=1,
    )


def printed(found: Examination, monkeypatch) -> dict[str, str]:
    """Return the text that leaves, by the way that it takes."""
    outputs = {}
    for way, say in {
        "text": lambda: terminal.write(found.text(100)),
        "json": lambda: terminal.write_json(found.to_dict()),
        "report": lambda: terminal.write(str(found.report)),
        "data": lambda: print(ascii(found.report.to_dict())),
        "notes": lambda: [terminal.note(problem) for problem in found.problems],
    }.items():
        with monkeypatch.context() as patched:
            output = io.StringIO()
            patched.setattr("sys.stdout", output)
            patched.setattr("sys.stderr", output)
            say()
        outputs[way] = output.getvalue()
    return outputs | {"log": logged(found.problems[0])}


def logged(text: str) -> str:
    output = io.StringIO()
    handler = logging.StreamHandler(output)
    log = logging.getLogger("megapatch")
    log.addHandler(handler)
    try:
        log.warning("x is failed: %s", text)
        log.warning(f"x is failed: {text}\nTraceback\n{text}".replace("%", "%%"))
        try:
            raise RuntimeError(text)
        except RuntimeError:
            log.warning("x", exc_info=True)
    finally:
        log.removeHandler(handler)
    return output.getvalue()


@pytest.fixture(scope="module")
def patching():
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield monkeypatch


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_no_secret_no_control_character_and_no_forged_line_goes_out(patching, data):
    secret = data.draw(SECRET)
    text = data.draw(foreign(secret))
    for way, output in printed(examination(text), patching).items():
        assert secret not in output, way
        assert FORGED not in output.split("\n"), way
        assert not [c for c in output if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") and c != "\n"], way
        assert not set(output) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f"), way
        if way == "json":
            json.loads(output)


@pytest.mark.parametrize("way", ["DB_PASS={}", "MY_PIN={}, 1", "{{'DB_PASS': '{}', 'x': 1}}"])
@pytest.mark.parametrize(
    ("value", "stays"),
    [("12345abc", False), ("no-way-jose", False), ("one", False), ("12345", True), ("no", True), ("-0.5", True)],
)
def test_a_variable_keeps_a_number_and_a_switch_but_no_word_that_begins_as_one(way, value, stays):
    assert (value in _printable.without_secrets(way.format(value))) == stays


@pytest.mark.parametrize("way", WAYS)
def test_a_secret_is_hidden_however_it_is_written(way):
    assert "zqSecret123456789012345" not in _printable.without_secrets(way.format("zqSecret123456789012345"))


@settings(deadline=None)
@given(PASSWORD, st.sampled_from(URLS), ANY, ANY)
def test_no_part_of_a_password_is_left_in_a_url(password, url, before, after):
    cleaned = _printable.clean(f"{before.replace('zq', '')} {url.format(password)} {after.replace('zq', '')}")
    assert "zq" not in cleaned
    assert "host.example" in cleaned


@settings(deadline=None)
@example("Authorization:\nBearer x", "Authorization:\x85Bearer x")
@example("Authorization: Bearer x\nall well", "Authorization: \\nBearer x")
@given(ANY, SECRET.flatmap(foreign))
def test_cleaning_twice_is_cleaning_once(text, secret):
    for clean in (_printable.clean, _printable.one_line, _printable.first_line_at_the_margin):
        for given_text in (text, secret):
            assert clean(clean(given_text)) == clean(given_text)


@pytest.mark.parametrize(
    ("query", "shown"),
    [("?zq", "?***"), ("?raw&id=zq", "?raw&id=***"), ("?id=1&raw&key=zq", "?id=***&raw&key=***")],
)
def test_the_values_of_a_query_are_hidden_and_its_flags_are_not(query, shown):
    assert _printable.clean(f"https://host.example/x{query}") == f"https://host.example/x{shown}"


@pytest.mark.parametrize(
    "text",
    [
        "git+https://github.com/o/r.git@v1.0",
        "https://h.example:8080/p",
        "(see https://github.com/a/b/issues/1#L10).",
        "Missing key (rerun_state_machine_state/shard_0_1): expected key: 'x', found pad_token=0, eos_token: 2",
        "MEGAPATCH_DISABLE=megatron.* MONKEY=1 PWD=/x",
        "TransformerConfig.attention_softmax_in_fp32 is True; did you mean False?",
        "set TORCH_DISTRIBUTED_DEBUG=INFO, NCCL_DEBUG=INFO or MY_FLAG=1, not MY_FLAG=off; {'NUM_GPUS': '8'}",
        "ShardedTensor(key='decoder.layers.0.weight'), token='<pad>', BAD_NAME: of a patch",
        "mail me@example.com at /opt/x@1",
        "b" * 40,  # a commit
    ],
)
def test_ordinary_text_stays(text):
    assert _printable.clean(text) == text


@pytest.mark.parametrize(
    "text",
    [
        *("x y z " * 3000, "a://" * 10_000, "a://b:" * 7000 + "@", "A_" * 6000, "x_-" * 5000, "?=" * 5000),
        *("\\" * 9000, 'KEY=\\"' + "\\" * 20_000, "eyJaaaaaaaa-" * 20_000),
        *("a://b?" + "?" * 20_000 + "=", "a://b?c" + ")" * 20_000 + "&"),
        *("AB_" * 20_000 + "=x", "'authorization': '" * 9000, "token='" * 20_000, "'A_B': '" * 20_000),
    ],
)
def test_long_text_takes_no_long_time(text):
    import time

    started = time.process_time()  # whatever else the machine does
    _printable.clean(text)
    assert time.process_time() - started < 2


def test_a_secret_is_hidden_before_it_is_cut_in_two():
    assert _printable.cut("x" * 20 + " HF_TOKEN=" + "s" * 40, 40) == "x" * 20 + " HF_TOKEN=***"
    assert _printable.cut("x" * 50, 40) == "x" * 37 + "..."


TARGET = """
raise RuntimeError("no GPU\\n" + {0!r} + "\\n\\x1b[31mhttps://carol:pa/ss@host.example/x?sig=abc")
"""


@pytest.mark.parametrize("arguments", [[], ["--json"], ["--report", "-"]], ids=" ".join)
def test_a_target_cannot_print_that_all_is_well(fake_megatron, arguments):
    path = fake_megatron(TARGET.format(FORGED))
    shown = run("doctor", *arguments, path=path, MEGAPATCH_ONLY="megatron.nested-no-sync")
    assert shown.returncode == 2
    output = shown.stdout + shown.stderr
    assert FORGED not in output.splitlines() and "\x1b" not in output and "no GPU" in output
    assert "carol" not in output and "ss@" not in output and "abc" not in output


def test_a_target_cannot_log_that_all_is_well(fake_megatron):
    script = (
        "import logging; logging.basicConfig(level=logging.INFO)\nimport megapatch\n"
        "from megapatch.patches.megatron import forward_pre_hook as patch\n"
        f"def broken(module): raise ZeroDivisionError('x\\n{FORGED}\\n\\x1b[31m')\n"
        "vars(patch.PATCH.sites[0]).update(diagnose=broken)\n"
        "import megatron.core.distributed.distributed_data_parallel"
    )
    shown = run("-c", script, path=fake_megatron(""))
    assert "is failed: ZeroDivisionError: x" in shown.stderr and "\\x1b[31m" in shown.stderr
    assert FORGED not in shown.stderr.splitlines() and "\x1b" not in shown.stderr


def test_settings_and_arguments_cannot_either(tmp_path):
    value = f"x\n{FORGED}\n\x1b[31m"
    for arguments in (["doctor", "--no-import"], ["doctor", value], ["explain", value], ["verify", value]):
        shown = run(*arguments, MEGAPATCH_DISABLE=value, MEGAPATCH_STRICT=value)
        output = shown.stdout + shown.stderr
        assert FORGED not in output.splitlines() and "\x1b" not in output, arguments


def test_on_an_ascii_terminal_other_characters_are_escaped():
    shown = run("doctor", "--no-import", MEGAPATCH_DISABLE="caf\u00e9.*", PYTHONIOENCODING="ascii:strict")
    assert "MEGAPATCH_DISABLE=caf\\xe9.*" in shown.stdout and "Traceback" not in shown.stderr


def test_every_logger_of_the_package_is_the_one_that_is_cleaned():
    import re
    from pathlib import Path

    root = Path(_printable.__file__).parent
    named = {name for path in root.rglob("*.py") for name in re.findall(r"getLogger\(([^)]*)\)", path.read_text())}
    assert named == {'"megapatch"'}
