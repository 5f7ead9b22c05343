"""megatron.rates-of-each-group: loads of groups that differ in their learning rates, on 2 ranks.

The reference is the run that is not interrupted.
"""

import logging
from functools import partial

import pytest
from rigs.cells import cells_of
from rigs.log import Log
from rigs.megatron import main_params
from rigs.megatron.options import attempt, linear_schedule
from rigs.megatron.save import minor

from megapatch.testing import init_parallel, tiny_gpt

ADAM = {"optimizer": "adam", "lr": 0.05}
LAYOUTS = {
    "fp32": ADAM,
    "bf16": {**ADAM, "dtype": "bf16"},
    "distributed": {**ADAM, "dtype": "bf16", "use_distributed_optimizer": True},
    "experts": {**ADAM, "dtype": "bf16", "use_distributed_optimizer": True, "experts": 2},
}
RATES = {  # of groups by what sets them: Megatron's option, or the user
    "decoupled": {"optim": {"adam_eps": 1.0, "decoupled_lr": 0.5, "decoupled_min_lr": 0.1}},
    "by hand": {"optim": {"adam_eps": 1.0}},
    "alike": {"optim": {"adam_eps": 1.0}},
}
CASES = [
    *((layout, "decoupled", "new") for layout in LAYOUTS),
    *((layout, "by hand", place) for layout in ("fp32", "bf16", "distributed") for place in ("new", "in place")),
    ("distributed", "alike", "new"),
]


class Job:
    def __init__(self, layout, rates, factor=1, **flags):
        self.model = tiny_gpt(**{**LAYOUTS[layout], **RATES[rates]})
        for number, group in enumerate(self.model.optimizer.param_groups):
            if rates == "by hand":
                group |= {"wd_mult": 1.0, "max_lr": factor * (0.05 + 0.2 * number), "min_lr": 0.01}
        self.schedule = linear_schedule(self.model.optimizer, steps=10, max_lr=0.05, **flags)

    def train(self, *steps):
        for step in steps:
            self.model.train_step(step)
            self.schedule.step(1)

    def save(self):
        self.saved = main_params.optimizer_state(self.model), self.schedule.state_dict()
        self.weights = main_params.weights(self.model)

    def load(self, other):
        main_params.restore_weights(self.model, other.weights)
        main_params.load_optimizer(self.model, other.saved[0])
        self.schedule.load_state_dict(other.saved[1])

    def outcome(self):
        rates = [
            [group[name] for name in ("max_lr", "min_lr", "lr")] for group in self.model.optimizer.param_groups
        ]
        self.train(2)
        return rates, main_params.mains(self.model), self.model.parameters()


def differs(layout, rates, place):
    """Return the rates of two runs, with a load and without, and the greatest difference after one more step."""
    whole, job = Job(layout, rates), Job(layout, rates)
    for one in (whole, job):
        one.train(0, 1)
    job.save()
    new = job if place == "in place" else Job(layout, rates)
    if new is job:
        job.train(3)
    error, _ = attempt(new.load, job)
    if error:
        return error
    (rates, *found), (expected_rates, *expected) = new.outcome(), whole.outcome()
    found, expected = ([*mains, *named.values()] for mains, named in (found, expected))
    greatest = max(float((one - two).abs().max()) for one, two in zip(found, expected, strict=True))
    return rates == expected_rates, greatest


def with_other_rates(layout):
    """Load into a run with other rates; return what was said, and the rates."""
    saved, new = Job(layout, "by hand"), Job(layout, "by hand", 2)
    saved.train(0)
    with Log(level=logging.WARNING) as log:
        error, _ = attempt(new.model.optimizer.load_state_dict, saved.model.optimizer.state_dict())
    return error, log.texts, [group["max_lr"] for group in new.model.optimizer.param_groups]


def job(rank, world_size):
    init_parallel()
    for case in CASES:
        yield case, partial(differs, *case)
    for layout in ("fp32", "distributed"):
        yield (layout, "other"), partial(with_other_rates, layout)


unpatched = cells_of(job, 2, env={"MEGAPATCH_DISABLE": "megatron.rates-of-each-group"})
patched = cells_of(job, 2)


def is_wrong(layout, rates):
    """Whether Megatron takes some of these groups for one: up to 0.15 a decoupled rate tells them apart."""
    first = {"decoupled": 16, "by hand": 14 if layout == "distributed" else 13, "alike": 19}[rates]
    return first <= minor() < 19


@pytest.mark.parametrize("case", CASES, ids=", ".join)
@pytest.mark.quick
def test_without_the_patch_groups_that_differ_in_rates_become_one(unpatched, case):
    for found in unpatched:
        assert (found[case] == (True, 0.0)) is not is_wrong(*case[:2]), found[case]


@pytest.mark.parametrize("case", CASES, ids=", ".join)
@pytest.mark.quick
def test_a_load_continues_as_the_run_would_have(patched, case):
    for found in patched:
        assert found[case] == (True, 0.0)


@pytest.mark.parametrize("layout", ["fp32", "distributed"])
def test_with_other_rates_a_warning_says_that_megatron_loads_as_before(patched, unpatched, layout):
    for found, before in zip(patched, unpatched, strict=True):
        (error, said, rates), (error_before, nothing, rates_before) = (
            found[layout, "other"],
            before[layout, "other"],
        )
        assert (error, rates, nothing) == (error_before, rates_before, [])
        warned = [message.partition(":")[0] for message in said]
        assert warned == ["megatron.rates-of-each-group"] * is_wrong(layout, "by hand")
