"""The audit's own collectives: made by all ranks or by none; and a finding that ends training on all of them."""

from __future__ import annotations

import gc
import inspect
import time
import weakref
from datetime import timedelta

import pytest
import torch
from rigs.audit import part_of, running_audit
from rigs.cells import AUDITED
from rigs.imported import after_megatron, run_with_megatron
from rigs.log import Log
from rigs.megatron.options import UNPATCHED

from megapatch import MisuseError, apply, audit
from megapatch._verify.operations import Operations
from megapatch.audit import _participants, _ranks_agree
from megapatch.errors import AuditError
from megapatch.testing import destroy_parallel, init_parallel, tiny_gpt

PATIENCE = 1.2


@after_megatron
def impatient():
    _participants._PATIENCE = timedelta(seconds=PATIENCE)


def trained(rank, world_size):
    if rank == 1:
        audit.stop()
    log = Log()
    init_parallel()
    model = tiny_gpt()
    for step in range(2):
        model.train_step(step)
    return [text for text in log.texts if "ranks are not compared" in text], model.parameters()


def test_ranks_are_not_compared_where_one_is_not_audited():
    env = {**UNPATCHED, **AUDITED}
    (said, parameters), (nothing, others) = run_with_megatron(trained, 2, setup=impatient, env=env)
    assert len(said) == 1 and not nothing
    assert all((parameters[name] == others[name]).all() for name in parameters)


def interrupted(rank, world_size):
    init_parallel()
    model = tiny_gpt()
    model.train_step(0)
    if rank == 1:
        running_audit().ledger.report("hooks-balanced", "test", "something happened")
    with pytest.raises(AuditError) as raised:
        model.train_step(1)
    audit.clear()
    model.train_step(2)
    return str(raised.value)


def test_with_raise_a_finding_of_one_rank_is_an_error_on_all():
    other, own = run_with_megatron(interrupted, 2, env={**UNPATCHED, **AUDITED, "MEGAPATCH_AUDIT": "raise"})
    assert "see the log of rank 1" in other
    assert "hooks-balanced (after 1 optimizer step on rank 1): something happened" in own


def skipping(rank, world_size):
    """One rank leaves out an optimizer step, as for a loss that is NaN there only: no collective of Megatron's."""
    log = Log()
    init_parallel()
    model = tiny_gpt()
    for step in range(4):
        model.zero_grad()
        model.forward_backward(step)
        if rank == 0 or step != 1:
            model.optimizer.step()
    return [text for text in log.texts if "not compared any more" in text], model.parameters()


@pytest.mark.thorough
def test_a_rank_that_skips_a_step_meets_no_collective_of_the_audit():
    plain = run_with_megatron(skipping, 2, env=UNPATCHED)
    audited = run_with_megatron(skipping, 2, setup=impatient, env={**UNPATCHED, **AUDITED})
    for (_, expected), (said, parameters) in zip(plain, audited, strict=True):
        assert "one of them has not come to this optimizer step" in said[0] and len(said) == 1
        assert all((parameters[name] == expected[name]).all() for name in parameters)


def training_apart(rank, world_size):
    """Local SGD, in which one rank makes more steps than the other; return how long the audit has waited."""
    init_parallel()
    model = tiny_gpt()
    model.config.finalize_model_grads_func = None
    for step in range(3 - rank):
        model.zero_grad()
        model.forward_backward(step)
        begin = time.monotonic()
        model.optimizer.step()
        waited = time.monotonic() - begin
    torch.distributed.barrier()
    return waited, [finding.rule for finding in audit.findings()]


def test_uneven_ranks_are_waited_for_once():
    (waited, found), (_, nothing) = run_with_megatron(
        training_apart, 2, setup=impatient, env={**UNPATCHED, **AUDITED}
    )
    assert waited < 1.5 * PATIENCE and not found and not nothing


def differing_at_the_end(rank, world_size, is_taken_down):
    """Ranks differ in the last step, and no other comes that would name the parameter."""
    init_parallel()
    model = tiny_gpt()
    model.train_step(0)
    with torch.no_grad():
        next(model.chunks[0].parameters()).add_(rank)
    model.train_step(1)
    if is_taken_down:
        init_parallel()
    return [(finding.rule, finding.count) for _ in range(2) for finding in audit.findings()]


@pytest.mark.parametrize("is_taken_down", [False, True], ids=["", "its groups are gone"])
def test_a_difference_at_the_last_comparison_is_found(is_taken_down):
    ranks = run_with_megatron(differing_at_the_end, 2, is_taken_down, env={**UNPATCHED, **AUDITED})
    assert ranks == [[("ranks-agree", 1)] * 2] * 2


