"""A real S3 protocol on 127.0.0.1, and a line to it that loses, cuts and slows what it carries."""

import contextlib
import http.client
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from gradkeep.store import Bucket

# One request at a time: moto itself does not make looking and putting one step.
SERVER = """
import sys
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple
run_simple("127.0.0.1", int(sys.argv[1]), DomainDispatcherApplication(create_backend_app))
"""
ANYBODY = {"access_key_id": "any", "secret_access_key": "body", "region": "us-east-1"}
ONCE = {"max_retries": 0}


def connect(url, address, **options):
    return Bucket(url, endpoint=address, client_options={"allow_http": True}, **ANYBODY, **options)


@contextlib.contextmanager
def serving():
    """The address of an S3 server with a bucket named `bucket`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert server.poll() is None, "the S3 server ended"
                time.sleep(0.05)
        urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", method="PUT")).close()
        yield address
    finally:
        server.terminate()
        server.wait(30)


class Line(ThreadingHTTPServer):
    """A proxy that can lose requests and replies, or answer on its own: a status, or one and a code."""

    def __init__(self, address):
        super().__init__(("127.0.0.1", 0), Carrier)
        self.target = address.removeprefix("http://")
        self.fault = lambda method: "none"
        self.stalled = threading.Event()

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        """The other side hung up: that is what these tests are about."""


class Carrier(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def carry(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.server.fault(self.command)
        if fault == "lose request":
            self.close_connection = True
            return
        if isinstance(fault, int):
            fault = (fault, "")
        if isinstance(fault, tuple):
            status, code = fault
            output = f"<Error><Code>{code}</Code></Error>".encode() if code else b""
            self.send_response(status)
            self.send_header("Content-Length", str(len(output)))
            self.end_headers()
            self.wfile.write(output)
            return
        if fault == "stall":
            self.server.stalled.wait(30)  # until the other side has given up, or the test is over
            self.close_connection = True
            return
        line = http.client.HTTPConnection(self.server.target)
        headers = dict(self.headers)
        if fault == "no condition":
            headers = {name: value for name, value in headers.items() if name != "if-none-match"}
        line.request(self.command, self.path, body, headers)
        reply = line.getresponse()
        content = reply.read()
        line.close()
        if fault == "lose reply":
            self.close_connection = True
            return
        self.send_response(reply.status)
        for name, value in reply.getheaders():
            if name.lower() not in ("server", "date", "connection", "transfer-encoding"):
                self.send_header(name, value)
        self.end_headers()
        if fault == "cut body":
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
            return
        if fault == "slow body":
            for start in range(0, len(content), 1 << 14):
                self.wfile.write(content[start : start + (1 << 14)])
                time.sleep(0.002)
            return
        self.wfile.write(content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = carry

    def log_message(self, *_):
        """Nobody reads it."""


@contextlib.contextmanager
def carrying(address):
    """A line to that address."""
    with Line(address) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.stalled.set()
            server.shutdown()
            thread.join()
