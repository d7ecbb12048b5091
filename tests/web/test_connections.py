"""Clients that hold connections open: the page goes on answering everybody else."""

import contextlib
import http.client
import socket
import threading
import time

import pytest
from web_pages import TOKEN

from gradkeep.web._app import build_server, create_app
from gradkeep.web._guard import Access, ConnectionLimits

HEAD = b"GET /api/session HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@contextlib.contextmanager
def serving(folder, **limits):
    """The port of a real server about a store, which ends with the block."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = build_server(create_app(str(folder), access=Access(TOKEN)), ConnectionLimits(**limits))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(10)


def answer(port):
    """The status of a whole request on a connection of its own."""
    queries = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        queries.request("GET", "/api/session")
        return queries.getresponse().status
    finally:
        queries.close()


def connect(port, sent=b""):
    opened = socket.create_connection(("127.0.0.1", port), timeout=5)
    opened.sendall(sent)
    return opened


def is_closed(opened):
    try:
        while opened.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize("sent", [b"", HEAD])
def test_unfinished_requests_do_not_close_the_page(master, sent):
    with serving(master) as port, contextlib.ExitStack() as stack:
        for _ in range(140):
            stack.enter_context(connect(port, sent))
        assert answer(port) == 200


def test_a_request_that_is_not_finished_in_time_is_ended(master):
    with serving(master, head_seconds=0.3, body_seconds=0.3) as port:
        post = b"POST /api/decisions HTTP/1.1\r\nHost: 127.0.0.1\r\nx-gradkeep-token: "
        post += (
            TOKEN.encode() + b"\r\ncontent-type: application/json\r\ncontent-length: 20\r\n\r\n{"
        )
        for sent in (b"", HEAD, HEAD + b"x: ", post, HEAD + b"content-length: 9\r\n\r\n"):
            with connect(port, sent) as opened:
                began = time.monotonic()
                with contextlib.suppress(ConnectionError):
                    for _ in range(4):  # bytes now and then do not buy more time
                        time.sleep(0.1)
                        opened.sendall(b"a")
                assert is_closed(opened)
                assert time.monotonic() - began < 3
        assert answer(port) == 200


def test_a_client_that_does_not_take_its_answer_is_ended(master):
    with serving(master, answer_seconds=0.3) as port:
        opened = socket.socket()
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        opened.connect(("127.0.0.1", port))
        with opened:
            whole = b"GET /static/vendor/uplot.js HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
            with contextlib.suppress(OSError):
                opened.sendall(whole * 400)
            opened.settimeout(5)
            time.sleep(0.5)
            assert is_closed(opened)
        assert answer(port) == 200


def test_one_address_takes_no_more_than_its_share(master):
    with serving(master, per_address=3) as port:
        first = connect(port, HEAD)
        others = [connect(port, HEAD) for _ in range(2)]
        assert answer(port) == 200
        with first:  # the oldest that waits made room
            assert is_closed(first)
        for one in others:
            one.close()


def test_a_connection_that_is_used_again_stays(master):
    with serving(master, head_seconds=0.5) as port:
        queries = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        for _ in range(4):
            queries.request("GET", "/api/session")
            assert queries.getresponse().read()
            time.sleep(0.2)
        queries.close()
