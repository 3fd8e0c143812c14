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


class HeldError(RuntimeError):
    """Another process writes in the run. Carries the run's URL, and who holds it since when."""

    def __init__(self, url: str, host: str, pid: int, since: str) -> None:
        super().__init__(url, host, pid, since)
        self.url, self.host, self.pid, self.since = url, host, pid, since

    def __str__(self) -> str:
        return (
            f"run {self.url} is held by process {self.pid} on {self.host} since {self.since}: "
            "wait until it has ended, or end it and resume the run"
        )


class LeaseLostError(RuntimeError):
    """The run is no longer this process's to write in. Carries its URL and what happened to it."""

    def __init__(self, url: str, what: str) -> None:
        super().__init__(url, what)
        self.url, self.what = url, what

    def __str__(self) -> str:
        return (
            f"run {self.url} {self.what}: this process commits nothing more in it; "
            "look after the run where it goes on, or resume it when it has ended there"
        )


class RetiredError(FileNotFoundError):
    """What is asked for was removed by ``ratchet gc``; the message says when and by which rule."""


class UrlError(ValueError):
    """A URL that no file system can or should be made of; a sentence with the remedy."""


class StoreError(OSError):
    """A file system failed. Carries what was being done to which file, and why it failed.

    Whatever a client library raised (botocore's and aiohttp's own errors are no OSErrors) leaves
    a store as this, without a word of credentials.
    """

    def __init__(self, operation: str, location: str, reason: str, code: int | None = None) -> None:
        super().__init__(operation, location, reason, code)
        self.operation, self.location, self.reason = operation, location, reason
        self.errno = code

    def __reduce__(self) -> tuple[type["StoreError"], tuple[object, ...]]:
        return StoreError, (self.operation, self.location, self.reason, self.errno)

    def __str__(self) -> str:
        return f"can't {self.operation} {self.location}: {self.reason}"
