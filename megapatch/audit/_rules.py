"""The rules that every step has to keep, in any trainer: what each says, and why and how trainers break it.

A rule is a paragraph of `_TEXT`, in the order of the page. Its first line has its name, and whether breaking it is
a finding or a note; after `but`, the kinds that are notes all the same. Then come what it says, what breaking it
means, and what is judged and counted. Next are the patches that repair known ways of breaking it, some for one
kind only. Last are the likely causes: the kinds of findings that each explains, the cause, and what shows it. A
cause of `any` kind may explain all of them. Those `after` some kind of event come first where one has happened.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

_TEXT = """\
reduced-once: finding but unfinished averaged later
  says: Between zeroing and the optimizer step every bucket that received gradients is reduced once, and nothing is
    added to it after its reduce began.
  means: Data-parallel ranks step with different gradients, or with gradients that are wrong by a factor.
  judges: steps with gradients of several ranks
  patches: megatron.grad-ready-window megatron.nested-no-sync(repeated)
    megatron.parameters-without-gradients(never) nemo_rl.hooks-without-overlap skyrl.accumulate-forward-backward
  unfinished: config.finalize_model_grads_func is not set, or its call is left out | all parameters are named, on
    all ranks
  unfinished: gradients are reduced by hand, or ranks average their weights instead | it is meant so: accept it
  never: parameters that got no gradient in the last microbatch, with overlap_grad_reduce | some parameters are
    named, as of experts without tokens, and not on all ranks
  repeated: microbatches outside no_sync(), or several calls of which each finishes gradients | the number is that
    of the microbatches, or of the calls, of a step
  later: another optimizer than Megatron's, which does not zero its buffers | from the second step on; nothing
    calls zero_grad_buffer()
  late later: a call in which the last microbatch is not known as the last | from the first step on, with
    overlap_grad_reduce only
  averaged: each of several calls finishes gradients, which is right where a reduce is an average of all ranks | it
    is wrong with model parallelism or the distributed optimizer
  later: a penalty that is the same on all ranks is differentiated after the reduce | it is meant so: accept it

fresh-gradients: finding
  says: The first gradient after an optimizer step is added to a buffer that was zeroed.
  means: Each step repeats the gradients of the steps before it.
  judges: steps with gradients
  patches: nemo_rl.train-after-exception
  any: zero_grad_buffer() is not called before the first call of a step | found in every step from the second on
  any after exception: a call that raised has left its gradients | the timeline has an exception just before

gradients-used: note
  says: An optimizer step uses gradients that have arrived, not the zeros that came after them.
  means: The step trains on nothing.
  judges: steps with gradients
  any: zeroing and the step are in the wrong order | the line of zero_grad_buffer() is right before that of step()
  any: a step on zeros takes the place of a batch that is left out | found now and then; it is meant so: accept the
    note

gradients-dropped: note
  says: Gradients that have arrived are used by an optimizer step before they are zeroed.
  means: A step of several calls trains on the last of them only, unless they were dropped on purpose.
  judges: steps with gradients
  patches: skyrl.accumulate-forward-backward
  any: gradients are zeroed in each call of a step that has several | found in each step; zero_grad_buffer() is
    inside the loop over micro- or minibatches
  any: the trainer leaves out the step of a batch that it does not like | found now and then;
    megapatch.train_step.TrainStep.abort() says that it is meant
  any: gradients are only measured, or are a means to others | it is meant so: accept the note

gradients-arrive: note
  says: Each parameter that is trained has a gradient in a step, if others have.
  means: It stays as it is: it was frozen after the model was wrapped, or is under no_grad().
  judges: steps with gradients
  gone: a module, such as a head, was replaced after the model was wrapped | named_parameters() has another one in
    its place, which no optimizer steps
  stopped never: parameters were frozen, or their part left out, after the model was wrapped | they are those of
    one adapter, tower or layer; freeze them before the model is wrapped
  stopped never: their part runs under no_grad() or on a detached input | they are those of one module

