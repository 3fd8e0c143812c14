"""Which critic: a chain beside the policies', one link an update.

It begins at the model that the critic is made from, with the first update that has one. An update
without a critic ends the chain, and so does one whose critic is made from another model: the next
begins anew.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from stages.contract import Committed


@dataclass(frozen=True)
class CriticName:
    """A critic.

    Attributes:
        base: digest of the folder of the model that it began as.
        version: number of updates behind its weights.
        digest: of its weights; at version 0 that of the folder.
    """

    base: str
    version: int
    digest: str

    def identity(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def critic_after(update: Committed | None, base: str) -> CriticName:
    """The critic that an update leaves to the next one, whose critic begins at ``base``."""
    if update is not None:
        taught = critic_of(update.manifest.identity)
        if taught is not None and taught.base == base:
            outcome = update.manifest.outcome
            return CriticName(base, outcome["critic_version"], outcome["critic_digest"])
    return CriticName(base, 0, base)


def critic_of(identity: Mapping[str, Any]) -> CriticName | None:
    """The critic that an update of this identity teaches, as it is before; None without one."""
    found = identity.get("critic")
    return None if found is None else CriticName(found["base"], found["version"], found["digest"])
