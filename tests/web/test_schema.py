"""Odd requests, drawn from the page's own description of itself: none is answered by a server error."""

import contextlib
import warnings

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from web_pages import TOKEN, previews

from gradkeep.web._app import create_app
from gradkeep.web._guard import Access, RequestLimits

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    schemathesis = pytest.importorskip("schemathesis")

HEADERS = {"host": "testserver", "x-gradkeep-token": TOKEN}
RELAXED = settings(
    max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@pytest.mark.filterwarnings("ignore")  # those of the tool itself
def test_no_request_is_a_server_error(folder):
    limits = RequestLimits(reads_per_second=1e6, writes_per_second=1e6)
    access = Access(TOKEN, hosts=("testserver",), limits=limits)
    app = create_app(folder, data=previews(), access=access)
    description = schemathesis.openapi.from_asgi("/api/openapi.json", app, headers=HEADERS)
    operations = [answer.ok() for answer in description.get_all_operations()]
    assert len(operations) >= 25
    tried = set()

    def check(case):
        response = case.call(headers=HEADERS)
        tried.add(response.status_code)
        assert response.status_code < 500, (case.formatted_path, response.text)
        assert "OurFault" not in response.text

    for operation in operations:
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
            drawn = operation.as_strategy(generation_mode=mode)
            # What has no parameters cannot be asked for wrongly.
            with contextlib.suppress(Unsatisfiable):
                RELAXED(given(drawn)(check))()
    assert {200, 404, 422} <= tried
