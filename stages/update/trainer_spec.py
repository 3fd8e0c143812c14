"""What driver and trainer ranks say to each other. Importing it loads no torch."""

from dataclasses import dataclass

from artifacts.manifests import Ref
from stages.update.config import UpdateConfig
from stages.update.samples import Samples


@dataclass(frozen=True)
class TrainerSpec:
    """What every rank is made from."""

    model: str
    config: UpdateConfig
    on_null: str
    temperature: float
    total_steps: int
    handover_dtype: str


@dataclass(frozen=True)
class UpdateOrder:
    """An iteration's update: which committed inputs, which optimizer steps."""

    rollout: Ref
    scores: Ref
    minibatches: int


@dataclass(frozen=True)
class UpdateResult:
    """What an update gave, on rank 0."""

    weights_digest: str
    steps: list[dict[str, float]]
    samples: Samples
    step_of_sample: list[int]
    seconds: dict[str, float]
