"""Passwords, keys and tokens stay out of what stages print, log, save and send."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

MASK = "***"
LEAST_LENGTH = 8
"""A shorter value of the environment is not looked for: it would mask ordinary words."""

_WORDS = (
    r"(?:token|secret\w{0,40}|api_?key|passw(?:or)?d|passphrase|credentials?|private_key"
    r"|access_key(?:_id)?|account_key)"
)
SECRET_NAME = re.compile(rf"(?:.*[_.-])?{_WORDS}", re.IGNORECASE)
"""What the name of an environment variable or of a config key looks like that holds a secret."""

# Every repetition has a limit, so that the time grows with the text's length and no faster.
_USER = re.compile(
    r"\b([a-z][a-z0-9+.-]{0,20}://)(?:[^\s/@]{1,400}|[^\s/@:]{1,200}:(?!\d+/)[^\s@]{0,400})@",
    re.IGNORECASE,
)
_QUERY = re.compile(
    r"([?&;](?:x-(?:amz|goog|ms)-[\w-]{1,40}|sig|signature|key|policy|awsaccesskeyid"
    rf"|googleaccessid|(?:[^=&?;\s]{{0,80}}[_.-])?{_WORDS})=)[^&;#\s'\"]+",
    re.IGNORECASE,
)
_ASSIGNED = re.compile(
    rf"(?<![\w.?&-])([+~-]{{0,4}}(?:[\w./@-]{{0,120}}[_.-])?{_WORDS}['\"]?[ ]?=[ ]?)"
    r"(?!null\b)('[^']*'|\"[^\"]*\"|[^\s,;&)\]}]+)",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b(bearer|authorization: ?basic)(\s)[\w.~+/=-]{8,}", re.IGNORECASE)


def is_secret_name(name: str) -> bool:
    """Whether a variable or a key of this name holds a secret, such as ``HF_TOKEN``."""
    return SECRET_NAME.fullmatch(name) is not None


def secret_values() -> list[str]:
    """Return the secrets of the environment as they may appear in text, longest first."""
    found = set()
    for name, value in os.environ.items():
        if len(value.strip()) >= LEAST_LENGTH and is_secret_name(name):
            found |= {value.strip(), quote(value.strip(), safe="")}
    return sorted(found, key=len, reverse=True)


def redact(value: Any) -> Any:
    """Return ``value`` with every secret in it as ``***``.

    Secrets are the values of environment variables with names such as ``WANDB_API_KEY`` or
    ``HF_TOKEN``, users and passwords in URLs, the signature of signed URLs, and where a name says
    so: ``NAME=VALUE`` in a text and the value of a mapping's key.

    Parameters
    ----------
    value : str, path, mapping, list, tuple or anything else
        Containers are copied, what is neither text nor a container comes back as it is.
    """
    return _redact(value, secret_values())


def _redact(value: Any, known: list[str]) -> Any:
    if isinstance(value, str):
        return _redact_text(value, known)
    if isinstance(value, PurePath):
        text = _redact_text(str(value), known)
        return value if text == str(value) else text
    if isinstance(value, Mapping):
        return {
            _redact(key, known): MASK
            if isinstance(each, str) and each and isinstance(key, str) and is_secret_name(key)
            else _redact(each, known)
            for key, each in value.items()
        }
    if isinstance(value, (list, tuple)):
        items = [_redact(each, known) for each in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def _redact_text(text: str, known: list[str]) -> str:
    for secret in known:
        text = text.replace(secret, MASK)
    if "://" in text:
        text = _USER.sub(rf"\1{MASK}@", text)
    if "=" in text:
        text = _QUERY.sub(rf"\1{MASK}", text)
        text = _ASSIGNED.sub(rf"\1{MASK}", text)
    return _BEARER.sub(rf"\1\2{MASK}", text)


def redact_logs() -> None:
    """Take secrets out of every log record from now on, of whatever logger; once is enough."""
    make = logging.getLogRecordFactory()
    if getattr(make, "redacts", False):
        return

    def record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        made = make(*args, **kwargs)
        try:
            message = made.getMessage()
        except (TypeError, ValueError):
            return made  # a format that does not fit its arguments: logging reports that itself
        made.msg, made.args = redact(message), ()
        if made.exc_info and made.exc_info[0] is not None:
            made.exc_text = redact(logging.Formatter().formatException(made.exc_info))
        return made

    record.redacts = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(record)
