"""Who hears what a session does: a terminal, a log, or nobody."""

from typing import Any, Protocol

from artifacts.manifests import Manifest
from stages.contract import Progress


class Listener(Protocol):
    """Where a session says what happens."""

    def progress(self, stage: str, place: str) -> Progress:
        """What a stage calls with its progress; ``place``: iteration, and round from the second."""

    def say(self, event: str, **fields: Any) -> None:
        """One line."""

    def stage(self, stage: str, place: str, manifest: Manifest, was_reused: bool) -> None:
        """The line of a stage that has committed."""


class Silent:
    """Nobody hears it."""

    def progress(self, stage: str, place: str) -> Progress:
        return lambda **_: None

    def say(self, event: str, **fields: Any) -> None:
        pass

    def stage(self, stage: str, place: str, manifest: Manifest, was_reused: bool) -> None:
        pass
