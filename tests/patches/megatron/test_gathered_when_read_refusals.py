"""megatron.gathered-when-read: readers that must not or cannot gather, at 2 ranks."""

from functools import partial
from unittest import mock

from patches.megatron.test_gathered_when_read import read_state
from rigs.cells import cells_of
from rigs.megatron.gathers import OVERLAP, no_collective, pair, state_of, wrong
from rigs.megatron.options import assert_misuse, attempt, needs_training

from megapatch._mcore.param_gathers import STEPPED
from megapatch.testing import init_parallel, megatron_training_available, tiny_gpt
from megapatch.weight_sync import gathered_parameters


def one_rank_alone(rank):
    """Rank 0 reads what it cannot gather: refused once the optimizer has stepped, and not before or after."""
    _, model = pair()
    (ddp,) = model.chunks
    found = {}

    def read(moment):
        with no_collective():
            for name in ("state_dict", "state_dict_for_save_checkpoint"):
                found[moment, name] = attempt(getattr(ddp, name))[0] if rank == 0 else None

    read("before the first step")
    model.train_step()
    read("after it")
    text = attempt(ddp.state_dict)[1]
    gathered_parameters(ddp)
    read("gathered")
    model.train_step(1)
    ddp.start_param_sync()
    read("under way")
    return found, text


def read_while_under_way(rank):
    """Rank 0 alone reads while a gather is under way: which gathers still are, and the fraction that is wrong."""
    plain, model = pair()
    (ddp,) = model.chunks
    found = {}
    for step, name in enumerate(("state_dict", "state_dict_for_save_checkpoint")):
        plain.train_step(step)
        model.train_step(step)
        ddp.start_param_sync()
        with no_collective():
            if rank == 0:
                getattr(ddp, name)()
        found[name] = [handle for handle, _ in state_of(model)]
        gathered_parameters(ddp)
    return found, wrong(model.parameters(), plain.parameters())


def mxfp8():
    """Nothing to refuse before the first step: a load, or a first weight sync."""
    model = tiny_gpt(**OVERLAP)
    (ddp,) = model.chunks
    if not hasattr(ddp.ddp_config, "reuse_grad_buf_for_mxfp8_param_ag"):
        return ["no such option"]
    found = []
    for _ in range(2):
        ddp.ddp_config.reuse_grad_buf_for_mxfp8_param_ag = True
        found.append(attempt(ddp.sharded_state_dict)[0])
        ddp.ddp_config.reuse_grad_buf_for_mxfp8_param_ag = False
        model.train_step()
    return found


def layer_wise():
    """Read the shards of a model whose optimizer is not the distributed one, of which megapatch records no step.

    A stand-in, which every release has.
    """
    _, model = pair()
    (ddp,) = model.chunks
    for group in ddp.bucket_groups + ddp.expert_parallel_bucket_groups:
        STEPPED.pop(group)
    with mock.patch.object(ddp.ddp_config, "use_distributed_optimizer", False), no_collective():
        found = [attempt(ddp.sharded_state_dict)[0]]
        if megatron_training_available():
            found.append(attempt(read_state, model)[0])
        refused = [attempt(gathered_parameters, ddp)[0]]
    model.forward_backward()  # gathers, which says nothing about the next step
    with mock.patch.object(ddp.ddp_config, "use_distributed_optimizer", False), no_collective():
        return found, [*refused, attempt(gathered_parameters, ddp)[0]]


def refused_in_legacy_format(rank):
    _, model = pair()
    model.train_step()
    with no_collective():
        return attempt(read_state, model, "torch")


def job(rank, world_size):
    init_parallel()
    yield "one rank alone", partial(one_rank_alone, rank)
    if megatron_training_available():
        yield "legacy format", lambda: refused_in_legacy_format(rank)
    yield "under way", partial(read_while_under_way, rank)
    yield "mxfp8", mxfp8
    yield "layer-wise", layer_wise


ranks = cells_of(job, 2)


def test_a_reader_that_one_rank_may_call_alone_refuses(ranks):
    found, text = ranks[0]["one rank alone"]
    assert "call megapatch.weight_sync.gathered_parameters(model) on all ranks before it" in text
    assert {moment for (moment, _), error in found.items() if error} == {"after it"}
    assert {error for (moment, _), error in found.items() if moment == "after it"} == {"MisuseError"}


def test_a_reader_waits_for_a_gather_under_way(ranks):
    reader, other = ranks
    for name in ("state_dict", "state_dict_for_save_checkpoint"):
        assert not any(reader["under way"][0][name])
        assert all(other["under way"][0][name])  # it was under way, and nobody else has to wait
    assert [found["under way"][1] for found in ranks] == [0, 0]


@needs_training
def test_a_legacy_state_refuses(ranks):
    for found in ranks:
        text = "generate_state_dict() cannot gather them, as one rank alone may call it"
        assert_misuse(found["legacy format"], text)


def test_mxfp8_is_refused_only_after_a_step(ranks):
    for found in ranks:
        assert found["mxfp8"] in ([None, "MisuseError"], ["no such option"])


def test_a_load_can_ask_for_a_layer_wise_optimizers_shards_before_its_first_step(ranks):
    for found in ranks:
        readers, gathers = found["layer-wise"]
        assert set(readers) == {None}
        assert set(gathers) == {"MisuseError"}  # so they left the parameters alone on purpose