main-params-agree: note
  says: In half precision an optimizer step begins from the parameters that the model has.
  means: The step undoes what was put into the model: a load, or weights that were swapped in or out.
  judges: steps with main parameters
  patches: megatron.main-params-after-load
  any after load: weights were loaded, and not the optimizer's main parameters | the timeline has a load just
    before; optimizer.reload_model_params() does not follow it
  any after forward-only exception: a reference, an older policy or an average was left in the model | many
    parameters are named, after a forward-only call or an exception
  any after swap: a swap leaves out some parameters, or an adapter stays merged | few parameters are named: those
    of a dtype, a chunk or a layer
  any: a parameter has other memory than its buffer, by `parameter.data =` | those that are named, in each step
  any after offload: the optimizer was onloaded from an older copy | nothing was loaded or swapped; the weights
    before the offload are the model's
  any: weights are quantized for the forward pass, or lent to something else until the step | it is meant so:
    accept the note

kept-between-steps: note
  says: Moments, and weights in fp32, are at a step's beginning what the last step has left, or were loaded.
  means: The step is made from other weights or moments: swapped, lost in an offload, or of an older copy.
  judges: weights in fp32 after a step; moments after a step
  any: weights or moments were swapped or moved out, and other ones put back | the line or the timeline is that of
    a swap or an offload
  memory: a parameter has other memory than its buffer, by `parameter.data =` | those that are named, in each step
  any: another optimizer steps the same weights | found in each step, from the first one on
  any: an average or a regularizer writes into the weights | it is meant so: accept the note
  zeroed: moments are reset after a load, or their state is made again | the sentence says that they were zeroed
    after it

loaded-is-there: finding but rewound empty
  says: After a load, moments, step counts and the schedule are what was loaded.
  means: Training continues as another run: with moments of zero, or at another learning rate.
  judges: optimizers that were loaded; schedules that were loaded
  patches: areal.load-optimizer-state(moments empty) megatron.load-offloaded-state(steps)
    megatron.scheduler-after-load(schedule)
  empty: the checkpoint, or the state that is loaded, has no moments | it is meant so where they are to begin again
  moments empty: the optimizer was loaded before its state was made, which replaced it | moments are zero or
    missing; load after the first step or after Megatron's dummy step
  steps: the load leaves the counts of before, or adds to them | the numbers differ by the steps of this process
  schedule: the scheduler adds what it loads to where it is | its steps are the sum of both; load into one that is
    new
  rewound: something resets counts after the load | it is meant so where another run is to begin from these weights

resumed-together: note
  says: An optimizer and its schedule are loaded together.
  means: The learning rate begins from the start, or moments do.
  judges: loads of an optimizer that has a schedule
  patches: verl.schedule-after-load
  schedule: the load is told to leave out the schedule, or the checkpoint has none | the sentence says that the
    schedule is at its beginning
  optimizer: the load is told to leave out the optimizer (--no-load-optim), or the checkpoint has none | the
    sentence says that the optimizer is at its beginning

stepped-once: finding
  says: An optimizer steps once on the same gradients.
  means: The step is made twice, or a forward-backward call is missing.
  judges: steps with gradients
  any: step() is called by the trainer, and by something that it calls | the line is not that of the trainer's own
    step; as often as there are steps
  any: a loop makes steps without a forward-backward call | as often as it has turns, less one

scaled-once: finding
  says: The loss, and every auxiliary loss, is multiplied by the loss scale that the optimizer divides by.
  means: Gradients are wrong by the loss scale: far too small, or those of one loss against another's.
  judges: steps with a loss scale; calls with auxiliary losses
  patches: areal.aux-loss-scale roll.grad-scale skyrl.grad-scale
  loss: config.grad_scale_func is not optimizer.scale_loss | it is None, or another optimizer's, as one that was
    made before
  auxiliary: config.grad_scale_func is set after the model has copied its config, or not at all | the loss itself
    is scaled, by the trainer
  changed: the scale changes between the backward pass and the step | the timeline has a load between them; or an
    overflow of another optimizer's step

unscaled-once: finding
  says: The optimizer divides the gradients of a step by the loss scale once.
  means: Gradients are too small by the loss scale.
  judges: divisions by a loss scale
  patches: megatron.prepare-grads-once
  any: prepare_grads() is called before step(), which calls it again | the line of the first is in the trainer, to
    read the gradients' norm perhaps

