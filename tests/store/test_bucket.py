"""Buckets: a real S3 protocol on 127.0.0.1, and a network that loses what it carries."""

import json
import os
import subprocess
import sys

import pytest
import torch
from raises import raises
from s3_server import ANYBODY, ONCE, connect
from store_suite.store_tests import FullStoreTests

import gradkeep as gk
from gradkeep.errors import (
    ConflictError,
    MissingExtraError,
    ReadOnlyError,
    StoreError,
    WriteFailedError,
)
from gradkeep.store import Bucket, verify
from gradkeep.store.backends import _bucket


@pytest.fixture
def url(request):
    """A folder in the bucket for each test."""
    return f"s3://bucket/{abs(hash(request.node.nodeid)):x}"


class TestS3(FullStoreTests):
    # Thousands of requests to a server that takes one at a time.
    test_any_sequence_of_steps_does_what_a_dictionary_would = None

    @pytest.fixture
    def backend(self, url, s3):
        return connect(url, s3)


def on_put(fault):
    return lambda method: fault if method == "PUT" else "none"


def put(bucket, key, content):
    return bucket.put_if_absent(key, [content], durability="full")


def test_a_lost_reply_is_no_error_if_the_value_arrived(line, url):
    bucket = connect(url, line.address, retry_config=ONCE)
    line.fault = on_put("lose reply")
    assert put(bucket, "key", b"value") is True
    assert bucket.read("key") == b"value"


def test_a_lost_request_is_an_error_and_leaves_the_name_free(line, url):
    bucket = connect(url, line.address, retry_config=ONCE)
    line.fault = on_put("lose request")
    with raises(WriteFailedError, "store.write_failed") as caught:
        put(bucket, "key", b"value")
    assert not isinstance(caught.value, ReadOnlyError)
    assert not bucket.exists("key")
    line.fault = on_put("none")
    assert put(bucket, "key", b"value") is True


def test_a_lost_request_for_a_taken_name_is_a_conflict(line, url):
    bucket = connect(url, line.address, retry_config=ONCE)
    put(bucket, "key", b"other")
    line.fault = on_put("lose request")
    with pytest.raises(ConflictError):
        put(bucket, "key", b"value")


def test_an_error_that_cannot_be_looked_into_is_the_first_one(line, url):
    bucket = connect(url, line.address, retry_config=ONCE)
    line.fault = lambda method: "lose request"
    with pytest.raises(WriteFailedError) as caught:
        put(bucket, "key", b"value")
    assert "PUT" in str(caught.value.found)


def test_a_server_that_fails_once_is_asked_again(line, url):
    bucket = connect(url, line.address)
    answers = iter([500, 503])
    line.fault = lambda method: next(answers, "none")
    assert put(bucket, "key", b"value") is True


def test_a_bucket_that_may_only_be_read_is_read_only(line, url, s3):
    put(connect(url, s3), "there", b"value")
    bucket = connect(url, line.address)
    line.fault = lambda method: "none" if method in ("GET", "HEAD") else 403
    with pytest.raises(ReadOnlyError):
        put(bucket, "key", b"value")
    with pytest.raises(ReadOnlyError):
        put(bucket, "there", b"other")
    with pytest.raises(ReadOnlyError):
        bucket.delete(["there"], durability="full")
    with pytest.raises(ReadOnlyError):
        bucket.move_aside("there")
    assert put(bucket, "there", b"value") is False
    assert bucket.read("there") == b"value"


def test_a_service_that_does_not_heed_the_condition_is_refused(line, url):
    bucket = connect(url, line.address)
    line.fault = on_put("no condition")
    with raises(WriteFailedError, "store.no_conditional_writes"):
        gk.open(bucket)
    line.fault = on_put((501, "NotImplemented"))
    with raises(WriteFailedError, "store.no_conditional_writes"):
        put(connect(url, line.address, retry_config=ONCE), "key", b"value")


