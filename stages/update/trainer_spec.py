"""What driver and trainer ranks say to each other. Importing it loads no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from artifacts.manifests import Ref
from stages.update.config import UpdateConfig
from stages.update.samples import Samples


@dataclass(frozen=True)
class TrainerSpec:
    """What every rank is made from, and computes an update by."""

    model: str
    config: UpdateConfig
    on_null: str
    temperature: float
    total_steps: int
    handover_dtype: str

    def under(self, identity: Mapping[str, Any]) -> "TrainerSpec":
        """The spec by which the update of that ``identity`` is made, or made again.

        What an update was made by is in its own manifest, so it is replayed as it was under
        whatever configuration the run has now. What changes no number stays as it is here.
        """
        fields = UpdateConfig.model_fields.keys() & identity.keys()
        changes = UpdateConfig.model_validate({name: identity[name] for name in fields})
        config = self.config.model_copy(update={name: getattr(changes, name) for name in fields})
        return replace(
            self,
            config=config,
            on_null=identity["on_null"],
            temperature=identity["temperature"],
            total_steps=identity["total_steps"] or self.total_steps,
        )


@dataclass(frozen=True)
class UpdateOrder:
    """An iteration's update: which committed inputs, and the identity of the work."""

    rollout: Ref
    scores: Ref
    identity: Mapping[str, Any]


@dataclass(frozen=True)
class UpdateResult:
    """What an update gave, on rank 0. ``tensors``: rows of :data:`artifacts.schemas.TENSORS`."""

    weights_digest: str
    tensors: list[dict[str, Any]]
    steps: list[dict[str, float]]
    samples: Samples
    step_of_sample: list[int]
    seconds: dict[str, float]
