"""What driver and trainer ranks say to each other. Importing it loads no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from artifacts.keys import source_digest
from artifacts.manifests import Ref
from stages.contract import StageError
from stages.update.config import CriticConfig, UpdateConfig
from stages.update.samples import Samples
from stages.user_code import digest_before_import, load_function

CRITIC_MODEL = "critic.model"


@dataclass(frozen=True)
class TrainerSpec:
    """What every rank is made from, and computes an update by."""

    model: str
    config: UpdateConfig
    on_null: str
    temperature: float
    total_steps: int
    handover_dtype: str
    # Tokens of the longest sample that can come: for the estimate of memory alone.
    longest: int = 0

    def under(self, order: "UpdateOrder") -> "TrainerSpec":
        """The spec by which the update of that ``order`` is made, or made again.

        What an update was made by is in its own manifest, so it is replayed as it was under
        whatever configuration the run has now. What changes no number stays as it is here.

        Raises:
            StageError: a user's function is not there, or its source is not what it was.
        """
        check_functions(order)
        identity = {**order.identity, **order.paths}
        fields = (UpdateConfig.model_fields.keys() & identity.keys()) - {"critic"}
        found = UpdateConfig.model_validate({name: identity[name] for name in fields})
        changes = {name: getattr(found, name) for name in fields}
        return replace(
            self,
            config=self.config.model_copy(update={**changes, "critic": self._critic(order)}),
            on_null=identity["on_null"],
            temperature=identity["temperature"],
            total_steps=identity["total_steps"] or self.total_steps,
        )

    def alone(self) -> "TrainerSpec":
        """The spec of a rank that is the only one."""
        return replace(self, config=self.config.model_copy(update={"sp": 1}))

    def _critic(self, order: "UpdateOrder") -> CriticConfig | None:
        identity = order.identity.get("critic")
        if identity is None:
            return None
        # Where its model lies is said by the run now, or by the update where that has no critic.
        now = self.config.critic
        model = now.model if now is not None else order.paths.get(CRITIC_MODEL)
        fields = CriticConfig.model_fields.keys() & identity.keys()
        return CriticConfig(**{name: identity[name] for name in fields}, model=model)


@dataclass(frozen=True)
class UpdateOrder:
    """An iteration's update: which committed inputs, and the identity of the work.

    Attributes:
        inputs: rollouts, scores and policy, as the update's manifest names them.
        functions: the user's own, config field to source digest.
        paths: where they lie, config field to import path; and the critic's model.
    """

    inputs: Mapping[str, Ref]
    identity: Mapping[str, Any]
    functions: Mapping[str, str] = field(default_factory=dict)
    paths: Mapping[str, str] = field(default_factory=dict)

    @property
    def wanted(self) -> int | None:
        """Groups that make up the batch, where sampling fills it; else None: all of them do."""
        return self.identity.get("groups")


def check_functions(order: UpdateOrder) -> None:
    """Raise StageError where a user's function is not what the order's work was described with.

    Where a path lies is in no digest, so a plain function's file is imported only where its source
    is the right one; any other function has to be imported to be known.
    """
    for name, digest in order.functions.items():
        path = order.paths[name]
        found = digest_before_import(path)
        try:
            if found is None or found == digest:
                found = source_digest(load_function(path, name))
        except ValueError as error:
            raise StageError(f"update.{name} is needed to make an update again: {error}") from error
        if found != digest:
            raise StageError(
                f"update.{name} {path} has another source now than the update was described with "
                f"(digest {found[:16]}, and it was {digest[:16]}): give it back its own"
            )


class OutOfMemoryError(StageError):
    """A rank's device has no room for the step; what the group held is lost."""


@dataclass(frozen=True)
class UpdateResult:
    """What an update gave, on rank 0.

    ``tensors`` are rows of :data:`artifacts.schemas.TENSORS`, the critic's after the policy's;
    ``critic_digest`` is of its weights, None without one. ``memory`` is each rank's, as
    :meth:`stages.update.memory_marks.MemoryMarks.phases` gives it.
    """

    weights_digest: str
    tensors: list[dict[str, Any]]
    steps: list[dict[str, float]]
    samples: Samples
    step_of_sample: list[int | None]
    seconds: dict[str, float]
    critic_digest: str | None = None
    memory: list[dict[str, dict[str, int]]] = field(default_factory=list)