def test_a_service_is_asked_once_whether_it_heeds_the_condition(line, url):
    bucket = connect(url, line.address, retry_config=ONCE)
    seen = []
    # The second question is lost, and says nothing: the next value is asked with.
    line.fault = lambda method: seen.append(method) or ("none", "lose request")[len(seen) == 2]
    for name in "abc":
        assert put(bucket, name, b"") is True
    assert len(seen) == 5
    assert put(bucket, "c", b"") is False


@pytest.mark.parametrize(("status", "after"), [(403, 0), (400, 3), (403, 9), (400, 14)])
def test_credentials_that_expire_on_the_way_cost_nothing_that_was_kept(
    line, url, s3, tmp_path, status, after
):
    torch.manual_seed(0)
    net, x = torch.nn.Linear(50, 10), torch.randn(400, 50)
    batches = [(x[at : at + 40], torch.arange(40) % 10) for at in range(0, 400, 40)]

    def capture(place):
        return gk.capture(
            *(gk.open(place), net, batches),
            task=gk.Classification(),
            split="train",
            memory_budget="200kB",
            progress=False,
        )

    answered = iter(range(10**9))
    expired = (status, "ExpiredToken")
    line.fault = lambda method: expired if next(answered) >= after else "none"
    with pytest.raises(StoreError, match="credentials"):
        capture(connect(url, line.address, retry_config=ONCE))
    capture(connect(url, s3))
    capture(tmp_path / "calm")
    key = gk.store.CaptureKey("final", "train")
    stored_store, calm = (
        gk.open(place).read(key) for place in (connect(url, s3), tmp_path / "calm")
    )
    assert len(stored_store) == 400
    assert (
        stored_store.manifest.segments == calm.manifest.segments
    )  # with the digests of their bytes
    assert verify(connect(url, s3)).healthy


def test_a_bucket_that_cannot_be_read_says_so(line, url):
    bucket = connect(url, line.address, retry_config=ONCE)
    put(bucket, "key", b"x" * 200_000)
    opened = bucket.open("key")
    line.fault = lambda method: 403
    for read in (
        lambda: bucket.read("key"),
        lambda: bucket.exists("key"),
        lambda: bucket.list(""),
        lambda: opened.read(100_000, 10),
        lambda: opened.map(),
    ):
        with raises(StoreError, "store.unreadable_bucket"):
            read()


def test_a_bucket_that_does_not_exist_is_named(s3):
    with pytest.raises(StoreError, match="s3://nowhere/store"):
        gk.open(connect("s3://nowhere/store", s3))
    with raises(WriteFailedError, "store.no_such_bucket"):
        put(connect("s3://nowhere/store", s3), "key", b"value")


def test_a_block_written_over_a_bad_line_is_whole(line, url, s3):
    replies = iter(range(10**9))
    faults = {3: "lose reply", 5: "lose request"}
    line.fault = lambda method: faults.get(next(replies) % 7, "none") if method == "PUT" else "none"
    key = gk.store.CaptureKey(checkpoint="final", split="train")
    schema = gk.store.Schema((gk.store.Array("loss"),), rows_per_segment=2)
    losses = {"loss": [float(row) for row in range(24)]}
    for _ in range(50):
        try:
            store = gk.open(connect(url, line.address, retry_config=ONCE))
            with store.write(key, schema) as writer:
                writer.append(range(24), losses)
            break
        except WriteFailedError:
            continue  # run again, as the message says
    calm = gk.open(connect(url, s3), create=False)
    assert calm.read(key).column("loss").tolist() == losses["loss"]
    assert verify(calm.backend).healthy


