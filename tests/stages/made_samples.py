"""Samples as an update reads them, without a store: what losses and steps are tested on."""

from dataclasses import replace

import numpy as np

from stages.update.samples import Samples


def samples_of(responses, masks=None, rewards=None, advantages=None, weights=None, groups=None):
    """Samples with the given response ids; prompts differ in length. Log-probs are all -1."""
    count = len(responses)
    masks = masks or [[1] * len(response) for response in responses]
    advantages = [1.0] * count if advantages is None else advantages
    return Samples(
        ids=[f"{i:03d}" for i in range(count)],
        groups=[str(g) for g in (groups or range(count))],
        sequences=[([1, *range(5, 6 + i % 4)], list(r)) for i, r in enumerate(responses)],
        loss_masks=[np.array(mask, np.int8) for mask in masks],
        sampler_logprobs=[np.full(len(r), -1, np.float32) for r in responses],
        reference_logprobs=None,
        rewards_S=np.zeros(count) if rewards is None else np.array(rewards, dtype=float),
        max_new_tokens=16,
        weights_S=np.ones(count) if weights is None else np.array(weights, dtype=float),
        chosen_S=np.ones(count, dtype=bool),
        advantages=[
            a * np.array(mask, dtype=float) for a, mask in zip(advantages, masks, strict=True)
        ],
    )


def reordered(samples, order):
    """The same samples in another order."""

    def taken(column):
        return None if column is None else [column[i] for i in order]

    return replace(
        samples,
        ids=taken(samples.ids),
        groups=taken(samples.groups),
        sequences=taken(samples.sequences),
        loss_masks=taken(samples.loss_masks),
        sampler_logprobs=taken(samples.sampler_logprobs),
        reference_logprobs=taken(samples.reference_logprobs),
        rewards_S=samples.rewards_S[order],
        weights_S=samples.weights_S[order],
        advantages=taken(samples.advantages),
    )
