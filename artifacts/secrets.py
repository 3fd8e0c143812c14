"""What may stand in no manifest, message or record: credentials, in URLs and in what errors say.

Credentials come from the environment or a cloud's own files, and stay there.
"""

import os
import re
from collections.abc import Iterator
from urllib.parse import quote

_HIDDEN = "***"
# Shorter values are switches and numbers, such as TOKENIZERS_PARALLELISM=false.
_SHORTEST = 8

_SECRET_NAME = re.compile(
    r"SECRET|PASSW|PASSPHRASE|TOKEN|ACCESS_KEY|API_?KEY|CONNECTION_STRING|CREDENTIAL"
    r"|_(KEY|PAT|DSN|AUTH)$"
)
# Names of files and places, which are no secrets.
_PLACE_NAME = re.compile(r"_(FILE|PATH|DIR|URL|URI)$|^GOOGLE_APPLICATION_CREDENTIALS$")
# "user:password@" in any URL; a password may hold a slash, and digits before one are a port. In
# http(s), what stands alone before the @ is a token too; in abfs://container@account it is a name.
_USER = re.compile(r"(?<=://)[^/?#\s@]*:(?!\d+/)[^?#\s]*@")
_HTTP_USER = re.compile(r"(?<=http://)[^/?#\s@]+@|(?<=https://)[^/?#\s@]+@")
_QUERY = re.compile(
    r"([?&][^=&#\s]*(?:sig|token|key|secret|passw|credential|auth)[^=&#\s]*=)[^&#\s'\"]+", re.I
)


def holds_credentials(url: str) -> bool:
    """Whether ``url`` carries a password, a token or a signature."""
    if "://" not in url:
        return False
    return any(pattern.search(url) for pattern in (_USER, _HTTP_USER, _QUERY))


def redacted(text: str) -> str:
    """``text`` without the environment's secrets, and without credentials in URLs."""
    for secret in _secrets():
        text = text.replace(secret, _HIDDEN)
    for pattern in (_USER, _HTTP_USER):
        text = pattern.sub(f"{_HIDDEN}@", text)
    return _QUERY.sub(rf"\1{_HIDDEN}", text)


def _secrets() -> Iterator[str]:
    """Values of this process's variables that are secrets by their names, the longest first."""
    values = {
        value
        for name, value in os.environ.items()
        if _SECRET_NAME.search(name.upper()) and not _PLACE_NAME.search(name.upper())
    }
    for value in sorted(values, key=len, reverse=True):
        if len(value) >= _SHORTEST:
            yield from (value, quote(value, safe=""), repr(value)[1:-1])
