"""`pytest.raises` for errors of gradkeep, by their code."""

import pytest

from gradkeep.errors import GradkeepError


def raises(kind: type[GradkeepError], code: str, *, fix: str = "") -> pytest.RaisesExc:
    """Expect an error of this class with this code, whose `fix` contains the given words.

    >>> from gradkeep.errors import CaptureError
    >>> with raises(CaptureError, "capture.invalid", fix="shuffle") as caught:
    ...     raise CaptureError("the loader shuffles", fix="Pass shuffle=False.")
    >>> caught.value.message
    'the loader shuffles'
    """

    def matches(error: GradkeepError) -> bool:
        return error.code == code and fix in (error.fix or "")

    return pytest.raises(kind, check=matches)
