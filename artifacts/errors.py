"""The ways a store can disappoint, each a subclass of the builtin a caller would expect."""


class IntegrityError(ValueError):
    """Bytes that are not what their name or manifest says. Carries file, expected, found."""

    def __init__(self, path: str, expected: object, found: object, what: str = "digest") -> None:
        super().__init__(path, expected, found, what)
        self.path, self.expected, self.found, self.what = path, expected, found, what

    def __str__(self) -> str:
        return f"{self.path}: expected {self.what} {self.expected}, found {self.found}"


class AlreadyExistsError(FileExistsError):
    """Exclusive creation lost: the name is taken."""


class NotCommittedError(FileNotFoundError):
    """A stage's manifest was asked for and is not there."""
