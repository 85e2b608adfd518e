"""The API keys that a server takes: bytes in UTF-8, as clients send them."""

import hmac
import os
from collections.abc import Sequence
from pathlib import Path

from kvjax.errors import ConfigError


def read_keys(given: str | None) -> tuple[bytes, ...]:
    """Returns the keys that --api-key names.

    Args:
      given: a key, or @ and a file that has one in each line; None for no key.

    Raises:
      ConfigError: there is none, one cannot be sent, or the file cannot be read.
    """
    if given is None:
        return ()
    flag = f"--api-key={given}" if given.startswith("@") else "--api-key"
    try:
        # What a terminal gives is kept byte by byte, whatever the locale is.
        content = Path(given[1:]).read_bytes() if given.startswith("@") else os.fsencode(given)
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{flag}: {error.strerror}.") from None
    except UnicodeError:
        raise ConfigError(f"{flag} is not UTF-8.") from None
    except ValueError as error:  # a null byte in the name of the file
        raise ConfigError(f"{flag}: {error}.") from None
    lines = text.split("\n") if given.startswith("@") else [text]
    # Not visible: blanks of any kind, and characters of no width.
    keys = [line.strip() for line in lines if any(each.isprintable() and not each.isspace() for each in line)]
    if not keys:
        raise ConfigError("--api-key is empty; give a key, or omit the flag to serve without authentication.")
    for key in keys:
        if any(ord(each) < 32 or ord(each) == 127 for each in key):
            raise ConfigError(f"{flag} contains a control character, which is not allowed in a header.")
    return tuple(key.encode() for key in keys)


def bearer_token(header: bytes) -> bytes:
    """The key of a header Authorization; empty if there is none."""
    scheme, _, token = header.partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def is_among(token: bytes, keys: Sequence[bytes]) -> bool:
    """Whether a token is one of the keys, in a time that does not depend on which."""
    equal = [hmac.compare_digest(token, key) for key in keys]
    return any(equal)
