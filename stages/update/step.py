"""One optimizer step, short of applying it: which samples, what their tokens weigh, gradients.

The loss of a step is one sum over its tokens, over all micro-batches and ranks, and gradients are
summed, so no split of the samples changes what is computed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stages.packed import segments_of
from stages.packing import plan_microbatches
from stages.sequence_parallel import SequenceRanks
from stages.update.aggregation import pair_weights, token_weights
from stages.update.config import LOSSES, UpdateConfig
from stages.update.losses import find_loss
from stages.update.microbatch import MicroBatch, microbatch_loss
from stages.update.preferences import preference_pairs
from stages.update.samples import Samples
from stages.update.step_sums import StepSums


@dataclass(frozen=True)
class StepPlan:
    """What an optimizer step trains on.

    Attributes:
        units: samples that have to be in one micro-batch: a single one, or a preference pair,
            chosen first.
        scale: sample to the weight of each of its chosen tokens.
    """

    units: list[tuple[int, ...]]
    scale: Mapping[int, float]

    @property
    def num_samples(self) -> int:
        """How many samples are trained on."""
        return sum(len(unit) for unit in self.units)


def plan_step(samples: Samples, indices: Sequence[int], config: UpdateConfig) -> StepPlan:
    """The step on ``indices``. Its counts hold every sample that has a reward and a chosen token;
    it trains on those of them whose gradient is not 0 by construction."""
    counts = {i: int(samples.loss_masks[i].sum()) for i in indices if samples.weights_S[i] > 0}
    counts = {i: count for i, count in counts.items() if count > 0}
    if config.compares_pairs:
        pairs = preference_pairs(samples.ids, samples.groups, samples.rewards_S, counts)
        return StepPlan(list(pairs), pair_weights(counts, pairs))
    scale = token_weights(counts, config.loss_aggregation, samples.max_new_tokens)
    is_for_all = config.kl_coef > 0 or config.entropy_coef > 0 or config.loss not in LOSSES
    return StepPlan([(i,) for i in counts if is_for_all or samples.advantages[i].any()], scale)


def microbatches_of(
    samples: Samples, units: Sequence[Sequence[int]], max_tokens: int, rank: int, num_ranks: int
) -> list[list[int]]:
    """The samples of each micro-batch of ``rank``, units whole and in order."""
    lengths = samples.lengths()
    sizes = [sum(lengths[i] for i in unit) for unit in units]
    plan = plan_microbatches(sizes, max_tokens, num_ranks)[rank]
    return [[i for k in members for i in units[k]] for members in plan]


def accumulate_gradients(
    model: Any,
    samples: Samples,
    step: StepPlan,
    microbatches: Sequence[Sequence[int]],
    old: Sequence[np.ndarray] | None,
    config: UpdateConfig,
    temperature: float,
    ranks: SequenceRanks | None = None,
) -> StepSums:
    """Add the step's gradients to ``model``'s, and return its sums. Collective.

    Args:
        model: sharded, of :class:`stages.logprobs.LogprobModel`.
        microbatches: this rank's; every rank has as many, and those of ``ranks`` the same.
        old: each sample's log-probs under the policy that ratios are taken against; None: those
            of the model as it is.
        ranks: those that share each micro-batch with this one.
    """
    loss = find_loss(config.loss)
    device = next(model.parameters()).device
    sums = StepSums(device)
    for n, members in enumerate(microbatches):
        model.set_requires_gradient_sync(n == len(microbatches) - 1)
        batch = MicroBatch.of(samples, members, old, device, step.scale, ranks)
        inputs = batch.inputs(*model(batch.packed, temperature))
        # Checkpointed layers run once more in backward, and attention has to know the segments.
        with segments_of(batch.packed):
            microbatch_loss(loss, batch, inputs, config, sums).backward()
    return sums
