"""What is kept and sent of an error: its traceback as text that can be stored, and not too much of it."""

from __future__ import annotations

import json
import traceback

from gradkeep._display import head_and_tail

LARGEST = 64 << 10
"""Bytes of a text as JSON writes it: a job may raise errors of any length, again and again."""


def failure_text(text: str) -> str:
    """The text in at most 64 KiB, its beginning and its end.

    Halves of surrogate pairs and NULs, which no file takes, are written out.

    >>> failure_text("a" + chr(0xD800) + chr(0))
    'a\\\\ud800\\\\x00'
    >>> len(failure_text("x" * 10**6)) <= 65536
    True
    """
    most = LARGEST - 2
    while True:
        cut = head_and_tail(text, most).replace("\0", "\\x00")
        cut = cut.encode("utf-8", "backslashreplace").decode()
        if len(json.dumps(cut, ensure_ascii=False).encode()) <= LARGEST:
            return cut
        most = most * 3 // 4  # wide letters and line breaks take more than a byte


def current_failure() -> str:
    """The error that is dealt with now, with its traceback."""
    return failure_text(traceback.format_exc())
