"""Is the suite able to fail?  ``python tests/parity/sensitivity.py [--only NAME ...] [--list]``

A table of mistakes that people make. Each is seeded in a copy of the tree, and the part of the suite runs that should
see it. Prints which test caught it; the exit status is 1 if one survives, and 2 if a place or a test is not there any
more, so that the table stays honest, or if a test fails without any fault.
"""

from __future__ import annotations

import argparse
import sys

from seeding import Edit, Fault, Stale, check


def fault(name: str, place: str, before: str, after: str, *tests: str) -> Fault:
    return Fault(name, (Edit(place, before, after),), tests)


def layout(*ids: str) -> tuple[str, ...]:
    """Cases of the parity suite."""
    return tuple(f"test_layouts.test_layout_computes_what_one_process_computes[{each}]" for each in ids)


def ladder(*ids: str) -> tuple[str, ...]:
    """Cases of the ladder's parity suite."""
    return tuple(f"test_each_rung_computes_what_one_process_computes[{each}]" for each in ids)


def offloaded(*ids: str) -> tuple[str, ...]:
    """Cases of what lives elsewhere."""
    return tuple(f"test_wherever_they_live_they_are_bitwise_the_same[{each}]" for each in ids)


def experts(*ids: str) -> tuple[str, ...]:
    """Cases of the suite of experts."""
    return tuple(f"test_experts_compute_what_one_process_computes[{each}]" for each in ids)


def mixture(*ids: str) -> tuple[str, ...]:
    """Cases of a layer's formula."""
    return tuple(f"test_a_mixture_is_the_formula_of_all_experts_for_all_tokens[{each}]" for each in ids)


def balance(*ids: str) -> tuple[str, ...]:
    """Cases of the formulas of balance."""
    return tuple(f"test_each_layout_has_the_gradients_of_the_formulas[{each}]" for each in ids)


def context(*ids: str) -> tuple[str, ...]:
    """Cases of the suite of a context over many ranks."""
    return tuple(f"test_context.test_context_is_that_of_one_process[{each}]" for each in ids)


def uneven(*ids: str) -> tuple[str, ...]:
    """Cases of global batches that ranks cannot share out evenly."""
    return tuple(f"test_uneven_shares_are_the_batch_of_one_process[{each}]" for each in ids)


MASKS = "test_masks.test_a_mask_is_drawn_for_one_use_and_again_for_its_backward"