gathered-when-read: finding but named
  says: Parameters that an optimizer step has left to be gathered are not read before that.
  means: The copy that is saved or sent is a mixture: this rank's shard is new, all others are one step old.
  judges: steps that left parameters to be gathered
  patches: megatron.gathered-when-read areal.gathered-when-read nemo_rl.gathered-when-read
    nemo_rl.forward-pre-hook-after-split skyrl.gathered-when-read verl.gathered-when-read
  read: a checkpoint, an export or a weight sync right after a step, with overlap_param_gather | the sentence names
    the reader; disable_forward_pre_hook() before it gathers
  named: state_dict() right after a step, whose values are read before the next gather | the sentence names it; it
    is right where the values are read later
  sent: code of your own that sends parameters one by one | the line is that of the collective;
    disable_forward_pre_hook() before it gathers

tokens-counted: finding but normalizer factor without ranks
  says: The gradients of a step are divided by the tokens of all its calls, and no loss is NaN.
  means: Gradients are wrong by a factor, or NaN.
  judges: losses of microbatches; divisors of calls
  patches: megatron.zero-tokens
  normalizer: each call of a step normalizes by its own tokens | a step has several calls; gradients are too large
    by about their number
  normalizer: the loss is divided by the number of calls, which have as many tokens | it is meant so: accept it
  factor: calculate_per_token_loss was set after the model was wrapped | the sentence has both
  ranks: ranks of a context-parallel group count their own tokens | the loss function is that of another Megatron
  without: the loss function returns a loss and metrics, and no tokens | calculate_per_token_loss needs all three
  loss: a microbatch whose tokens are all masked, and a loss that is divided by their number | the sum of that
    microbatch's loss mask is 0
  loss: the loss itself: a logarithm of 0, or a ratio that overflows | the loss mask has tokens; look at that
    microbatch's log-probabilities

fresh-counts: note
  says: The token counts of routers are zero as a step's first call begins.
  means: The expert bias and auxiliary losses count the tokens of a step that was dropped.
  judges: calls whose routers count tokens
  any after exception: a step was dropped, and only its gradients were zeroed | the timeline has an exception
    before
  any: log-probabilities are computed without no_grad() | found after each forward-only call
  any: the expert bias moves once in several steps | it is meant so: accept the note

ranks-agree: finding but apart rates
  says: Parameters are the same on all data-parallel ranks, and replicated ones on all ranks of their group.
  means: Ranks train different models, whose gradients are averaged all the same.
  judges: comparisons of ranks
  patches: megatron.parameters-without-gradients nemo_rl.forward-pre-hook-after-split
  tensor-parallel: a parameter without the attribute sequence_parallel, with sequence parallelism | norms, biases
    or routers are named; not found without sequence parallelism
  any: a missing all-reduce: gradients that were not reduced, or reduced at the wrong time | found from the second
    step on; reduced-once is found in the step before
  data-parallel expert-data-parallel: a missing gather: a hook of overlap_param_gather that was taken off | with
    overlap_param_gather only; a part of the parameters is named, and heals in the next step
  any: another seed on each rank, as the model was made or for its dropout | as it was made: at the first
    comparison, all matrices; dropout: not found with rates of 0
  any after load: a load that some ranks have missed, or a broadcast after it | the timeline has a load just
    before, on some ranks only
  any: a loss function for 0.13 and context parallelism, on a Megatron up to 0.12, which adds up tokens over
    data-parallel ranks only | calculate_per_token_loss is set
  any: a rank that changes parameters by itself | none of the others; log their sum after each call
  rates: a schedule advances on some ranks only, or their groups were changed | log lr and weight_decay of
    optimizer.param_groups on each rank
  apart: parameters of each rank's own, or ranks that average their weights now and then | it is meant so: accept
    it

calls-alike: note
  says: Data-parallel ranks train on as many microbatches.
  means: Samples of a rank that has fewer weigh more, where gradients are averaged over ranks.
  judges: comparisons of data-parallel ranks
  any: samples are packed, filtered or skipped on each rank by itself | the numbers vary from step to step

