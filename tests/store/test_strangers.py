"""A store that a stranger made: read with care, never acting outside of itself."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import xxhash
from raises import raises

import gradkeep as gk
from gradkeep.errors import DamagedError, StoreError
from gradkeep.store import LocalDisk, _document, gc, verify

KEY = gk.store.CaptureKey(checkpoint="final", split="train")
ODD = [None, -1, 10**30, 1.5, "x", "\ud800", [], {}, [[]], {"a": {}}, True, [None], "../../x"]


@pytest.fixture
def store(tmp_path):
    return fill(gk.open(tmp_path / "store", durability="process"))


def fill(store):
    """One of everything."""
    store.add_run(gk.store.Run("main", {"lr": 0.1}, code="abc"))
    store.add_checkpoint(gk.store.Checkpoint("main", "final", "1a", step=3))
    schema = gk.store.Schema(
        (gk.store.Array("loss"),), rows_per_segment=2, layers=(gk.store.Layer("a", "b", 1),)
    )
    with store.write(KEY, schema) as writer:
        writer.append(np.arange(6), {"loss": np.arange(6, dtype=np.float32)})
    store.drop_rows(KEY, [1])
    with store.write(gk.store.ScoresKey("dot"), gk.store.Schema((gk.store.Array("s"),))) as writer:
        writer.append([0], {"s": [1.0]})
    rows = store.rows("models", gk.store.Schema((gk.store.Array("out"),)), num_rows=5)
    for row in range(3):
        rows.put(row, {"out": np.float32(row)})
    rows.compact(rows_per_file=2)
    for lease in rows.claim(owner="a"):
        rows.fail(lease, "no")
    rows.claim(owner="b", seconds=1e6)
    return store


def at(store, key):
    return Path(store.backend.root, key)


def forge(store, key, change):
    """Replace a document by another one with a right checksum."""
    file = at(store, key)
    fields = change(_document.from_bytes(file.read_bytes(), path=key))
    data = fields if isinstance(fields, bytes) else _document.to_bytes(fields)
    file.unlink()
    file.write_bytes(data)


def sealed(text):
    """Any text as a document with a right checksum."""
    body = text.encode()
    return body + _document._seal(body)


def checked(location):
    verdict = verify(location)
    assert not [item for item in verdict.damage if "cannot be checked" in item.what]


def ways(location):
    """All ways to look at a store; each may raise what gradkeep raises, and nothing else."""

    def opened():
        return gk.open(location, create=False, durability="process")

    def rows():
        actual = opened().rows("models")
        actual.read(actual.done())
        actual.states()

    return {
        "verify": lambda: checked(location),
        "info": lambda: (repr(opened()), opened().info().to_fields()),
        "runs": lambda: (opened().runs(), opened().checkpoints()),
        "read": lambda: [batch["loss"] for batch in opened().read(KEY).stream()],
        "old": lambda: opened().read(KEY, version=0).read([1]),
        "rows": rows,
        "gc": lambda: gc(opened(), dry_run=True),
        "samples": lambda: opened().sql("select avg(loss) from samples"),
        "captures": lambda: opened().sql("select * from captures, scores, runs, checkpoints"),
    }


def look(location):
    """Look in all ways; returns which of them raised."""
    raised = set()
    for name, way in ways(location).items():
        try:
            way()
        except gk.GradkeepError:
            raised.add(name)
    return raised


DOCUMENTS = [
    "STORE.json",
    "runs/main/run.json",
    "runs/main/ckpt/final/ckpt.json",
    f"{KEY.folder}/schema.json",
    f"{KEY.folder}/manifest/000001.json",
    "datamodels/models/manifest/000000.json",
    "datamodels/models/size/000000000005.json",
]


def all_documents(store):
    root = Path(store.backend.root)
    actual = [str(path.relative_to(root)) for path in root.rglob("*.json")]
    assert set(DOCUMENTS) <= set(actual)
    return sorted(actual)


def test_nothing_but_our_errors_whatever_a_field_holds(store):
    """Every field of every document, with every odd value, and left out."""
    tried = 0
    for key in all_documents(store):
        good = at(store, key).read_bytes()
        fields = _document.from_bytes(good, path=key)
        for name in fields:
            for value in [*ODD, ...]:
                changed = {k: v for k, v in fields.items() if k != name}
                if value is not ...:
                    changed[name] = value
                forge(store, key, lambda _, changed=changed: changed)
                tried += 1
                if tried % 5:
                    continue
                raised = look(store.location) if tried % 60 == 0 else quick(store, key)
                # What is no store, or one of a later version, is not for us to call damaged.
                assert "verify" not in raised or (key == "STORE.json" and name != "uuid")
        at(store, key).write_bytes(good)
    assert verify(store.location).healthy
    assert tried > 400


def quick(store, key):
    """The ways that read this document first."""
    actual = ways(store.location)
    names = ["verify"]
    names += ["rows"] if "/models/" in key else ["runs"] if "runs/" in key else ["read"]
    raised = set()
    for name in names:
        try:
            actual[name]()
        except gk.GradkeepError:
            raised.add(name)
    return raised


@pytest.mark.parametrize("key", DOCUMENTS)
@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000 + "]" * 100_000,
        '{"a": ' * 5000 + "1" + "}" * 5000,
        '{"a": ' + "[" * 200 + "]" * 200,
        '{"version": ' + "9" * 5000,
        '{"version": 1e999, "a": NaN',
        "[1, 2",
        '"text"',
        "{",
        '{"version": \ud800'.encode("utf-16", "surrogatepass").decode("latin1"),
    ],
    ids=["list", "objects", "deep", "digits", "nan", "array", "text", "nothing", "bytes"],
)
def test_no_json_is_too_deep_or_too_odd(store, key, text):
    forge(store, key, lambda _: sealed(text))
    assert "verify" not in quick(store, key)
    assert key in [item.path for item in verify(store.location).damage]


@pytest.mark.parametrize("uuid", ["\ud800", "a\nb", "é", 3, None])
def test_an_odd_identity_is_damage(store, uuid):
    forge(store, "STORE.json", lambda x: {**x, "uuid": uuid})
    assert [item.path for item in verify(store.location).damage] == ["STORE.json"]
    with pytest.raises(DamagedError):
        gk.open(store.location)


def test_a_huge_document_is_refused_before_it_is_read(store, monkeypatch):
    key = f"{KEY.folder}/manifest/000001.json"
    with open(at(store, key), "r+b") as file:
        file.truncate(10 << 30)  # a hole: it takes no room
    monkeypatch.setattr(
        "gradkeep.store.backends._disk.PlainFile.read", lambda *_: pytest.fail("it was read")
    )
    with raises(DamagedError, "store.malformed_document"):
        gk.store.blocks._manifest.load_manifest(store.backend, KEY.folder, 1)


@pytest.mark.parametrize(
    "file",
    [
        "seg/../../../../../../victim/data.safetensors",
        "../../victim.safetensors",
        "/etc/passwd",
        "seg/000000.safetensors/../x.safetensors",
        "manifest/000000.json",
        "",
    ],
)
def test_a_manifest_names_segments_of_its_own_block_only(store, tmp_path, file):
    victim = tmp_path / "victim" / "data.safetensors"
    victim.parent.mkdir()
    shutil.copy(at(store, f"{KEY.folder}/seg/000001.safetensors"), victim)
    key = f"{KEY.folder}/manifest/000001.json"
    forge(store, key, lambda x: {**x, "segments": [{**x["segments"][0], "file": file}]})
    for path in at(store, f"heads/{KEY.folder}").glob("000001-*"):
        path.unlink()
    with pytest.raises(DamagedError):
        store.read(KEY)
    actual = verify(store.location, repair=True)
    assert [item.path for item in actual.damage] == [key]
    assert victim.exists()
    assert sorted(os.listdir(tmp_path)) == ["store", "victim"]


FOLDERS = [
    *(f"{KEY.folder}/{part}" for part in ("seg", "manifest", "")),
    "blocks/main/final",
    "blocks",
    "runs/main/ckpt",
    *(f"datamodels/models/{part}" for part in ("rows", "rows/000000", "claims", "packed", "size")),
    f"heads/{KEY.folder}",
    "heads",
    "quarantine",
]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_link_in_place_of_a_folder_is_damage_and_nothing_behind_it_changes(
    store, tmp_path, folder
):
    folder = folder.rstrip("/")
    away = tmp_path / "victim"
    at(store, "quarantine").mkdir()
    shutil.move(at(store, folder), away)
    (away / "precious.safetensors").write_text("mine")
    at(store, folder).symlink_to(away)
    before = tree(away)
    for way in (
        lambda: gc(store),
        lambda: gc(store.location, keep_versions=1),
        lambda: store.delete(KEY),
        lambda: store.drop_rows(KEY, [2]),
        lambda: store.rows("models").compact(partial=True),
        lambda: store.rows("models").claim(count=5, owner="z"),
        lambda: fill(gk.open(store.location)),
        lambda: verify(store.location, repair=True),
        lambda: gc(store.location),
        lambda: look(store.location),
    ):
        try:
            actual = way()
        except gk.GradkeepError:
            continue
        if isinstance(actual, gk.store.Verdict):
            assert not actual.healthy or not os.path.islink(at(store, folder))
    assert tree(away) == before


def tree(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in Path(folder).rglob("*")
        if path.is_file() and not path.is_symlink()
    }


@pytest.mark.parametrize("folder", [f.rstrip("/") for f in FOLDERS if f != "quarantine"])
def test_verify_names_a_link_in_place_of_a_folder(store, tmp_path, folder):
    shutil.move(at(store, folder), tmp_path / "away")
    at(store, folder).symlink_to(tmp_path / "away")
    actual = verify(store.location)
    assert any("link" in item.what and item.path == folder for item in actual.damage)


@pytest.mark.parametrize("leads", ["nowhere", "out", "itself", "device", "folder"])
@pytest.mark.parametrize(
    "key",
    [
        *DOCUMENTS,
        f"{KEY.folder}/seg/000001.safetensors",
        "datamodels/models/rows/000000/2.safetensors",
    ],
)
def test_a_link_in_place_of_a_file_is_damage(store, tmp_path, key, leads):
    file, away = at(store, key), tmp_path / "away"
    shutil.copy(file, away)
    targets = {"out": away, "itself": file, "device": Path("/dev/zero"), "folder": tmp_path}
    file.unlink()
    file.symlink_to(targets.get(leads, tmp_path / "objects" / "none"))
    actual = verify(store.location)
    assert [item.path for item in actual.damage][:1] == [key]
    assert "link" in actual.damage[0].what
    assert quick(store, key) or "size" in key
    before = away.read_bytes()
    verify(store.location, repair=True)
    assert away.read_bytes() == before


def test_a_pipe_is_not_waited_for(store):
    file = at(store, f"{KEY.folder}/schema.json")
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(DamagedError, match="pipe"):
        store.read(KEY)
    assert not verify(store.location).healthy


@pytest.mark.parametrize("key", ["../x", "a/../../x", "/etc/passwd", "a//b", "./a", "a\0b", ".."])
def test_no_name_leads_out_of_the_folder(tmp_path, key):
    (tmp_path / "x").write_text("mine")
    disk = LocalDisk(tmp_path / "store")
    for way in (
        lambda: disk.open(key),
        lambda: disk.put_if_absent(key, [b"x"], durability="process"),
        lambda: disk.exists(key),
        lambda: disk.list(key),
        lambda: disk.delete([key], durability="process"),
        lambda: disk.move_aside(key),
    ):
        with raises(DamagedError, "store.outside"):
            way()
    assert (tmp_path / "x").read_text() == "mine"


def forged_segment(store, key, change):
    """A segment whose header says something else, with all its checksums right."""
    from gradkeep.store.blocks._segment import _DIGEST_AT, _DIGEST_END

    data = at(store, key).read_bytes()
    length = int.from_bytes(data[:8], "little")
    layout = json.loads(data[8 : 8 + length])
    change(layout)
    layout["__metadata__"] = {**layout["__metadata__"], "header_xxh3": "0" * 32}
    layout = {"__metadata__": layout.pop("__metadata__"), **layout}
    text = json.dumps(layout, separators=(",", ":")).encode()
    head = len(text).to_bytes(8, "little") + text
    digest = xxhash.xxh3_128_hexdigest(head).encode()
    at(store, key).unlink()
    at(store, key).write_bytes(head[:_DIGEST_AT] + digest + head[_DIGEST_END:] + data[8 + length :])
    return digest.decode()


def test_nothing_but_our_errors_whatever_a_header_says(store):
    key = f"{KEY.folder}/seg/000001.safetensors"
    good = at(store, key).read_bytes()
    manifest = f"{KEY.folder}/manifest/000001.json"
    stored = at(store, manifest).read_bytes()
    shutil.rmtree(at(store, "heads"))
    length = int.from_bytes(good[:8], "little")
    layout = json.loads(good[8 : 8 + length])
    tried = 0
    for name, item in layout.items():
        for part in item:
            for value in [*ODD[::4], "0", "7", [0, 10**9], [10**9], "int64", "F64", [2, 1, 1]]:

                def change(x, name=name, part=part, value=value):
                    x[name][part] = value

                at(store, key).write_bytes(good)
                digest = forged_segment(store, key, change)

                def names(x, digest=digest):
                    x["segments"][1]["xxh3"] = digest
                    return x

                at(store, manifest).write_bytes(stored)
                forge(store, manifest, names)
                for way in ("verify", "read"):
                    try:
                        ways(store.location)[way]()
                    except StoreError:
                        assert way != "verify"
                    tried += 1
    assert tried > 100
