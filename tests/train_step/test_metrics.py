"""Metrics that are sums come back as means, each by what it is the mean of. Needs no torch."""

from __future__ import annotations

import pytest

from megapatch.errors import MisuseError
from megapatch.train_step import NLL, POLICY_GRADIENT, normalize_metrics

TOKENS, SEQUENCES = 8.0, 2.0


def normalized(metrics, **options):
    return normalize_metrics(metrics, tokens=TOKENS, sequences=SEQUENCES, **options)


@pytest.mark.parametrize(("loss", "divisor"), [("tokens", TOKENS), ("sequences", SEQUENCES)])
def test_each_kind(loss, divisor):
    kinds = {"a": "tokens", "b": "sequences", "c": "loss", "d": "none"}
    found = normalized(dict.fromkeys("abcd", 24.0), loss=loss, kinds=kinds)
    assert found == {"a": 3.0, "b": 12.0, "c": 24.0 / divisor, "d": 24.0}


@pytest.mark.parametrize(("loss", "divisor"), [("tokens", TOKENS), ("sequences", SEQUENCES)])
def test_an_unknown_name_is_of_the_losss_kind(loss, divisor):
    assert normalized({"new": 16.0}, loss=loss) == {"new": 16.0 / divisor}


@pytest.mark.parametrize("name", ["probs_ratio_min", "probs_ratio_max", "ratio_max_clamped", "new_min"])
def test_extremes_stay_as_they_are(name):
    assert normalized({name: 16.0}, kinds={name: "tokens"}) == {name: 16.0}


def test_the_tables():
    names = ("loss", "kl_penalty", "probs_ratio", "sampling_importance_ratio", "num_valid_samples")
    found = normalized(dict.fromkeys(names, 16.0), loss="sequences", kinds=POLICY_GRADIENT)
    assert list(found.values()) == [8.0, 8.0, 2.0, 2.0, 16.0]
    names = ("loss", "num_unmasked_tokens", "num_valid_samples")
    found = normalized(dict.fromkeys(names, 16.0), loss="sequences", kinds=NLL)
    assert list(found.values()) == [2.0, 16.0, 16.0]


def test_a_table_with_changes():
    kinds = {**POLICY_GRADIENT, "is_oob_ratio": "sequences"}
    assert normalized({"is_oob_ratio": 16.0}, kinds=kinds) == {"is_oob_ratio": 8.0}


@pytest.mark.parametrize("table", [NLL, POLICY_GRADIENT])
def test_tables_cannot_be_changed(table):
    with pytest.raises(TypeError):
        table["loss"] = "none"


def test_what_was_given_stays_as_it_was():
    metrics = {"loss": 16.0}
    assert normalized(metrics) == {"loss": 2.0}
    assert metrics == {"loss": 16.0}


@pytest.mark.parametrize(
    ("metrics", "options", "message"),
    [
        ({"loss": 1.0}, {"loss": "words"}, 'loss is "words"; expected "tokens" or "sequences"'),
        (
            {"a": 1.0},
            {"kinds": {"a": "word"}},
            'the kind of a is "word"; expected one of tokens, sequences, loss, none',
        ),
        ({"probs_ratio": 1.0}, {"tokens": 0}, "probs_ratio cannot be divided by 0 tokens"),
        ({"loss": 1.0}, {"sequences": 0, "loss": "sequences"}, "loss cannot be divided by 0 sequences"),
        ({"loss": 1.0}, {"tokens": float("nan")}, "loss cannot be divided by nan tokens"),
        ({"loss": 1.0}, {"tokens": -1}, "loss cannot be divided by -1 tokens"),
    ],
)
def test_misuse(metrics, options, message):
    with pytest.raises(MisuseError) as error:
        normalize_metrics(metrics, **{"tokens": TOKENS, "sequences": SEQUENCES, **options})
    assert str(error.value) == message


def test_nothing_is_divided_by_a_count_that_no_metric_has():
    assert normalize_metrics({"loss": 4.0, "num_valid_samples": 3}, tokens=2, sequences=0) == {
        "loss": 2.0,
        "num_valid_samples": 3,
    }