data-differs: note
  says: Data-parallel ranks train on different data.
  means: The batch is as many times smaller as there are ranks, as with a sampler that ignores the rank.
  judges: comparisons of data-parallel ranks
  any: the sampler is not given the rank | num_replicas or rank of DistributedSampler are its defaults

every-chunk-steps: finding but left
  says: An optimizer steps all chunks of a model that had gradients in a forward-backward call.
  means: Some layers never learn.
  judges: calls that train
  left: an optimizer was made of some chunks only, or one of several is not stepped | get_megatron_optimizer() was
    given model[0], or the loop over them ends early
  model: the optimizer is an earlier model's | the model was built after it was made

gradients-kept: note
  says: An optimizer step uses the gradients that finalize_model_grads() has finished.
  means: They were scaled, clipped or reduced by hand, which is easily done twice, or on one rank only.
  judges: steps with finished gradients
  any: gradients are clipped, scaled or reduced by hand after they were finished | the code between the call and
    step() has main_grad, grad_data or clip_grad_norm
  any: an offload in between has replaced them | found only where something is offloaded

training-mode: note
  says: A call that trains runs the model in train().
  means: The model trains without its dropout, or without the auxiliary losses of its routers.
  judges: calls that train with dropout
  any: train() is not called after eval() | found from the first evaluation on

evaluation-mode: note
  says: A forward-only call, as for log-probabilities, runs the model in eval().
  means: Log-probabilities are those of the model with some elements dropped at random.
  judges: forward-only calls with dropout
  any: eval() is not called before log-probabilities | found in every forward-only call

hooks-balanced: finding but changed
  says: A forward-backward call leaves the hooks of the model's config, its timers, no_sync and the rerun machine
    as it found them.
  means: Later calls reduce too early, twice, or not at all; or a step is skipped.
  judges: forward-backward calls
  patches: megatron.nested-no-sync(changed) megatron.train-reentry nemo_rl.abort-resets-rerun
    nemo_rl.train-after-exception slime.train-reentry
  changed: no_sync() is entered in itself | no_sync() is named; no exception came before
  left machine after exception: a call that raised, and was survived, has left them | the timeline has an exception
    just before
  changed: it is changed during a call, and stays | it is named; accept the note if it is meant so

seeded-once: note
  says: A seed is not set again after steps.
  means: Dropout drops the same elements again as it did before.
  judges: seeds that are set after steps
  any: each rollout or epoch sets its seed, and not another one each time | the line is that of the seeding

stages-differ: note
  says: Pipeline stages draw different random numbers.
  means: Layers at the same place of different stages start from the same weights, and drop the same elements.
  judges: seeds of several stages
  patches: areal.pipeline-seed skyrl.pipeline-seed verl.pipeline-seed
  any: the seed is the same on all stages, and not raised by 100 for each as Megatron does | the line is that of
    the seeding

learning-rate-moves: note
  says: The learning rate's schedule advances after successful steps only.
  means: Each overflow costs a step of warm-up or decay.
  judges: advances of a schedule
  patches: verl.overflow-is-skipped ms_swift.overflow-is-skipped roll.overflow-is-skipped
  any: the schedule advances whether or not a step was made | the line is not below a condition on what
    optimizer.step() has returned
  any: it counts what was seen, such as tokens | it is meant so: accept the note

schedule-once: note
  says: The learning rate's schedule advances at most once for each optimizer step.
  means: Warm-up and decay are over too soon.
  judges: advances of a schedule
  twice: trainer and engine both advance it | the line is not the only one that does
  left: the optimizer was made again, and the schedule is that of the one before | schedule.optimizer is not the
    optimizer that steps

saved-what-is: finding but parameters
  says: A checkpoint that has a model has all that is trained of it, and is not saved by the plan of another.
  means: The checkpoint lacks something that the next load needs.
  judges: saves of a model; plans that are kept
  patches: megatron.rerun-state-dict(structure) megatron.save-plan-cache(structure)
  parameters: a filter of the state dict leaves parameters out | those that are named have a name in common
  structure: a strategy keeps the plan of an earlier save | not found without --ckpt-assume-constant-structure and
    --ckpt-fully-parallel-save