def test_a_url_and_the_environment_are_enough(s3, url, monkeypatch):
    for name, value in {
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "body",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": s3,
        "AWS_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, value)
    store = gk.open(url)
    assert gk.open(f"{url}/", create=False).uuid == store.uuid
    assert store.location == url


def test_an_e_tag_lets_a_segment_be_verified_once(s3, url):
    bucket = connect(url, s3)
    put(bucket, "key", b"value")
    assert bucket.open("key").settled
    assert bucket.open("key").identity == bucket.open("key").identity


@pytest.mark.parametrize("place", ["memory://", "file://{}"])
def test_counters_and_times_are_not_taken_for_proof(place, tmp_path):
    bucket = Bucket(place.format(tmp_path))
    put(bucket, "key", b"value")
    assert not bucket.open("key").settled


def test_a_name_that_is_freed_while_it_is_compared_is_taken(monkeypatch):
    bucket = Bucket("memory://")
    put(bucket, "key", b"other")

    def deleted_meanwhile(key, parts):
        bucket.delete([key], durability="full")
        raise FileNotFoundError(key)

    monkeypatch.setattr(bucket, "same_bytes", deleted_meanwhile)
    assert put(bucket, "key", b"value") is True
    assert bucket.read("key") == b"value"

    def never_there(key, parts):
        raise FileNotFoundError(key)

    monkeypatch.setattr(bucket, "same_bytes", never_there)
    with raises(WriteFailedError, "store.name_without_value"):
        put(bucket, "key", b"third")


def test_small_values_cost_one_request(line, url):
    bucket = connect(url, line.address)
    put(bucket, "key", b"value")
    seen = []
    line.fault = lambda method: seen.append(method) or "none"
    assert bucket.read("key") == b"value"
    assert seen == ["GET"]


COMPETE = """
import json, sys
from gradkeep.errors import ConflictError
from gradkeep.store import Bucket
url, options, worker = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
bucket = Bucket(url, **options)
print("ready", flush=True)
sys.stdin.readline()
for turn in range(10):
    try:
        won = bucket.put_if_absent(f"prize/{turn}", [worker.encode()], durability="full")
    except ConflictError:
        won = False
    same = bucket.put_if_absent(f"same/{turn}", [b"same"], durability="full")
    print(int(won), int(same))
"""


@pytest.mark.parametrize("place", ["s3", "file"])
def test_of_many_processes_one_wins(place, s3, url, tmp_path):
    target, options = f"file://{tmp_path}", {}
    if place == "s3":
        target = url
        options = {**ANYBODY, "endpoint": s3, "client_options": {"allow_http": True}}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", COMPETE, target, json.dumps(options), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    for worker in workers:
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        worker.stdin.write("go\n")
        worker.stdin.flush()
    results = [worker.communicate(timeout=60)[0].split() for worker in workers]
    won = [[int(flag) for flag in result[0::2]] for result in results]
    computed = [[int(flag) for flag in result[1::2]] for result in results]
    bucket = Bucket(target, **options)
    for turn in range(10):
        assert sum(flags[turn] for flags in won) == 1
        assert sum(flags[turn] for flags in computed) == 1
        assert bucket.read(f"prize/{turn}") == b"%d" % [f[turn] for f in won].index(1)


def test_what_one_put_cannot_take_is_refused_before_it_is_sent(monkeypatch):
    monkeypatch.setattr(_bucket, "_LARGEST", 10)
    bucket = Bucket("memory://")
    assert put(bucket, "key", b"x" * 10) is True
    with pytest.raises(WriteFailedError, match="11 bytes"):
        bucket.put_if_absent("more", [b"x" * 5, b"x" * 6], durability="full")
    assert not bucket.exists("more")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_only_be_read_is_read_only(tmp_path):
    bucket = Bucket(f"file://{tmp_path}")
    tmp_path.chmod(0o500)
    with pytest.raises(ReadOnlyError):
        put(bucket, "key", b"value")


@pytest.mark.parametrize("url", ["http://x/y", "ftp://x", "S3//bucket", "nonsense://x"])
def test_other_urls_are_refused(url):
    with raises(StoreError, "store.invalid_url"):
        Bucket(url)


def test_options_that_are_none_are_refused():
    with raises(StoreError, "store.unopenable_bucket"):
        Bucket("s3://bucket", no_such_option="1")


def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with raises(StoreError, "store.unopenable_bucket"):
        Bucket(f"file://{tmp_path}/file")


def test_every_bucket_in_memory_is_new():
    put(Bucket("memory://"), "key", b"1")
    assert gk.open("memory://scratch").blocks() == []


def test_without_obstore_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingExtraError, match=r"pip install -e .*\[s3\]"):
        Bucket("memory://")
