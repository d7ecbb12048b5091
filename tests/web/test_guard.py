"""Who may ask: wrong hosts, missing tokens, other origins, odd paths and sizes are refused, and nothing changes."""

import pytest
from web_pages import TOKEN, settled

import gradkeep as gk
from gradkeep.errors import StoreError
from gradkeep.web._app import serve
from gradkeep.web._guard import Access, RequestLimits

DECISION = {"row": 3, "action": "accept"}


def decisions(folder):
    return gk.open(folder).decisions("train")


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "", "10.0.0.1", "localhost.evil", "127.0.0.1:1:2"],
)
@pytest.mark.parametrize("path", ["/", "/api/runs", "/static/app.js"])
def test_another_host_is_refused(shared, host, path):
    assert shared.get(path, headers={"host": host}).status_code == 421


def test_another_port_in_the_host_is_refused(master, make_client):
    client = make_client(master, access=Access(TOKEN, port=8765))
    assert client.get("/api/session", headers={"host": "127.0.0.1:8765"}).status_code == 200
    assert client.get("/api/session", headers={"host": "localhost:8765"}).status_code == 200
    for host in ("127.0.0.1:80", "127.0.0.1", "127.0.0.1:"):
        assert client.get("/api/session", headers={"host": host}).status_code == 421


@pytest.mark.parametrize(
    "headers",
    [
        {"x-gradkeep-token": ""},
        {"x-gradkeep-token": "wrong"},
        {"x-gradkeep-token": "é".encode("latin-1")},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "https://127.0.0.1"},
        {"origin": "http://127.0.0.1:81"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
    ids=str,
)
def test_writes_need_the_token_and_this_page(client, folder, headers):
    assert client.post("/api/decisions", json=DECISION, headers=headers).status_code == 403
    assert client.post("/api/suspects/retrained", json={}, headers=headers).status_code == 403
    assert decisions(folder) == []


def test_another_page_can_ask_nothing_and_asking_begins_no_training(client):
    assert client.get("/api/runs", headers={"sec-fetch-site": "cross-site"}).status_code == 403
    assert client.get("/", headers={"sec-fetch-site": "cross-site"}).status_code == 200
    for path in ("health", "suspects/suggestions"):
        response = client.get(f"/api/{path}")
        assert response.status_code == 409
        assert "start" in response.json()["problem"]["fix"]


def test_a_write_from_this_page_is_taken(client, folder):
    own = {"origin": "http://127.0.0.1", "sec-fetch-site": "same-origin"}
    assert client.post("/api/decisions", json=DECISION, headers=own).status_code == 200
    assert len(decisions(folder)) == 1


def test_a_remote_page_needs_the_token_for_everything(master, make_client):
    access = Access(TOKEN, hosts=("box.example",), remote=True)
    client = make_client(master, access=access)
    client.headers.pop("x-gradkeep-token")
    at = {"host": "box.example"}
    for path in ("/", "/static/app.js", "/static/page.css", "/api/runs", "/api/nothing"):
        assert client.get(path, headers=at).status_code == 401, path
        assert client.get(f"{path}?token=wrong", headers=at).status_code == 401
        answer = client.get(path, headers={**at, "authorization": f"Bearer {TOKEN}"})
        assert answer.status_code in (200, 404)
    moved = client.get(f"/?token={TOKEN}", headers=at, follow_redirects=False)
    assert (moved.status_code, moved.headers["location"]) == (303, "/")
    cookie = moved.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    carried = {**at, "cookie": cookie.partition(";")[0]}
    assert client.get("/", headers=carried).status_code == 200
    # A cookie goes with every request of the browser, so it is not enough to write.
    assert client.post("/api/decisions", json=DECISION, headers=carried).status_code == 403
    # An address is no name that somebody could point here.
    assert client.get("/api/runs", headers={**carried, "host": "10.1.2.3"}).status_code == 200
    assert client.get("/api/runs", headers={**carried, "host": "evil.example"}).status_code == 421


@pytest.mark.parametrize(
    "path",
    [
        "/static/../_app.py",
        "/static/..%2f_app.py",
        "/static/%2e%2e/%2e%2e/errors.py",
        "/static/..\\_app.py",
        "/static//etc/passwd",
        "/static/vendor/../../_app.py",
        "/static/app.js%00",
        "/static/index.html",
        "/static/",
        "/static/vendor",
        "/etc/passwd",
        "/api/../../STORE.json",
    ],
)
def test_no_path_reaches_a_file_that_is_not_the_pages(shared, path):
    answer = shared.get(path)
    assert answer.status_code == 404
    assert b"import" not in answer.content


@pytest.mark.parametrize(
    "query",
    [
        "run=../../etc",
        "run=a/b",
        "split=..",
        "name=%00",
        "run=" + "a" * 101,
        "split=%F0%9F%A6%8A",
    ],
)
@pytest.mark.parametrize(
    "path", ["queries", "suspects", "clusters", "rows?row=1&x=", "why?query=1&x="]
)
def test_names_from_requests_are_names(shared, path, query):
    if path.startswith("why"):
        query = query.replace("split", "queries")
    joined = f"/api/{path}&{query}" if "?" in path else f"/api/{path}?{query}"
    assert shared.get(joined).status_code in (404, 409, 422)


@pytest.mark.parametrize("query", ["abc", "1.5", "99999999999999999999", "", "1;2", "1e9", "NaN"])
def test_malformed_ids_are_refused(shared, query):
    assert shared.get(f"/api/why?query={query}").status_code == 422


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"row": "3", "action": "accept"}',
        b'{"row": 3, "action": "delete"}',
        b'{"row": 3, "action": "accept", "more": 1}',
        b'{"row": 1e400, "action": "accept"}',
        b'{"row": 99999999999999999999, "action": "accept"}',
        b'{"row": 3, "action": "accept", "split": "../x"}',
        b'{"row": 3, "action": "relabel", "label": true}',
        b"\xff\xfe",
        b"[" * 10_000,
    ],
)
def test_malformed_decisions_change_nothing(client, folder, body):
    headers = {"content-type": "application/json"}
    assert client.post("/api/decisions", content=body, headers=headers).status_code in (400, 422)
    assert decisions(folder) == []