saved-is-trained: note
  says: A checkpoint has the weights that the optimizer steps, as they are when it is written.
  means: The run continues from another model: a reference, an average, or the weights of an earlier step.
  judges: saves of a model
  any: another model's weights, such as a reference's, are in the model as it is saved | the timeline has a swap or
    a load before the save, and none that puts them back
  copies: copies are saved that are older than the last step | the copies are named
  late: an asynchronous save begins only after a later step | the sentence says so; schedule it before the next
    step

weights-synced: finding
  says: The weights that are sent to generation are those that were trained.
  means: Rollouts come from another model than the one that is trained on them.
  judges: syncs for which another model was loaded
  patches: slime.first-sync-pushes-actor
  any: another model was loaded as weights were sent | the model is named

resumed: finding
  says: Generation that was paused for a weight sync is resumed, however the sync ends.
  means: Requests are never answered, and training waits for rollouts that do not come.
  judges: pauses of generation
  patches: areal.weight-sync-resume skyrl.async-trainer-resume skyrl.pause-rollback
  left: no `finally` resumes generation after an exception in the sync | the line is in the sync; the log has its
    exception
  resume: an engine does not answer | the sentence has the exception of the request
"""


class Cause(NamedTuple):
    """A way in which trainers break a rule.

    Attributes:
        cause: what is wrong, in a few words.
        check: what shows that it is this one.
        kinds: of the findings that it may explain; none for all of the rule.
        after: kinds of events that make it the likeliest.
    """

    cause: str
    check: str
    kinds: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


class Rule(NamedTuple):
    """A rule of Megatron's that repeated calls break.

    Attributes:
        says: the rule, one sentence.
        means: the damage that a step that breaks it does to training.
        judges: what is judged by it, in the plural; its halves, with "; " between them, are counted apart.
        patches: those that repair known ways of breaking it, each with the kinds that it repairs; "" for any.
        is_note: whether trainers may break it on purpose, so that it is no finding but a note.
        noted: kinds that are notes where the others are findings.
        causes: the usual ones, the likeliest first.
    """

    says: str
    means: str
    judges: str
    patches: Mapping[str, str]
    is_note: bool
    noted: tuple[str, ...]
    causes: tuple[Cause, ...]

    def counts(self, name: str, judged: Mapping[str, int]) -> dict[str, int]:
        """Return how many of each thing were judged, by the counts that a ledger has of the rule of this name."""
        halves = self.judges.split("; ")
        return {half: judged[f"{name} {half.split()[0]}" if halves[1:] else name] for half in halves}

    def patches_of(self, kind: str) -> list[str]:
        """Return the patches that may repair a finding of this kind."""
        return [name for name, only in self.patches.items() if not only or kind in only.split()]

    def causes_of(self, kind: str, events: Container[str] = ()) -> list[Cause]:
        """Return the likely causes of a finding of this kind, in order, after events of these kinds."""
        causes = [cause for cause in self.causes if kind in cause.kinds or not cause.kinds]
        return sorted(causes, key=lambda cause: not any(event in events for event in cause.after))


def _read(text: str) -> Iterator[tuple[str, Rule]]:
    for paragraph in text.strip().split("\n\n"):
        (name, kind), *entries = (
            " ".join(lines.split()).split(": ", 1) for lines in re.split(r"\n  (?! )", paragraph)
        )
        facts = {key: value for key, value in entries if key in Rule._fields}
        causes = []
        for kinds, value in (entry for entry in entries if entry[0] not in Rule._fields):
            kinds, _, after = kinds.partition(" after ")
            cause, check = value.split(" | ")
            causes.append(
                Cause(cause, check, () if kinds == "any" else tuple(kinds.split()), tuple(after.split()))
            )
        patches = {name: of for name, of in re.findall(r"([\w.-]+)(?:\((.+?)\))?", facts.get("patches", ""))}
        noted = tuple(kind.partition(" but ")[2].split())
        rule = Rule(facts["says"], facts["means"], facts["judges"], patches, kind == "note", noted, tuple(causes))
        yield name, rule


RULES: Mapping[str, Rule] = MappingProxyType(dict(_read(_TEXT)))
"""The rules, by name, in the order of the page."""