FAULTS = (
    # -- sums over replicas
    fault(
        "norm weights are not summed over tp",
        "reduce.Gradients._share",
        "len(s.replicas) > 1",
        "len(s.replicas) > 1 and 'norm' not in s.name",
        *layout("llama-tp2"),
    ),
    fault(
        "buckets are not reduced over dp",
        "Gradients._take",
        "self._sums.append(start_all_reduce(bucket.gradient, bucket.across))",
        "",
        *layout("llama-dp2"),
    ),
    fault(
        "an average over dp for the sum",
        "Gradients._take",
        "start_all_reduce(bucket.gradient, bucket.across)",
        "start_all_reduce(bucket.gradient.div_(bucket.across.size), bucket.across)",
        *layout("llama-dp2"),
    ),
    fault(
        "buckets leave after the first microbatch",
        "Bucket.begin",
        "uses * microbatches if self.keeps else 1",
        "uses",
        *layout("llama-dp2"),
    ),
    fault(
        "a tied embedding is not summed between the ends of the pipeline",
        "Gradients.finish",
        "[start_all_reduce(bucket.gradient, bucket.across) for bucket in self.buckets if bucket.late]",
        "[]",
        *layout("gpt2-pp2"),
        *ladder("gpt2-pp2-dp2-optimizer"),
    ),
    fault(
        "the gradient of a shared kv head is not summed",
        "buckets._spans",
        "len(set(replicas.values())) == 1",
        "replicas",
        *layout("llama-tp4"),
    ),
    fault(
        "the second microbatch's gradient is copied, not added",
        "Bucket.add",
        "place.of(self.full).add_(place.span.of(gradient))",
        "place.of(self.full).copy_(place.span.of(gradient))",
        *layout("llama-dp2"),
    ),
    fault(
        "gradients of the last step are kept",
        "Gradients.begin",
        "span.parameter.grad = None",
        "",
        "test_a_step_starts_from_no_gradient_and_evaluation_leaves_none",
    ),
    # -- the data parallel ladder
    fault(
        "a rank updates another one's slice",
        "FlatLayout.shard",
        "flat.chunk(self.group.size)[self.group.index]",
        "flat.chunk(self.group.size)[self.group.index - 1]",
        *ladder("llama-dp2-optimizer"),
    ),
    fault(
        "a slice of the sum is taken from the wrong place",
        "start_reduce_scatter_",
        "x.chunk(group.size)[group.index]",
        "x.chunk(group.size)[group.index - 1]",
        *ladder("llama-dp2-optimizer"),
    ),
    fault(
        "units do not wait for their parameters",
        "zero._ready",
        "values.wait()",
        "",
        *ladder("llama-dp2-parameters"),
    ),
    fault(
        "after the update nobody gathers",
        "FlatParameters.updated",
        "self.gather_anew()",
        "",
        *ladder("llama-dp2-optimizer"),
    ),
    fault(
        "parameters that are gathered again are the old ones",
        "OnDevice.gather",
        "whole.chunk(group.size)[group.index].copy_(own)",
        "",
        *ladder("llama-dp2-parameters"),
    ),
    fault(
        "parameters stay after their use",
        "zero._hook.after_forward",
        "_reshard(unit.used, after)",
        "",
        "test_parameters_are_there_only_while_they_are_used",
    ),
    fault(
        "frozen parameters stay in the backward",
        "zero._hook.before_backward",
        "_reshard(each.frozen, [unit])",
        "",
        "test_frozen_parameters_are_there_only_while_they_are_used",
    ),
    fault(
        "adapters forget their scale",
        "ColumnAdapted.forward",
        "kernels.linear(self.dropout(x), self.a) * self._scale",
        "kernels.linear(self.dropout(x), self.a)",
        "test_a_step_is_that_of_the_formula",
    ),
    fault(
        "the pieces of B take each other's rows",
        "_Adapted.spread",
        "self.b.split",
        "self.b.flip(0).split",
        "test_a_step_is_that_of_the_formula",
    ),
    fault(
        "a row-parallel A is not summed",
        "RowAdapted.forward",
        "row_linear(self.dropout(x), self.a, None, self.base.group)",
        "F.linear(x, self.a).chunk(self.base.group.size)[self.base.group.index]",
        "test_tuning.test_layout_computes_what_one_process_computes[lora-all-tp]",
    ),
    fault(
        "an expert has the adapter of another one",
        "_UpAdapted.forward",
        "products.forward(narrow, b, groups)",
        "products.forward(narrow, b.roll(1, 0), groups)",
        "test_tuning.test_a_step_is_that_of_the_formula[lora-experts]",
    ),
    fault(
        "the gradient of an expert's A is not scaled",
        "_DownAdapted.backward",
        "products.input_gradient(d, b, groups).mul_(ctx.scale)",
        "products.input_gradient(d, b, groups)",
        "test_tuning.test_a_step_is_that_of_the_formula[lora-down]",
    ),
    fault(
        "peft's B of experts is by expert, as its A is",
        "models.lora._pair",
        "f'({RANK} {each.strip()})'",
        "f'({each}{RANK})'",
        "test_merged_weights_are_the_formula[mixtral-all]",
    ),
    fault(
        "peft's A of experts is by rank, as its B is",
        "models.lora._pair",
        "f'({each}{first})'",
        "f'({first} {each.strip()})'",
        "test_merged_weights_are_the_formula[mixtral-all]",
    ),
    fault(
        "frozen weights are trained",
        "Parameters.freeze",
        "name not in names",
        "True",
        "test_what_is_trained_learns_and_what_is_frozen_stays",
    ),
    fault(
        "the second microbatch's slice replaces the first's",
        "Bucket.take",
        "self.gradient.add_(found)",
        "self.gradient.copy_(found)",
        *ladder("llama-dp2-gradients"),
    ),
    fault(
        "groups of replicas do not sum their slices",
        "Gradients._take",
        "bucket.summed == bucket.rounds and not bucket.late",
        "False",
        *ladder("llama-dp4-x2-optimizer"),
    ),
    # -- what lives elsewhere
    fault(
        "slices in host memory do not come",
        "OnHost.gather",
        "whole.chunk(group.size)[group.index].copy_(own, non_blocking=True)",
        "",
        *offloaded("dp2-parameters"),
    ),
    fault(
        "all of an offloaded window decays",
        "OffloadedStore._update",
        "self._rule.weight_decay if decays else 0.0",
        "self._rule.weight_decay",
        *offloaded("dp2-optimizer"),
    ),
    fault(
        "what lies in gaps is not put back",
        "OffloadedStore.update",
        "flat.put_back()",
        "",
        *offloaded("tp4-none"),
    ),
    fault(
        "an offloaded step that is left out is taken",
        "OffloadedStore.update",
        "go if divisor is None else torch.where(go, divisor, go)",
        "torch.ones(())",
        "test_an_overflow_leaves_everything_as_it_was",
    ),
    fault(
        "a window that was changed is forgotten",
        "WindowStore.fetch",
        "self._write(place)",
        "",
        "test_a_window_is_read_after_it_was_written_and_one_that_fails_says_so",
    ),
    fault(
        "elements of an offloaded part are read beside their place",
        "Segment.overlap",
        "self.at - self.start",
        "-self.start",
        *offloaded("dp2-gradients"),
    ),
    fault(
        "stages share with each other",
        "rank_sets.divide",
        "place.pp",
        "0",
        "test_stages_and_replicas_divide_a_set",
    ),
    fault(
        "a gradient that has not come is what lay there",
        "Bucket.end_round",
        "full[stop : place.start].zero_()",
        "",
        "test_zero",
    ),
    fault(
        "a gradient that is computed later is not waited for",
        "Bucket.defer",
        "self._came[number] -= 1",
        "",
        "test_zero",
    ),
    fault(
        "a tensor is read from this rank's slice alone",
        "SplitSpan.collect",
        "start < stop",
        "start > stop",
        "test_weights_come_back_as_they_were_filled_in[parameters]",
    ),
    # -- experts
    fault(
        "the gradients of experts are summed over ep",
        "buckets._spans",
        "parameters.layout.replicas(shard, piece.label)",
        "parameters.mesh.batch.ranks if '.experts.' in name else parameters.layout.replicas(shard, piece.label)",
        *experts("starved-tp2-ep2-full"),
    ),
    fault(
        "the router's gradient is not summed over tp",
        "buckets._spans",
        "parameters.layout.replicas(shard, piece.label)",
        "parameters.mesh.batch.ranks if '.router.' in name else parameters.layout.replicas(shard, piece.label)",
        *experts("starved-tp2-ep2-full"),
    ),
    fault(
        "the router's gradient is not summed over ep",
        "buckets._spans",
        "parameters.layout.replicas(shard, piece.label)",
        "parameters.mesh.tp.ranks if '.router.' in name else parameters.layout.replicas(shard, piece.label)",
        *experts("starved-tp2-ep2-full"),
    ),
    fault(
        "the router is split",
        "Table.experts",
        "self.linear('mlp.router', 'routes', 'embed', router, held=f'{held[1]}.weight')",
        "self.linear('mlp.router', 'experts', 'embed', router, held=f'{held[1]}.weight')",
        *experts("starved-tp2-ep2-full"),
    ),
    fault(
        "tokens are given the weights of their other slots",
        "Router.weigh",
        "weights if routing.factor == 1 else weights * routing.factor",
        "weights.flip(-1) if routing.factor == 1 else weights.flip(-1) * routing.factor",
        *mixture("sigmoid-tp2-ep2"),
    ),
    fault(
        "gradients travel with the weights of other rows",
        "Dispatch.start",
        "self._in_order(weights)",
        "weights.flatten()[:, None]",
        *mixture("sigmoid-tp2-ep2"),
    ),
    fault(
        "the gradients of weights keep their weights",
        "start_weights_gradient",
        "torch.where(weights == 0, 0, home.finish() / weights)",
        "home.finish()",
        *mixture("sigmoid-tp2-ep2"),
    ),
    fault(
        "the rows that come again are those of other tokens",
        "_Up.backward",
        "dispatch.start(x)",
        "dispatch.start(x.flip(0))",
        *mixture("sigmoid-tp2-ep2"),
    ),
    fault(
        "rows go home to ranks from which others came",
        "Dispatch._start_home",
        "self.sorting[1]",
        "self.sorting[0]",
        *mixture("sigmoid-tp2-ep2"),
    ),
    fault(
        "each part of an expert adds the whole bias",
        "_Down.forward",
        "1 / dispatch.features.size",
        "1",
        *mixture("chosen-tp2-ep2-etp"),
    ),
    fault(
        "the shared expert is left out",
        "Experts.forward",
        "y if other is None else y + other",
        "y",
        *mixture("sigmoid-tp2-ep2"),
    ),
    fault(
        "biases that choose experts weigh them too",
        "Router.weigh",
        "scores_of(logits, routing).gather(-1, chosen)",
        "(scores_of(logits, routing) + self.correction).gather(-1, chosen)",
        *mixture("sigmoid-tp2-ep2"),
    ),
    fault(
        "scores are normalised before the choice",
        "Router.choose",
        "scores_of(logits, routing)",
        "scores_of(logits, routing) / scores_of(logits, routing).sum(-1, keepdim=True)",
        *mixture("sigmoid-tp2-ep2", "groups-tp2-ep2"),
    ),
    fault(
        "groups are scored by their best expert instead of two",
        "Router._kept",
        "grouped.topk(2, -1).values.sum(-1) if routing.group_score == 'top2' else grouped.amax(-1)",
        "grouped.amax(-1)",
        *mixture("groups-tp2-ep2"),
    ),
    fault(
        "two experts change places on disk",
        "transfer.hugging_face",
        "template.format(**index)",
        "template.format(**{axis: i ^ 1 if axis == 'experts' else i for axis, i in index.items()})",
        "test_transformers.test_logits_and_gradients[mixtral-0]",
    ),
    fault(
        "a balance is that of each microbatch",
        "Balance.begin",
        "self._sequences, self._tokens, scale = sequences, tokens, scale.double()",
        "self._sequences, self._tokens, scale = sequences / microbatches, tokens, scale.double()",
        *experts("starved-tp2-ep2-full"),
    ),
    fault(
        "a balance grows with the ranks that have its tokens",
        "counted_and_routed",
        "all_reduce_(own, mesh.batch)",
        "torch.cat([all_reduce_(own[:1].clone(), mesh.batch), own[1:]])",
        *experts("starved-tp2-ep2-full"),
    ),
    fault(
        "a balance falls with accumulation",
        "Balance.begin",
        "scale.double()",
        "scale.double() / microbatches",
        *experts("starved-tp2-ep2-full"),
    ),
    fault(
        "a balance is that of each tp rank",
        "Balance._toward",
        "all_reduce_(counts.clone(), self.mesh.along('cp', 'tp'))",
        "counts.clone()",
        *experts("starved-tp2-ep2-full"),
    ),
    fault(
        "the balance of the batch is that of each rank",
        "Balance._batch",
        "all_reduce_(counts.sum(0), self.mesh.along(*self.ACROSS))",
        "counts.sum(0)",
        *experts("few-pp2-ep2-gpipe"),
    ),
    fault(
        "a balance has no loss scale",
        "Balance.begin",
        "scale.double()",
        "torch.ones_like(scale).double()",
        "test_the_loss_scale_is_a_factor_of_what_enters",
    ),
    fault(
        "recomputation counts twice",
        "Balance.attach",
        "self.counts[at, tokens.microbatch] = counts.sum(0)",
        "self.counts[at, tokens.microbatch] += counts.sum(0)",
        *experts("starved-tp2-ep2-full"),
    ),
    fault(
        "padding counts",
        "Balance._count",
        "chosen.new_ones(1, 1) if padding is None else (~padding).long()[:, None]",
        "chosen.new_ones(1, 1)",
        *balance("one-1"),
    ),
    fault(
        "padding has a z-loss",
        "Balance.gradient",
        "if padding is not None:\n    z = z.masked_fill(padding[:, None], 0)",
        "",
        *balance("one-1"),
    ),
    fault(
        "biases move by the counts of each rank",
        "Balance.finish",
        "all_reduce_(self.counts.sum(1), self.mesh.along(*self.ACROSS))",
        "self.counts.sum(1)",
        *experts("starved-tp2-ep2-full"),
    ),
    fault(
        "biases move towards what is loaded",
        "Balance.move_biases",
        "counts.sum(-1, keepdim=True) - counts * self.routing.experts",
        "counts * self.routing.experts - counts.sum(-1, keepdim=True)",
        *balance("one-1"),
    ),
    fault(
        "biases move in a step that is left out",
        "TrainStep.update",
        "self.balance.move_biases(go)",
        "self.balance.move_biases(torch.ones_like(go))",
        "test_nothing_moves_in_steps_that_are_left_out_or_in_evaluation",
    ),
    fault(
        "biases are as narrow as weights may be",
        "Parameters._new",
        "torch.float32 if buffer else dtype",
        "torch.bfloat16 if buffer else dtype",
        *balance("one-1"),
    ),
    fault(
        "a rank without windows leaves its peers alone",
        "evaluate._dealt",
        "yield dealt[rank] if rank < len(dealt) else [Excerpt.padding(1, pad)]",
        "if rank < len(dealt):\n    yield dealt[rank]",
        "test_evaluate.test_every_layout_finds_the_same[ep4]",
    ),
    fault(
        "positions begin anew with each window",
        "Windows.of",
        "np.arange(start + 1, stop + 1)",
        "np.arange(1, stop - start + 1)",
        "test_evaluate.test_the_loss_by_position_is_that_of_transformers[12-5]",
    ),
    fault(
        "the most likely token is one of the rank's own",
        "scores.most_likely",
        "first = at + start",
        "first = at",
        "test_needles.test_needles_are_found_where_transformers_finds_them",
    ),
    # -- the norm and the optimizer
    fault(
        "replicas count each in the norm",
        "Gradients.squares",
        "square_sums(owned) / self._owners",
        "square_sums(owned)",
        *layout("llama-dp2"),
        *ladder("gpt2-pp2-dp2-optimizer"),
    ),
    fault(
        "each rank clips by its own norm",
        "norm_of",
        "total, numbers = summed.unbind()",
        "total, numbers = squares, summed[1]",
        *layout("llama-pp2"),
    ),
    fault(
        "the order of the norm's sum shows",
        "reduce._square_sum",
        "torch.empty_like(blocks[0], dtype=torch.float64)",
        "torch.empty_like(blocks[0], dtype=torch.float32)",
        "test_squares_are_summed_in_fp64",
    ),
    fault(
        "clipping is applied twice",
        "Optimizer.update",
        "self._divisor(norm, scale)",
        "self._divisor(norm, scale).square()",
        "test_clipping_bounds_the_norm_that_the_optimizer_sees",
    ),
    fault(
        "offloaded states are updated by gradients that are not clipped",
        "narrow_adamw.update",
        "None if step.divisor == 1 else torch.tensor(step.divisor, dtype=torch.float32)",
        "None",
        "test_gradients_are_divided_in_the_update[fused]",
    ),
    fault(
        "norms and biases decay",
        "Param.decays",
        "len(self.sentence.dims) > 1",
        "len(self.sentence.dims) >= 1",
        "test_norms_and_biases_do_not_decay",
    ),
    fault(
        "the schedule does not reach the optimizer",
        "DeviceStore.update",
        "group['lr'] = lr",
        "",
        "test_the_schedule_arrives_in_the_optimizer",
    ),
    fault(
        "after a NaN the weights move on",
        "TrainStep.update",
        "stats.finite & ~halted",
        "stats.finite",
        "test_a_loss_that_is_no_number_stops_and_the_weights_are_those_before",
    ),
    # -- collectives and linears
    fault(
        "a gather puts the parts in the wrong order",
        "start_all_gather",
        "out.chunk(group.size)",
        "out.chunk(group.size)[::-1]",
        *layout("gpt2-tp2"),
    ),
    fault(
        "a scatter hands out the wrong slices",
        "_swap",
        "x.chunk(group.size)",
        "x.chunk(group.size)[::-1]",
        *layout("gpt2-tp2"),
    ),
    fault(
        "a gather of features gathers tokens",
        "_concatenate",
        "start_all_gather(x.movedim(dim, 0), group).wait().movedim(0, dim)",
        "start_all_gather(x, group).wait()",
        "test_collectives",
    ),
    fault(
        "a row bias is added on every rank, before the sum",
        "linear.row_linear",
        "y + bias",
        "y + bias * group.size",
        *layout("gpt2-tp2"),
    ),
    fault(
        "the input's gradient of a column-parallel linear is the first rank's part alone",
        "Product.input_gradient_scatter",
        "self.input_gradient(dy, weight)",
        "self.input_gradient(dy, weight) * (group.index == 0)",
        *layout("llama-tp2"),
    ),
    # -- vocabulary and loss
    fault(
        "padded vocabulary has probability",
        "Objective.own_columns",
        "max(0, min(logits.shape[1], self.vocab - start))",
        "logits.shape[1]",
        *layout("llama-tp2"),
    ),
    fault(
        "the embedding does not mask other ranks' tokens",
        "VocabParallelEmbedding.forward",
        "rows * mine[..., None]",
        "rows",
        *layout("llama-tp2"),
    ),
    fault(
        "padded rows of the embedding are drawn",
        "initial_values",
        "shape = [stop - start for start, stop in zip(low, high, strict=True)]",
        "low, high = [0] * len(sizes), [max(a, b[1]) for a, b in zip(high, box)]\n"
        "shape = [stop - start for start, stop in zip(low, high, strict=True)]",
        *layout("llama-tp2"),
    ),
    fault(
        "labels are smoothed over the padded vocabulary",
        "Objective.losses",
        "self.label_smoothing / self.vocab",
        "self.label_smoothing / (logits.shape[1] * self.group.size)",
        *layout("llama-tied-biases-tp4"),
    ),
    fault(
        "the gradient is smoothed over the padded vocabulary",
        "Objective.gradient_",
        "self.label_smoothing / self.vocab",
        "self.label_smoothing / (logits.shape[1] * self.group.size)",
        *layout("llama-tied-biases-tp4"),
    ),
    fault(
        "the loss is divided by this rank's number of tokens",
        "counted_tokens",
        "all_reduce_(_counted(microbatches), mesh.batch)",
        "_counted(microbatches)",
        *layout("llama-dp2"),
    ),
    fault(
        "ignored labels count as tokens",
        "step._counted",
        "m.labels != IGNORE",
        "m.labels != IGNORE - 1",
        "test_loss_and_gradients_are_those_of_torch",
    ),
    fault(
        "ignored labels have a loss",
        "Objective.losses",
        "torch.where(labels != IGNORE, loss, 0.0)",
        "loss",
        "test_loss_and_gradients_are_those_of_torch",
    ),
    fault(
        "chunks of the loss forget what the ones before gave the weight",
        "_ChunkedLoss.forward",
        "kernels.add_product_(dw, dlogits.t(), full[rows])",
        "torch.mm(dlogits.t(), full[rows], out=dw)",
        "test_a_chunked_loss_computes_what_one_process_computes[tied-one-loss5]",
    ),
    fault(
        "each rank has the gradients of its own part of the vocabulary alone",
        "_ChunkedLoss.forward",
        "start_reduce_scatter(dx, objective.group).wait()",
        "objective.own(dx)",
        "test_a_chunked_loss_computes_what_one_process_computes[tied-tp2-selective-loss4]",
    ),
    fault(
        "the validation loss is the mean of batches' means",
        "Evaluation.loss",
        "torch.stack(losses).sum() / torch.stack(counts).sum()",
        "(torch.stack(losses) / torch.stack(counts)).mean()",
        "test_the_validation_loss_is_one_mean_over_all_labels",
    ),
    # -- dropout
    fault(
        "tensor-parallel ranks drop alike",
        "Decoder.chunk",
        "place.tp",
        "0",
        MASKS,
    ),
    fault(
        "data-parallel ranks drop alike",
        "Decoder.chunk",
        "place.dp",
        "0",
        MASKS,
    ),
    fault(
        "stages drop alike",
        "Decoder.chunk",
        "(virtual, place.dp, place.ep, place.cp, place.tp)",
        "(chunk, place.dp, place.ep, place.cp, place.tp)",
        MASKS,
    ),
    fault(
        "every step has the same dropout masks",
        "Uploader._microbatch",
        "key(self.config.train.seed, step, number)",
        "key(self.config.train.seed, number)",
        "test_masks_differ_between_steps_microbatches_and_ranks",
    ),
    fault(
        "a recomputed block draws other masks",
        "recompute.runner",
        "partial(checkpoint, use_reentrant=False, preserve_rng_state=drops)",
        "partial(checkpoint, use_reentrant=False, preserve_rng_state=False)",
        "test_what_is_kept_changes_no_bit[gpt2-dp2-full]",
    ),
    fault(
        "evaluation drops out",
        "Evaluation.loss",
        "run.model.train(False)",
        "",
        "test_evaluation_drops_nothing_and_training_goes_on_dropping",
    ),
    fault(
        "evaluation drops out in all chunks but the first",
        "assemble.Model.train",
        "self.chunks",
        "self.chunks[:1]",
        "test_dropout_is_switched_in_every_chunk",
    ),
    # -- what is kept
    fault(
        "what is kept in host memory is taken for what its storage held before",
        "offload.key",
        "tensor._version",
        "0",
        "test_saved",
    ),
    fault(
        "a view that comes back begins where its storage begins",
        "View.on",
        "self.offset",
        "0",
        "test_what_is_kept_changes_no_bit[llama-one-none-offload]",
    ),
    # -- latent attention
    fault(
        "the part of the keys that turns comes last",
        "LatentAttention.queries_keys_values",
        "torch.cat([turning.expand(-1, self.heads, -1), still], -1)",
        "torch.cat([still, turning.expand(-1, self.heads, -1)], -1)",
        "test_transformers.test_logits_and_gradients[deepseek_v3-0]",
    ),
    fault(
        "the part of the keys that turns is that before the latent",
        "LatentAttention.queries_keys_values",
        "latent, turning = self.kv_a(x).split([self.latent, self.rotary], -1)",
        "turning, latent = self.kv_a(x).split([self.rotary, self.latent], -1)",
        "test_transformers.test_logits_and_gradients[deepseek_v3-0]",
    ),
    fault(
        "only queries turn",
        "LatentAttention.queries_keys_values",
        "q, turning = self._rotate(q, *rotation), self._rotate(turning, *rotation)",
        "q = self._rotate(q, *rotation)",
        "test_transformers.test_logits_and_gradients[deepseek_v3-0]",
    ),
    fault(
        "the latent of keys and values has no norm",
        "LatentAttention.queries_keys_values",
        "self.kv_a_norm(latent)",
        "latent",
        "test_transformers.test_logits_and_gradients[deepseek_v3-0]",
    ),
    fault(
        "the latent of queries has no norm",
        "LatentAttention.queries_keys_values",
        "self.q_b(self.q_a_norm(self.q_a(x)))",
        "self.q_b(self.q_a(x))",
        "test_transformers.test_logits_and_gradients[deepseek_v3-1]",
    ),
    # -- what ranks and stages hold
    fault(
        "ranks share the wrong kv head",
        "split_axis",
        "head = part * size // parts",
        "head = part % size",
        *layout("llama-tp4"),
    ),
    fault(
        "uneven layers are on the wrong stage",
        "Layout.chunk_layers",
        "sum(self.layers[:virtual])",
        "sum(self.layers) // len(self.layers) * virtual",
        *layout("llama-tp2-pp2-uneven"),
    ),
    Fault(
        "the chunks of a stage follow each other",
        (
            Edit("Layout.stage_of_layer", "v % self.mesh.pp", "v // self.chunks"),
            Edit("Layout.chunk_layers", "chunk * self.mesh.pp + stage", "stage * self.chunks + chunk"),
        ),
        layout("llama-pp2-v2"),
    ),
    fault(
        "initial values depend on the rank",
        "initial_values",
        "key(seed, shard.name, label, block)",
        "key(seed, shard.name, label, block, box)",
        *layout("llama-tp2"),
    ),
    # -- what is computed again to be compared
    fault(
        "a replica's microbatch is compared with other masks",
        "recompute.microbatch_of",
        "replace(found, replica=replica)",
        "found",
        "test_it_leaves_no_trace[dp2]",
    ),
    fault(
        "what is compared is summed too",
        "Gradients._add",
        "self._sink is not None",
        "self._sink is not None and gradient is None",
        "test_it_leaves_no_trace[dp2]",
    ),
    fault(
        "only losses are compared",
        "recompute.computed.add",
        "checksum(gradient) * (2 * numbers[parameter] + 1)",
        "1",
        "test_of_three_replicas_the_one_that_computes_wrong_is_named[gradients]",
    ),
    # -- the pipeline
    fault(
        "a gradient goes to the wrong microbatch",
        "_Run._backward",
        "self.alive.pop((chunk, m))",
        "self.alive.pop(max(self.alive))",
        *layout("llama-pp2"),
    ),
    fault(
        "messages of a channel are taken in another order than they are sent",
        "schedules.requests",
        "asked[target][run[target]].append(sent)",
        "asked[target][run[target]].insert(0, sent)",
        *layout("llama-tp2-pp2-gpipe"),
    ),
    fault(
        "an activation goes to the wrong chunk",
        "schedules._sent",
        "Message((virtual + 1) // stages, action.microbatch)",
        "Message(action.chunk, action.microbatch)",
        "test_schedules",
    ),
    # -- the model
    fault(
        "gate and up are swapped",
        "kernels.activation._Gated.forward",
        "function.of(gate).mul_(up)",
        "function.of(up).mul_(gate)",
        "test_feed_forward",
    ),
    fault(
        "weight + 1 is rounded",
        "cpu._formed",
        "weight.to(wide) + offset",
        "(weight + offset).to(wide)",
        "test_the_offset_is_added_in_fp32",
    ),
    fault(
        "the formula of a norm forgets the offset",
        "kernels.norm._formula",
        "(weight.to(wide) + offset)",
        "weight.to(wide)",
        "test_norms_of_heads",
    ),
    fault(
        "each rank normalises by its own heads",
        "_NormOverRanks.forward",
        "all_reduce_(z.square().mean((1, 2)), group).div_(group.size)",
        "z.square().mean((1, 2))",
        "test_a_norm_over_the_heads_of_all_ranks",
    ),
    fault(
        "the gradient of a norm over heads ends at the rank",
        "_NormOverRanks.backward",
        "all_reduce_((product * w).mean((1, 2)), ctx.group).div_(ctx.group.size)",
        "(product * w).mean((1, 2))",
        "test_a_norm_over_the_heads_of_all_ranks",
    ),
    fault(
        "relu2 forgets its 2",
        "_ReLU2.backward",
        "F.relu(x).mul_(2).mul_(dy)",
        "F.relu(x).mul_(dy)",
        "test_feed_forward.test_gradients_are_derivatives",
    ),
    fault(
        "the multiplier of embeddings acts twice",
        "TokenEmbedding.forward",
        "x * self.scale",
        "x * self.scale * self.scale",
        "test_the_scale_of_embeddings_is_rounded_where_it_is_said",
    ),
    fault(
        "logits that are not finished meet the label",
        "Objective.losses",
        "self.finish.apply_(logits.gather(1, local[:, None])[:, 0].to(top.dtype))",
        "logits.gather(1, local[:, None])[:, 0].to(top.dtype)",
        "test_the_loss_is_that_of_finished_logits",
    ),
    fault(
        "the slope of a capped logit is that of the scale alone",
        "Finish.slope",
        "self.softcap is None",
        "True",
        "test_the_loss_is_that_of_finished_logits",
    ),
    fault(
        "the head's bias has the gradient of the last chunk",
        "_ChunkedLoss.forward",
        "db += dlogits.sum(0, dtype=wide)",
        "db.copy_(dlogits.sum(0, dtype=wide))",
        "test_the_loss_is_that_of_finished_logits",
    ),
    fault(
        "padding has the probability of a capped logit",
        "cross_entropy_statistics",
        "tl.where(column < valid, finished(z, SCALE, SOFTCAP), float('-inf'))",
        "finished(z, SCALE, SOFTCAP)",
        "test_fused.test_cross_entropy",
    ),
    fault(
        "the gated kernel forgets the slope of the cube",
        "gated_backward",
        "3 * _CUBIC",
        "_CUBIC",
        "test_fused.test_gated",
    ),
    fault(
        "a norm's kernel forgets the offset in its backward",
        "norm_backward",
        "OFFSET != 0",
        "False",
        "test_fused.test_norms_with_an_offset_and_without_a_bias",
    ),
    # -- kernels for GPUs
    fault(
        "a higher maximum leaves the sum of exponentials as it was",
        "cross_entropy_statistics",
        "total * tl.exp(top - new)",
        "total",
        "test_fused.test_cross_entropy",
    ),
    fault(
        "a norm's weight has the gradient of the last rows alone",
        "norm_backward",
        "dw += dz * z",
        "dw = dz * z",
        "test_fused.test_norms",
    ),
    fault(
        "values are turned with the keys",
        "rotation.rotate",
        "tl.where(in_v, first, first * along - second * across)",
        "first * along - second * across",
        "test_fused.test_rotation",
    ),
    fault(
        "what passes is read from the start of a head",
        "rotation.rotate",
        "_read(of_q, of_k, of_v, in_q, in_k, in_v, 2 * HALF + others, left)",
        "_read(of_q, of_k, of_v, in_q, in_k, in_v, others, left)",
        "test_fused.test_rotation",
    ),
    fault(
        "the last part of a head turns",
        "kernels.rotation._rotate",
        "out[..., 2 * half:].copy_(x[..., 2 * half:])\nx, turned = (x[..., : 2 * half], out[..., : 2 * half])",
        "out[..., : -2 * half].copy_(x[..., : -2 * half])\nx, turned = (x[..., -2 * half:], out[..., -2 * half:])",
        "test_rope.test_split_and_apply_and_its_gradient",
    ),
    fault(
        "a part of a head has the first frequencies of the whole",
        "inverse_frequencies",
        "(1.0 / _positions_per_radian(rope.rope_theta, dims), 1.0)",
        "(1.0 / _positions_per_radian(rope.rope_theta, head_dim, dims // 2), 1.0)",
        "test_rope.test_parts_of_heads_have_the_tables_of_transformers",
    ),
    fault(
        "local layers have the rope of the global ones",
        "rope_config.by_kind",
        "_of_kind(config, kind, convention)",
        "_of_kind(config, min(kinds), convention)",
        "test_rope.test_each_kind_of_layer_has_the_tables_of_transformers",
    ),
    fault(
        "the layers that see all have the window",
        "anatomy.by_kind",
        "{FULL: None, SLIDING: window}",
        "{SLIDING: None, FULL: window}",
        "test_qwen2.test_windows_that_are_on",
    ),
    fault(
        "queries have the norm of keys",
        "builder.attend",
        "(f'{name}.q_norm', f'{name}.k_norm')",
        "(f'{name}.k_norm', f'{name}.q_norm')",
        "test_transformers.test_logits_and_gradients[qwen3-0]",
    ),
    fault(
        "the layers that rotate are those that should not",
        "SmolLM3Config.rotates",
        "any((self.no_rope_layers or ())[layer:layer + 1])",
        "not any((self.no_rope_layers or ())[layer:layer + 1])",
        "test_smollm3.test_layers",
    ),
    fault(
        "a window is one token longer",
        "bands._firsts",
        "at - (window - 1)",
        "at - window",
        "test_scoring.test_the_formula",
    ),
    fault(
        "scores have their cap after the mask",
        "bands._in_blocks",
        "scores = _capped(_product(queries[:, own], keys[:, band.keys].mT, wide).mul_(scale), softcap)\n"
        "band.mask_(scores, first, float('-inf'))",
        "scores = _product(queries[:, own], keys[:, band.keys].mT, wide).mul_(scale)\n"
        "band.mask_(scores, first, float('-inf'))\nscores = _capped(scores, softcap)",
        "test_scoring.test_the_formula",
    ),
    fault(
        "sinks add to the sum as what they are not",
        "bands._in_blocks",
        "torch.logaddexp(total, each, out=log_sum[:, own])",
        "torch.logaddexp(total, -each, out=log_sum[:, own])",
        "test_scoring.test_the_formula",
    ),
    fault(
        "queries and keys turn before their norms",
        "MultiHeadAttention.queries_keys_values",
        "if self.norms is not None:\n    of_queries, of_keys = self.norms\n    q, k = of_queries(q), of_keys(k)",
        "if self.norms is not None:\n"
        "    q, k = self._rotate(q, *rotation), self._rotate(k, *rotation)\n"
        "    of_queries, of_keys = self.norms\n"
        "    q, k, rotation = of_queries(q), of_keys(k), None",
        "test_transformers.test_logits_and_gradients[qwen3-0]",
    ),
    fault(
        "what a branch adds is scaled twice",
        "Block._add",
        "torch.add(x, self.dropout(y), alpha=self.scale)",
        "torch.add(x, self.dropout(y) * self.scale, alpha=self.scale)",
        "test_transformers.test_logits_and_gradients[granite-2]",
    ),
    fault(
        "side by side, the feed-forward network has the norm of attention",
        "ParallelBlock.forward",
        "self.mlp_norm(x)",
        "self.attn_norm(x)",
        "test_transformers.test_logits_and_gradients[gpt_neox-1]",
    ),
    fault(
        "behind one norm, the feed-forward network is given what is not normed",
        "ParallelBlock.forward",
        "y if isinstance(self.mlp_norm, nn.Identity) else self.mlp_norm(x)",
        "x if isinstance(self.mlp_norm, nn.Identity) else self.mlp_norm(x)",
        "test_transformers.test_logits_and_gradients[cohere-0]",
    ),
    fault(
        "a softcap of logits is left out of the loss",
        "Head.forward",
        "Objective(self.group, self.vocab, self.losses.label_smoothing, self.losses.z_loss, self.finish)",
        "Objective(self.group, self.vocab, self.losses.label_smoothing, self.losses.z_loss)",
        "test_transformers.test_logits_and_gradients[gemma2-0]",
    ),
    fault(
        "pairs on disk are taken for halves",
        "Pairs.stored",
        "self._head('half two')",
        "self._head('two half')",
        "test_transformers.test_logits_and_gradients[cohere-0]",
    ),
    fault(
        "norms of Gemma multiply by the weight alone",
        "GemmaConfig.anatomy",
        "1.0",
        "0.0",
        "test_transformers.test_logits_and_gradients[gemma-0]",
    ),
    fault(
        "logits are multiplied by what divides them",
        "granite.Multipliers.anatomy_of",
        "1 / self.logits_scaling",
        "self.logits_scaling",
        "test_transformers.test_logits_and_gradients[granite-0]",
    ),
    fault(
        "layers that see all tokens rotate",
        "Cohere2Config.anatomy_of",
        "{FULL: None, SLIDING: ROPE}",
        "{FULL: ROPE, SLIDING: ROPE}",
        "test_cohere.test_layers_that_see_all_do_not_rotate",
    ),
    fault(
        "of every so many layers the first sees all",
        "PatternedConfig.slides",
        "layer + 1",
        "layer",
        "test_cohere.test_layers_that_see_all_do_not_rotate",
    ),
    fault(
        "the ropes of two kinds of layers change places",
        "LocalRopeConfig.ropes",
        "{FULL: self.rope_parameters, SLIDING: self.local_rope}",
        "{SLIDING: self.rope_parameters, FULL: self.local_rope}",
        "test_transformers.test_logits_and_gradients[gemma3_text-0]",
    ),
    fault(
        "a text model is tied by what it says itself",
        "unwrapped",
        "{**shared, **part, **tied, 'model_type': wrapper.family}",
        "{**shared, **tied, **part, 'model_type': wrapper.family}",
        "test_wrappers.test_a_head_of_its_own",
    ),
    fault(
        "tensors of no part of a model are passed over",
        "accounting.account",
        "outside = [name for name in part if not name.startswith(wrapper.prefix)]",
        "outside = []",
        "test_wrappers.test_what_is_of_no_part_is_an_error",
    ),
    fault(
        "every rope turns by the tables of one",
        "Decoder.context",
        "self._rotation(rotary, microbatch)",
        "self._rotation(next(iter(self._rotaries.values())), microbatch)",
        "test_rope.test_a_model_of_several_ropes",
    ),
    fault(
        "the gradient of the gate forgets its slope",
        "gated_backward",
        "1 + along * (1 - sigmoid)",
        "1.0",
        "test_fused.test_gated",
    ),
    fault(
        "the losses of ranks are of their own maxima",
        "cross_entropy_finish",
        "tl.load(own + tokens, mask=here, other=1) * tl.exp(less)",
        "tl.load(own + tokens, mask=here, other=1)",
        "test_fused.test_cross_entropy",
    ),
    fault(
        "rope counts positions by the microbatch",
        "Decoder._rotation",
        "return cos[microbatch.positions], sin[microbatch.positions]",
        "at = microbatch.positions // microbatch.sequences\nreturn cos[at], sin[at]",
        *layout("llama-one"),
    ),
    fault(
        "every tp rank embeds the positions of the first",
        "PositionEmbedding.forward",
        "microbatch.positions.chunk(self.group.size)[self.group.index]",
        "microbatch.positions.chunk(self.group.size)[0]",
        *layout("gpt2-tp2"),
    ),
    fault(
        "tokens see earlier documents",
        "documents.forward",
        "_DocumentBatches.of(starts)",
        "_DocumentBatches.of(starts[[0, -1]])",
        "test_documents_that_are_kept_apart_are_sequences_of_their_own",
    ),
    # -- the engine
    fault(
        "data-parallel ranks read the same samples",
        "Batches.microbatches_from",
        "position + self._rank * self._micro",
        "position",
        "test_every_layout_logs_what_one_process_logs[dp2]",
    ),
    fault(
        "samples that do not make a whole microbatch on each rank are dropped",
        "batches.filled_up",
        "-(-global_batch // together) * together",
        "global_batch // together * together",
        *uneven("llama-4-dp3-1"),
    ),
    fault(
        "the last sample of a global batch does not count",
        "Batches._row",
        "position < end",
        "position < end - 1",
        "test_a_microbatch_is_where_the_formula_says",
    ),
    fault(
        "the loss counts the labels of blank rows",
        "Sample.blank",
        "np.zeros_like(self.counted)",
        "self.counted",
        *uneven("llama-4-dp3-1"),
    ),
    fault(
        "experts are balanced for blank rows, too",
        "Sample.blank",
        "replace(self, counted=np.zeros_like(self.counted), filled=0)",
        "replace(self, counted=np.zeros_like(self.counted))",
        *uneven("starved-8-one-3"),
    ),
    fault(
        "the mean over sequences counts blank ones",
        "step.counted_and_routed",
        "m.sequences - m.blank",
        "m.sequences",
        *uneven("starved-8-dp3-ep2-gradients-1"),
    ),
    fault(
        "a step is not told of blank rows",
        "Uploader._microbatch",
        "batch.blank",
        "0",
        "test_blank_rows_are_no_sequences_of_a_balance",
    ),
    fault(
        "ranks of cp forget that rows are blank",
        "Batch.of_rank",
        "self.blank",
        "0",
        "test_ranks_of_cp_are_given_their_own_tokens",
    ),
    fault(
        "a rank that is asked to end leaves alone",
        "Trainer._agree",
        "self.control.largest(*asked.values())",
        "asked.values()",
        "test_one_rank_that_is_asked_to_end_ends_all_after_that_step",
    ),
    fault(
        "the second signal of one Ctrl-C ends at once",
        "Signals._ask",
        "now - self._first > PATIENCE_S",
        "now > self._first",
        "test_the_two_signals_of_one_ctrl_c_ask_for_one_orderly_end",
    ),
    fault(
        "a veto is ignored",
        "Trainer._commit",
        "self.train_step.update(stats, self.lr, self._vetoed)",
        "self.train_step.update(stats, self.lr)",
        "test_a_veto_leaves_an_update_out",
    ),
    fault(
        "the last veto is the only one",
        "Trainer.veto",
        "flag if self._vetoed is None else self._vetoed | flag",
        "flag",
        "test_a_veto_leaves_an_update_out",
    ),
    fault(
        "a bad step is not done again, but the one after it",
        "RepeatSteps._again",
        "run.rewind(step - 1, start)",
        "run.rewind(step, start)",
        "test_a_step_that_is_bad_once_leaves_no_trace[at-once-fp64]",
    ),
    fault(
        "steps behind a bad one change the weights",
        "BadSteps.on_gradients",
        "run.veto(self._halted)",
        "",
        "test_a_step_that_is_bad_once_leaves_no_trace[at-the-next-record-fp64]",
    ),
    fault(
        "callbacks behind a rewind hear of the step",
        "Trainer._agree",
        "self._back_to is not None or self.failure is not None",
        "self.failure is not None",
        "test_who_stands_behind_a_rewind_does_not_hear_of_the_step",
    ),
    fault(
        "what is saved has not been looked at",
        "Checkpoints.ask",
        "{'look': due, 'keep': due, 'save.busy': busy, 'save.failed': failed}",
        "{'look': False, 'keep': due, 'save.busy': busy, 'save.failed': failed}",
        "test_a_run_that_is_not_finite_any_more_is_not_saved_and_what_was_is",
    ),
    fault(
        "what is saved has not been compared",
        "Checkpoints.ask",
        "{'look': due, 'keep': due, 'save.busy': busy, 'save.failed': failed}",
        "{'look': due, 'keep': False, 'save.busy': busy, 'save.failed': failed}",
        "test_what_is_kept_is_compared_before",
    ),
    fault(
        "records of steps that were done again count twice",
        "metrics.read",
        "standing(filter(None, map(_line, path.read_bytes().splitlines())))",
        "list(filter(None, map(_line, path.read_bytes().splitlines())))",
        "test_a_run_goes_on_from_the_newest_whole_checkpoint[cut]",
    ),
    fault(
        "ranks with other callbacks start",
        "Trainer.fit",
        "self._check_callbacks()",
        "",
        "test_ranks_with_other_callbacks_do_not_start",
    ),
    fault(
        "a run that goes on begins with the first sample",
        "Trainer._steps",
        "self.batches.steps(self.position.samples)",
        "self.batches.steps()",
        "test_another_layout_goes_on_with_the_same_numbers[dp2]",
    ),
    fault(
        "a run that goes on corrects its moments' bias as in the first step",
        "megacore.training.initial_state.load_initial_state",
        "optimizer.updates = start.progress.updates",
        "",
        "test_another_layout_goes_on_with_the_same_numbers[tp4]",
    ),
    fault(
        "the moments of kv heads shared by ranks are not saved",
        "Gradients.read",
        "for span, values in collected:\n    span.of(whole).copy_(values)",
        "span.of(whole).copy_(collected[0][1])",
        "test_another_layout_goes_on_with_the_same_numbers[tp4]",
    ),
    fault(
        "a checkpoint is written from the live weights",
        "Snapshot._written.read",
        "copy = host[stored.name]",
        "copy = host[stored.name]\nself.state.read_into(part.state, stored.name, copy)",
        "test_training_goes_on_while_what_was_is_written",
    ),
    fault(
        "the only checkpoint makes room before the next one is there",
        "Saver._publish",
        "publication.finish()",
        "for old in checkpoints.complete(self.folder).values():\n"
        "    checkpoints.shutil.rmtree(old)\n"
        "publication.finish()",
        "test_a_checkpoint_that_is_to_go_stays_until_its_successor_is_there",
    ),
    # -- a context over many ranks
    fault(
        "positions restart on each rank of cp",
        "Batch.of_rank",
        "(x.ravel()[own] for x in (self.tokens, self.labels, self.positions))",
        "(self.tokens.ravel()[own], self.labels.ravel()[own], np.arange(len(own)))",
        "test_another_layout_goes_on_with_the_same_numbers[cp2-tp2]",
    ),
    fault(
        "rope restarts on each rank of cp",
        "Decoder._rotation",
        "rotary.at(microbatch.positions, microbatch.sequence_length, self.dtype)",
        "rotary.at(torch.arange(len(microbatch.positions)), microbatch.sequence_length, self.dtype)",
        *context("few-labels-cp4-ring-rows-1-gradients"),
    ),
    fault(
        "labels are shifted after the split",
        "Batch.of_rank",
        "(x.ravel()[own] for x in (self.tokens, self.labels, self.positions))",
        "(self.tokens.ravel()[own], np.roll(self.tokens.ravel()[own], -1), self.positions.ravel()[own])",
        "test_another_layout_goes_on_with_the_same_numbers[cp2-tp2]",
    ),
    fault(
        "the loss is a mean of the ranks' means",
        "counted_tokens",
        "all_reduce_(_counted(microbatches), mesh.batch).clamp_(min=1)",
        "_counted(microbatches).clamp_(min=1) * mesh.batch.size",
        *context("few-labels-cp4-ring-rows-1-gradients"),
    ),
    fault(
        "a loss of no tokens is not a number",
        "counted_tokens",
        "all_reduce_(_counted(microbatches), mesh.batch).clamp_(min=1)",
        "all_reduce_(_counted(microbatches), mesh.batch)",
        *context("nothing-counts-cp2-ring-documents-1"),
    ),
    fault(
        "on a rank of cp a document sees the one before",
        "ContextSplit.alone",
        "number == last and self.sight(number, window) is None",
        "last >= 0 and self.sight(number, window) is None",
        *context("odd-rows-cp4-gather-documents-1"),
    ),
    fault(
        "a window over cp is one token short",
        "ContextSplit.sight",
        "window - 1",
        "window - 2",
        *context("parts-cp4-ring-documents-1"),
    ),
    fault(
        "the odd tokens of a document are dropped",
        "context_split._zigzag",
        "shares.tokens - early",
        "early",
        *context("odd-rows-cp4-gather-documents-1"),
    ),
    fault(
        "frequencies go by the tokens of a rank",
        "Decoder._rotation",
        "rotary.at(microbatch.positions, microbatch.sequence_length, self.dtype)",
        "rotary.at(microbatch.positions, len(microbatch.positions), self.dtype)",
        *context("dynamic-tp2-cp2-ring-rows-1"),
    ),
    fault(
        "a scale of fp8 is that of each rank of cp",
        "Fp8._largest",
        "self.across or group",
        "group",
        *context("fp8-cp4-ring-documents-1"),
    ),
    fault(
        "the ranks of cp count their sequences together",
        "counted_and_routed",
        "sum(m.sequences - m.blank for m in microbatches) / mesh.shape.cp",
        "sum(m.sequences - m.blank for m in microbatches)",
        *context("starved-tp2-cp2-ring-documents-1-full"),
    ),
    fault(
        "the balance of a sequence is that of each rank of cp",
        "Balance._toward",
        "self.mesh.along('cp', 'tp')",
        "self.mesh.tp",
        *context("starved-tp2-cp2-ring-documents-1-full"),
    ),
    fault(
        "ranks of cp drop the same",
        "Decoder.chunk",
        "(virtual, place.dp, place.ep, place.cp, place.tp)",
        "(virtual, place.dp, place.ep, place.tp)",
        "test_with_heads_dropout_repeats_and_each_rank_has_masks_of_its_own",
        "test_no_two_ranks_of_an_axis_draw_a_mask[cp]",
    ),
    fault(
        "ranks of ep drop the same",
        "Decoder.chunk",
        "(virtual, place.dp, place.ep, place.cp, place.tp)",
        "(virtual, place.dp, place.cp, place.tp)",
        "test_no_two_ranks_of_an_axis_draw_a_mask[ep]",
    ),
    fault(
        "the balance of a sequence is that of the half which a rank of cp has",
        "Balance._toward",
        "self.mesh.along('cp', 'tp')",
        "self.mesh.tp",
        "test_an_axis_meets_a_feature[cp-balance of sequences]",
    ),
    fault(
        "the norm of a message that was cut is a number on a GPU",
        "norm_of",
        "total = torch.where(whole, total, math.nan)",
        "pass",
        "test_on_a_gpu_a_message_that_was_cut_makes_the_norm_no_number[True]",
    ),
    fault(
        "checkpoints of cp hold what one of its ranks has",
        "buckets._spans",
        "parameters.layout.replicas(shard, piece.label)",
        "tuple(r for r in parameters.layout.replicas(shard, piece.label) if (r < 2) == (parameters.mesh.rank < 2))",
        "test_another_layout_goes_on_with_the_same_numbers[cp2-tp2]",
    ),
    fault(
        "the keys of the backward are stale",
        "context_attention._attend_backward",
        "rows = _together(k, v)",
        "rows = _together.__dict__.setdefault(tuple(k.shape), _together(k, v))",
        *context("few-labels-cp4-ring-rows-1-gradients"),
    ),
    fault(
        "gradients of keys stop one hop short",
        "context_attention._attend_backward",
        "hop.give_back(gradients, home, k.dtype, ranks)",
        "hop.give_back(gradients * (number != len(plan.hops) - 2), home, k.dtype, ranks)",
        *context("few-labels-cp4-ring-rows-1-gradients"),
    ),
    fault(
        "a triangle of scores is left out on the wrong hop",
        "context_attention._attend",
        "partial.rectangle(q[of], keys[some], values[some], each.band, scoring)",
        "partial.rectangle(q[of], keys[some], values[some], each.band or 1, scoring)",
        *context("few-labels-cp4-ring-rows-1-gradients"),
    ),
    fault(
        "log-sum-exps are merged in bf16",
        "context_attention._attend",
        "torch.logaddexp(log_sum[of], more)",
        "torch.logaddexp(log_sum[of], more).bfloat16().to(more.dtype)",
        *context("few-labels-cp4-ring-rows-1-gradients"),
    ),
    fault(
        "keys that are gathered stand in the order of the ranks",
        "_RankHop.take",
        "self.places is None",
        "True",
        *context("odd-rows-cp4-gather-documents-1"),
    ),
    fault(
        "kv heads are in another order after the all-to-all",
        "ContextAttention._by_heads",
        "x.repeat_interleave(size // x.shape[1], 1)",
        "x.repeat(1, size // x.shape[1], 1)",
        *context("parts-cp4-heads-documents-4"),
    ),
    fault(
        "all ranks of cp compute what one has to",
        "context_attention._attend",
        "partial.alone(q, k, v, plan.alone, scoring)",
        "[partial.alone(q, k, v, plan.alone, scoring) for _ in range(ranks.size)][0]",
        "test_each_rank_does_its_share[rows]",
    ),
    # -- damage, and two runs in one folder
    fault(
        "moments are loaded without a look at their fingerprints",
        "Loader._wrong",
        "any(of_ranks)",
        "read.state in ('weights', 'master')",
        "test_one_bit_is_found_on_any_layout[2-mesh3-exp_avg-0]",
    ),
    fault(
        "what ranks have read is not held against what was written",
        "Loader._wrong",
        "value != read.written.get(piece, value)",
        "False",
        "test_a_rank_that_reads_something_else_is_found_though_the_files_are_sound",
    ),
    fault(
        "what generates and evaluates does not verify",
        "inference.load.model_from",
        "loader.verify()",
        "pass",
        "test_what_computes_with_a_model_refuses_it[2]",
    ),
    fault(
        "a run whose checkpoints are all damaged begins anew",
        "resume._find",
        "any((each.path / INDEX).exists() for each in damaged)",
        "False",
        "test_nothing_is_begun_anew_where_all_are_damaged",
    ),
    fault(
        "damaged checkpoints are passed over and left in the way",
        "start._prepared",
        "checkpoints.set_aside(each.path)",
        "each.path",
        "test_a_run_goes_on_from_the_newest_whole_checkpoint[cut]",
    ),
    fault(
        "a lock that can be had is trusted on any machine",
        "RunLock.take",
        "local and found.is_as(here)",
        "local",
        "test_a_lock_that_can_be_had_counts_only_when_the_heartbeat_stands_still",
    ),
    fault(
        "the heartbeat stands still",
        "RunLock._beat",
        "self._holder.beat + 1",
        "self._holder.beat",
        "test_without_locks_the_heartbeat_alone_tells",
    ),
    fault(
        "the folder is put in order before it is held",
        "main.fit",
        "start.hold(config, stack)",
        "(start._prepared(setup, mesh), start.hold(config, stack))",
        "test_a_second_run_changes_nothing",
    ),
    fault(
        "a save that fails is forgotten at the end",
        "Checkpoints.on_end",
        "self._unsaved and run.failure is None and self._saver.failing_s is not None",
        "False",
        "test_the_end_of_a_run_is_saved_again_and_again",
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", help="faults whose name contains this")
    parser.add_argument("--list", action="store_true", help="print the faults and seed none")
    arguments = parser.parse_args()
    chosen = [each for each in FAULTS if any(word in each.name for word in arguments.only or [""])]
    if not chosen:
        parser.error(f"no fault has {arguments.only} in its name; --list prints them")
    if arguments.list:
        print("\n".join(f"{each.name} ({', '.join(edit.place for edit in each.edits)})" for each in chosen))
        return 0
    try:
        return 1 if check(chosen) else 0
    except Stale as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