def test_a_body_that_is_too_large_is_refused_whatever_its_head_says(client, folder):
    large = b'{"row": 3, "action": "accept", "x": "' + b"a" * 70_000 + b'"}'
    assert client.post("/api/decisions", content=large).status_code == 413

    def pieces():  # without a length
        for start in range(0, len(large), 1000):
            yield large[start : start + 1000]

    try:
        assert client.post("/api/decisions", content=pieces()).status_code >= 400
    except Exception as error:  # the server hung up
        assert "isconnect" in type(error).__name__ + str(error)  # noqa: PT017 - either is right
    assert decisions(folder) == []


def test_a_long_address_is_refused(shared):
    assert shared.get("/api/queries?search=" + "a" * 9000).status_code == 414


def test_too_many_requests_are_refused_for_a_while(master, make_client):
    limits = RequestLimits(reads_per_second=5, burst_seconds=2)
    client = make_client(master, access=Access(TOKEN, limits=limits))
    codes = [client.get("/api/session").status_code for _ in range(30)]
    assert codes[:5] == [200] * 5
    assert codes[-1] == 429


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_other_methods_do_nothing(client, folder, method):
    assert client.request(method, "/api/decisions").status_code == 405
    assert decisions(folder) == []


@pytest.mark.parametrize(
    "path", ["/", "/api/runs", "/static/app.js", "/api/nothing", "/api/why?query=x"]
)
def test_every_answer_carries_the_policy(shared, path):
    headers = shared.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert headers["referrer-policy"] == "no-referrer"
    assert "access-control-allow-origin" not in headers


def test_the_page_has_no_script_or_style_of_its_own_in_line(shared):
    page = shared.get("/").text
    assert TOKEN in page
    assert "<style" not in page
    assert " style=" not in page
    assert page.count("<script") == page.count("<script src=") + page.count(
        '<script type="module" src='
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.com"])
def test_a_remote_bind_needs_its_flag(master, host):
    with pytest.raises(StoreError, match="other machines"):
        serve(master, host=host, port=0, report=lambda _: None)


def test_a_port_that_is_taken_is_named(master):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(StoreError, match="--port 0"):
            serve(master, port=taken.getsockname()[1], report=lambda _: None)


def test_a_link_in_the_folder_of_logs_is_not_followed(folder, tmp_path, make_client):
    secret = tmp_path / "secret.log"
    secret.write_text("secret")
    (folder / "remat" / "link.log").symlink_to(secret)
    assert [one["name"] for one in settled(make_client(folder), "/api/memory").json()["logs"]] == [
        "step.log"
    ]


@pytest.mark.parametrize("label", [99999, -1, 10, 2**60])
def test_a_label_that_is_no_class_is_refused(client, folder, label):
    text = client.post("/api/decisions", json={"row": 3, "action": "relabel", "label": label})
    assert text.status_code == 409
    assert "0 to 9" in text.text
    assert client.post("/api/decisions", json={**DECISION, "label": 1}).status_code == 409
    assert decisions(folder) == []
