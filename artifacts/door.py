"""The way out of every file system: what a client raises, as one kind of error without secrets.

Client libraries raise their own errors (botocore's, aiohttp's and google's are no OSErrors), name
no file in many, and repeat an endpoint with its password in some.
"""

import contextlib
from collections.abc import Iterator

from artifacts.errors import AlreadyExistsError, StoreError
from artifacts.secrets import redacted


@contextlib.contextmanager
def explaining(operation: str, location: str) -> Iterator[None]:
    """Turn what a file system raises inside into a StoreError that names both arguments.

    FileNotFoundError, AlreadyExistsError and what is wrong with an argument (TypeError,
    ValueError) pass as they are.
    """
    try:
        yield
    except (FileNotFoundError, AlreadyExistsError, StoreError):
        raise
    except Exception as error:
        if type(error).__module__ == "builtins" and not isinstance(error, OSError):
            raise
        made = StoreError(operation, redacted(location), _reason(error), _code(error))
        # A traceback prints the whole chain: where a link of it holds a secret, none is kept.
        raise made from (None if _tells_secrets(error) else error)


def _reason(error: BaseException) -> str:
    name, text = type(error).__name__, redacted(str(error))
    return f"{name}: {text}" if text else name


def _code(error: BaseException) -> int | None:
    return error.errno if isinstance(error, OSError) else None


def _tells_secrets(error: BaseException | None) -> bool:
    while error is not None:
        if redacted(str(error)) != str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
