"""`pytest.raises` for errors of gradkeep, by their code."""

import pytest

from gradkeep.errors import GradkeepError


def raises(
    kind: type[GradkeepError], code: str, *, fix: str = "", mentions: str = ""
) -> pytest.RaisesExc:
    """Expect an error of this class with this code.

    Its `fix` contains the words `fix`, and its text the fact `mentions`, such as a row or a layer.

    >>> from gradkeep.errors import CaptureError
    >>> with raises(CaptureError, "capture.invalid", fix="shuffle", mentions="sample 3") as caught:
    ...     raise CaptureError("sample 3 is shuffled", fix="Pass shuffle=False.")
    >>> caught.value.message
    'sample 3 is shuffled'
    """

    def matches(error: GradkeepError) -> bool:
        return error.code == code and fix in (error.fix or "") and mentions in str(error)

    return pytest.raises(kind, check=matches)