def unable(rank, world_size):
    """One rank has no memory left to hash its parameters."""
    from megapatch.audit import _ranks_agree

    init_parallel()
    model = tiny_gpt()
    model.train_step(0)
    working = _ranks_agree.hash_of
    if rank == 1:
        _ranks_agree.hash_of = lambda parameters: (_ for _ in ()).throw(MemoryError())
    model.train_step(1)
    _ranks_agree.hash_of = working
    with torch.no_grad():
        next(model.chunks[0].parameters()).add_(rank)
    for step in (2, 3, 4):
        model.train_step(step)
    return [(finding.rule, finding.step) for finding in audit.findings()]


@pytest.mark.thorough
def test_a_rank_that_cannot_hash_makes_the_collective_all_the_same():
    assert run_with_megatron(unable, 2, env={**UNPATCHED, **AUDITED}) == [[("ranks-agree", 3)]] * 2


def test_a_store_that_outlives_its_world_does_not_count(tmp_path, monkeypatch):
    dist, store = torch.distributed, torch.distributed.HashStore()
    one = _participants.Participants()
    monkeypatch.setattr(_participants, "default_store", lambda: store)
    monkeypatch.setattr(_participants, "_PATIENCE", timedelta(seconds=0.1))
    for world, meetings in (("first", 3), ("second", 2)):
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/{world}", rank=0, world_size=1)
        try:
            for participants in (one, _participants.Participants()):  # and an audit that follows it
                assert participants.all_are_audited("settings")
                assert all(participants.all_have_come(dist.group.WORLD) for _ in range(meetings))
        finally:
            dist.destroy_process_group()


def started_late(rank, world_size):

    apply()
    audit.start(every=1)
    init_parallel()
    model = tiny_gpt()
    for step in range(2):
        model.forward_backward(step)
        model.optimizer.step()
    found = [finding.rule for finding in audit.findings()]
    audit.stop()
    audit.clear()
    tiny_gpt().train_step()
    assert not audit.findings()
    return found


def test_it_can_be_started_where_patches_are_in_place():
    assert run_with_megatron(started_late, 2) == [["fresh-gradients"]] * 2


def released(rank, world_size):
    init_parallel()
    model = tiny_gpt(overlap_grad_reduce=True)
    model.train_step()
    chunk, optimizer = weakref.ref(model.chunks[0]), weakref.ref(model.optimizer)
    del model
    gc.collect()
    return chunk() is None, optimizer() is None


@pytest.mark.parametrize(
    "env", [{}, AUDITED, {**AUDITED, "MEGAPATCH_DISABLE": ""}], ids=["plain", "audited", "patched"]
)
def test_a_model_that_is_gone_is_not_kept_alive(env):
    assert run_with_megatron(released, 2, env={**UNPATCHED, **env}) == [(True, True)] * 2


def test_a_bad_number_of_steps_is_refused():
    with pytest.raises(MisuseError, match="every=0: expected a number of steps, 1 or more"):
        audit.start(every=0)


def sharded_by_gtp(rank, world_size):
    from megatron.core import parallel_state

    if "gtp_remat_size" not in inspect.signature(parallel_state.initialize_model_parallel).parameters:
        return None
    init_parallel()
    model = tiny_gpt(hooks=False)
    destroy_parallel()
    parallel_state.initialize_model_parallel(gtp_remat_size=world_size)
    return [replicas.what for replicas in _ranks_agree.replicas_of(list(model.chunks[0].parameters()))]


def test_ranks_that_gtp_shards_weights_over_are_not_compared():
    found = run_with_megatron(sharded_by_gtp, 2, env=UNPATCHED)
    if None in found:
        pytest.skip("this Megatron has no GTP")
    assert found == [[], []]


def seeded(rank, world_size):
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    init_parallel(pp=2)
    tiny_gpt(layers=4).train_step()
    audit.clear()
    found = []
    for seed in (1, 1 + rank, 1):
        model_parallel_cuda_manual_seed(seed)
        with Operations() as operations:
            part_of(running_audit(), _ranks_agree.RanksAgree)._compare_seeds(seed, ())
        found.append([note.rule for note in audit.notes()])
        audit.clear()
        assert not operations.found, operations.found
    return found


def test_seeds_are_compared_without_a_collective_and_a_wait():
    one_seed = ["stages-differ"]
    assert run_with_megatron(seeded, 2, env={**UNPATCHED, **AUDITED}) == [[one_seed, [], one_seed]] * 2
