"""Damage a store at random, and check that the damage is detected or harmless.

Each case damages a fresh copy of a store that contains one of everything, then reads it through every
public interface. An independent oracle, a dictionary of the stored values, knows the right answers.
The outcome is one of

- found: `verify` reports the store as damaged;
- harmless: `verify` does not, and every answer is right;
- undone: `verify` does not, because the lost data was never sealed, packed or recorded; it is missing
  from every answer or raises, and no answer is wrong;
- wrong: an answer that is neither right nor an error, or rows that are silently missing;
- ugly: an error that is not a GradkeepError, or a check that raises.

`./x bench damage [CASES] [SEED]`; the last line counts outcomes, of which none may be wrong or ugly.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import gradkeep as gk
from gradkeep.errors import GradkeepError, NotAStoreError
from gradkeep.store import _document, gc, verify

SEALED = gk.store.CaptureKey(checkpoint="final", split="train")
OPEN = gk.store.CaptureKey(checkpoint="final", split="test")
SCORES = gk.store.ScoresKey("dot")
BASIS = gk.store.BasisKey("final", "few")
IDS = list(range(0, 30, 3))
DROPPED = [3, 27]


def expected_loss(number: int) -> float:
    """Return the only right value of a row."""
    return number * 0.5 + 1


def build_store(path: Path) -> Path:
    """Build a store that contains one of everything."""
    store = gk.open(path, durability="process")
    store.add_run(gk.store.Run("main", {"lr": 0.1}, code="abc"))
    store.add_checkpoint(gk.store.Checkpoint("main", "final", "1a", step=3))
    arrays = (
        gk.store.Array("loss"),
        gk.store.Array("label", "int64"),
        gk.store.Array("big", shape=(40,)),
    )
    schema = gk.store.Schema(arrays, rows_per_segment=3, fingerprints={"weights": "1a"})
    with store.write(SEALED, schema) as writer:
        writer.append(IDS[:6], rows_of(IDS[:6]))
    with store.write(SEALED, schema, extend=True) as writer:
        writer.append(IDS[6:], rows_of(IDS[6:]))
    store.drop_rows(SEALED, DROPPED)
    begun = store.write(OPEN, schema)
    begun.append(IDS[:6], rows_of(IDS[:6]))
    begun.close()
    with store.write(SCORES, gk.store.Schema((gk.store.Array("s", shape=(2,)),))) as writer:
        writer.append([0, 1], {"s": np.eye(2, dtype=np.float32)})
    rows = store.rows("models", gk.store.Schema((gk.store.Array("out"),)), num_rows=6)
    rows.grow(8)
    for row in range(5):
        rows.put(row, {"out": np.float32(expected_loss(row))})
    rows.compact(rows_per_file=2)
    (lease,) = rows.claim(owner="a")
    rows.fail(lease, "ValueError: no")
    rows.claim(owner="b", seconds=1e6)
    capture_coordinates(store)
    store.info()
    assert verify(path).healthy
    return path


def capture_coordinates(store: gk.Store) -> None:
    """Capture compressed rows, unrounded queries, and the basis of both."""
    torch.manual_seed(0)
    model = gk.data.GPT(vocabulary=7, length=12, dim=8, heads=2, layers=1).eval()
    options = {"task": gk.LanguageModeling(), "run": "few", "progress": False}
    for split, keep, count in (("texts", gk.Keep(256, rows=8), 10), ("asked", "queries", 2)):
        loader = [{"input_ids": torch.randint(7, (count, 12))}]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", gk.CaptureWarning)  # a tiny model triggers it
            gk.capture(store, model, loader, split=split, keep=keep, **options)
    assert store.has(BASIS)


def rows_of(ids: list[int]) -> dict[str, np.ndarray]:
    numbers = np.array(ids)
    return {
        "loss": (numbers * 0.5 + 1).astype(np.float32),
        "label": numbers % 7,
        "big": np.repeat(numbers[:, None], 40, axis=1).astype(np.float32),
    }


# Damage -----------------------------------------------------------------------------------------


class Victim:
    """A store to damage, and a random generator."""

    def __init__(self, root: Path, chance: random.Random) -> None:
        self.root, self.chance = root, chance
        self.outside = root.with_name(f"{root.name}-outside")
        self.outside.mkdir()
        (self.outside / "precious.safetensors").write_text("mine")

    def files(self, suffix: str = "") -> list[Path]:
        files = [x for x in sorted(self.root.rglob("*")) if x.is_file() and not x.is_symlink()]
        return [x for x in files if x.name.endswith(suffix)]

    def kinds(self, suffix: str = "") -> dict[str, list[Path]]:
        """Group files by kind, so that rare kinds are damaged as often as common ones."""
        files_by_kind: dict[str, list[Path]] = {}
        for file in self.files(suffix):
            parts = file.relative_to(self.root).parts
            key = parts[0] if len(parts) < 3 or parts[0] == "heads" else f"{parts[0]}/{parts[-2]}"
            files_by_kind.setdefault(f"{key}{file.suffix}", []).append(file)
        return files_by_kind

    def file(self, suffix: str = "") -> Path:
        kinds = self.kinds(suffix)
        return self.chance.choice(kinds[self.chance.choice(sorted(kinds))])

    def folder(self) -> Path:
        folders = [x for x in sorted(self.root.rglob("*")) if x.is_dir() and not x.is_symlink()]
        return self.chance.choice(folders)


def rewrite(file: Path, data: bytes) -> None:
    file.unlink()
    file.write_bytes(data)


def flip_bits(at: Victim) -> None:
    file = at.file()
    data = bytearray(file.read_bytes())
    for _ in range(at.chance.choice([1, 1, 3, 50])):
        if data:
            data[at.chance.randrange(len(data))] ^= 1 << at.chance.randrange(8)
    rewrite(file, bytes(data))


def truncate(at: Victim) -> None:
    file = at.file()
    data = file.read_bytes()
    rewrite(file, data[: at.chance.randrange(len(data) + 1)])


def empty(at: Victim) -> None:
    rewrite(at.file(), b"")


def append_bytes(at: Victim) -> None:
    file = at.file()
    rewrite(file, file.read_bytes() + at.chance.randbytes(at.chance.randrange(1, 100)))


def zero_out(at: Victim) -> None:
    file = at.file()
    rewrite(file, bytes(len(file.read_bytes())))


def garbage(at: Victim) -> None:
    rewrite(at.file(), at.chance.randbytes(at.chance.randrange(1, 5000)))


def delete_file(at: Victim) -> None:
    at.file().unlink()


def delete_folder(at: Victim) -> None:
    shutil.rmtree(at.folder())


def swap_files(at: Victim) -> None:
    one = at.file()
    alike = [x for x in at.files(one.suffix) if x != one] or at.files()
    other = at.chance.choice(alike)
    first, second = one.read_bytes(), other.read_bytes()
    rewrite(one, second)
    rewrite(other, first)


def overwrite_by_another(at: Victim) -> None:
    one = at.file()
    others = [x for x in at.files() if x != one]
    alike = [x for x in others if x.suffix == one.suffix]
    near = [x for x in alike if x.parent == one.parent]
    rewrite(one, at.chance.choice(near or alike or others).read_bytes())


def duplicate(at: Victim) -> None:
    file = at.file()
    target = file.with_name(f"{at.chance.choice(['copy-of-', 'x', '9'])}{file.name}")
    if not target.exists():
        shutil.copy(file, target)


def rename_file(at: Victim) -> None:
    file = at.file()
    names = [f"{file.name}.bak", f"x{file.name}", file.name[1:] or "x", "x.json", file.stem]
    names += [file.name.replace("0", "1", 1), file.name.replace("1", "2", 1)]
    target = file.with_name(at.chance.choice(names))
    if not os.path.lexists(target):
        file.rename(target)


def move_file(at: Victim) -> None:
    file, folder = at.file(), at.folder()
    if not os.path.lexists(folder / file.name):
        file.rename(folder / file.name)


def rename_folder(at: Victim) -> None:
    folder = at.folder()
    target = folder.with_name(at.chance.choice(["other", "x", ".hidden", "000009"]))
    if not os.path.lexists(target):
        folder.rename(target)


def dangling_link(at: Victim) -> None:
    file = at.chance.choice([at.file(), at.folder()])
    shutil.rmtree(file) if file.is_dir() else file.unlink()
    file.symlink_to(".git/annex/objects/Zk/9v/SHA256E-s10--0a")


def link_out(at: Victim) -> None:
    file = at.chance.choice([at.file(), at.folder()])
    target = at.outside / "moved"
    shutil.move(file, target)
    file.symlink_to(target)


def link_loop(at: Victim) -> None:
    file = at.file()
    file.unlink()
    other = at.chance.choice([file, file.with_name(f"{file.name}.loop")])
    file.symlink_to(other.name)
    if other != file:
        other.symlink_to(file.name)


def folder_for_file(at: Victim) -> None:
    file = at.file()
    file.unlink()
    file.mkdir()
    if at.chance.random() < 0.5:
        (file / "inside.json").write_text("{}")


def file_for_folder(at: Victim) -> None:
    folder = at.folder()
    shutil.rmtree(folder)
    folder.write_bytes(at.chance.choice([b"", b"{}", b"a folder was here"]))


ODD = [None, -1, 10**30, 1.5, "x", "\ud800", [], {}, [[]], True, "../../x", 2**63, 1e308]


def wrong_types(at: Victim) -> None:
    """Replace one field of a document, with a valid checksum."""
    file = at.file(".json")
    with contextlib.suppress(GradkeepError):
        fields = _document.from_bytes(file.read_bytes(), path="")
        inner = at.chance.choice([fields, *_objects(fields)])
        if inner:
            inner[at.chance.choice(sorted(inner))] = at.chance.choice(ODD)
        rewrite(file, _document.to_bytes(fields))


def _objects(value: object) -> Iterator[dict[str, object]]:
    items = value.values() if isinstance(value, dict) else value
    for item in items if isinstance(value, dict | list) else ():
        if isinstance(item, dict):
            yield item
        yield from _objects(item)


def deep_nesting(at: Victim) -> None:
    levels = at.chance.choice([100, 3000, 100_000])
    body = (b'{"a": ' + b"[" * levels + b"]" * levels) if levels < 10**4 else b"[" * levels
    rewrite(at.file(".json"), body + _document._seal(body))


def huge_numbers(at: Victim) -> None:
    file = at.file(".json")
    text = file.read_text().rpartition(',\n  "xxh3"')[0]
    digits = [i for i, letter in enumerate(text) if letter.isdigit()]
    place = at.chance.choice(digits) if digits else 1
    text = text[:place] + "9" * at.chance.choice([20, 400, 5000]) + text[place:]
    rewrite(file, text.encode() + _document._seal(text.encode()))


def old_manifest_restored(at: Victim) -> None:
    """Delete newer manifests, or replace the newest one by an older one."""
    folders = [x for x in at.root.rglob("manifest") if len(list(x.iterdir())) > 1]
    files = sorted(at.chance.choice(sorted(folders)).iterdir())
    if at.chance.random() < 0.5:
        for file in files[at.chance.randrange(1, len(files)) :]:
            file.unlink()
    else:
        rewrite(files[-1], at.chance.choice(files[:-1]).read_bytes())


def foreign_files(at: Victim) -> None:
    names = ["x.json", "notes.txt", ".DS_Store", "000000.safetensors", "999999.json", "a b.json"]
    target = at.folder() / at.chance.choice(names)
    if not os.path.lexists(target):
        target.write_bytes(at.chance.choice([b"", b"{}", b"hello", b"\xff\xfe"]))


def odd_times(at: Victim) -> None:
    os.utime(at.file(), (0, at.chance.choice([0, 2**33, 2**40])))


KINDS: tuple[Callable[[Victim], None], ...] = (
    *(flip_bits, truncate, empty, append_bytes, zero_out, garbage, delete_file, delete_folder),
    *(swap_files, overwrite_by_another, duplicate, rename_file, move_file, rename_folder),
    *(dangling_link, link_out, link_loop, folder_for_file, file_for_folder, wrong_types),
    *(deep_nesting, huge_numbers, old_manifest_restored, foreign_files, odd_times),
)

# Answers ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """A way to read a store, and the right answer."""

    ask: Callable[[Path], object]
    right: object
    partial: bool = False
    """True if fewer rows are right too, for work that was not finished."""


def open_store(path: Path) -> gk.Store:
    return gk.open(path, create=False, durability="process")


def read_all(
    path: Path, key: gk.store.CaptureKey, **options: object
) -> dict[int, tuple[object, ...]]:
    block = open_store(path).read(key, **options)
    rows = {}
    for batch in block.stream():
        for at, number in enumerate(batch.ids.tolist()):
            values = (batch["loss"][at], batch["label"][at], batch["big"][at].tolist())
            rows[number] = tuple(x.item() if hasattr(x, "item") else x for x in values)
    picked = block.read(block.ids[::-1], ["loss"])
    assert picked["loss"].tolist() == [rows[x][0] for x in picked.ids.tolist()]
    return rows


def expected_rows(ids: list[int]) -> dict[int, tuple[object, ...]]:
    return {x: (expected_loss(x), x % 7, [float(x)] * 40) for x in ids}


def read_rows(path: Path) -> dict[int, float]:
    rows = open_store(path).rows("models")
    done = rows.done()
    rows.states()
    return dict(zip(done.tolist(), rows.read(done)["out"].tolist(), strict=True))


def read_info(path: Path) -> dict[str, int]:
    info = open_store(path).info()
    repr(info), json.dumps(info.to_fields())
    sealed = [x for x in info.blocks if x.state == "sealed" and x.address.kind != "rows"]
    sealed = [x for x in sealed if "/few/" not in f"/{x.address.folder}/"]
    return {x.address.folder: x.rows for x in sealed}


def read_coordinates(path: Path) -> list[list[float]]:
    """Return the influence of compressed rows on the queries."""
    scores = gk.attribute(
        open_store(path), queries="asked", train="texts", run="few", method="ekfac"
    )
    return scores.numpy().tolist()


SQL = """
    select id, loss, code, step, state from samples
    join runs using (run) join checkpoints using (run, checkpoint)
    join captures using (run, checkpoint, split) order by id
"""
REMAINING = [x for x in IDS if x not in DROPPED]
QUESTIONS = {
    "sealed": Question(lambda p: read_all(p, SEALED), expected_rows(REMAINING)),
    "version 0": Question(lambda p: read_all(p, SEALED, version=0), expected_rows(IDS[:6])),
    "version 1": Question(lambda p: read_all(p, SEALED, version=1), expected_rows(IDS)),
    "open": Question(lambda p: read_all(p, OPEN, live=True), expected_rows(IDS[:6]), partial=True),
    "scores": Question(lambda p: open_store(p).read(SCORES).column("s").tolist(), [[1, 0], [0, 1]]),
    "rows": Question(read_rows, {x: expected_loss(x) for x in range(5)}, partial=True),
    "size": Question(lambda p: open_store(p).rows("models").num_rows, 8),
    "runs": Question(lambda p: [x.code for x in open_store(p).runs()], ["abc"]),
    "checkpoints": Question(lambda p: [x.step for x in open_store(p).checkpoints("main")], [3]),
    "captures": Question(
        lambda p: sorted(x for x in open_store(p).captures() if x.run == "main"),
        sorted([SEALED, OPEN]),
    ),
    "info": Question(read_info, {SEALED.folder: len(REMAINING), SCORES.folder: 2}),
    "sql": Question(
        lambda p: open_store(p).sql(SQL).rows(),
        [(x, expected_loss(x), "abc", 3, "sealed") for x in REMAINING],
    ),
    "gc": Question(lambda p: bool(gc(open_store(p), dry_run=True)), True),
}


def judge_damage(path: Path, outside: Path) -> tuple[str, str]:
    """Return the outcome for a damaged store, and the reason."""
    before = {x: x.read_bytes() for x in outside.rglob("*") if x.is_file()}
    answers, ugly = {}, []
    for name, question in QUESTIONS.items():
        try:
            answers[name] = question.ask(path)
        except GradkeepError as error:
            answers[name] = error
        except Exception as error:  # counted as ugly
            ugly.append(f"{name}: {type(error).__name__}: {error}")
    damage: list[str] = []
    try:
        damage = [f"{item.path}: {item.what}" for item in verify(path, repair=True).damage]
    except NotAStoreError as error:
        damage = [str(error)]  # the store was deleted
    except Exception as error:
        ugly.append(f"verify: {type(error).__name__}: {error}")
    if any("cannot be checked" in item for item in damage):
        ugly.append(f"verify: {damage}")
    try:
        gc(path)
    except GradkeepError:
        pass
    except Exception as error:
        ugly.append(f"gc: {type(error).__name__}: {error}")
    if {x: x.read_bytes() for x in outside.rglob("*") if x.is_file()} != before:
        return "wrong", "something outside of the store changed"
    if ugly:
        return "ugly", "; ".join(ugly)
    if damage:
        return "found", damage[0]
    return _judge_answers(answers)


def _judge_answers(answers: dict[str, object]) -> tuple[str, str]:
    undone = ""
    for name, answer in answers.items():
        question = QUESTIONS[name]
        if answer == question.right:
            continue
        fewer = isinstance(answer, dict) and answer.items() <= question.right.items()  # type: ignore[attr-defined]
        if question.partial and (fewer or isinstance(answer, GradkeepError)):
            undone = f"{name}: {str(answer)[:100]}"
        elif not (name == "captures" and undone):
            return "wrong", f"{name}: {str(answer)[:200]}"
    return ("undone", undone) if undone else ("harmless", "")


def run(cases: int, seed: int, *, show: Callable[[str], object] = print) -> Counter[str]:
    """Damage that many copies; return the number of each outcome."""
    counts: Counter[str] = Counter()
    by_kind: dict[str, Counter[str]] = {}
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        whole = build_store(Path(folder, "whole"))
        QUESTIONS["coordinates"] = Question(read_coordinates, read_coordinates(whole))
        for case in range(cases):
            chance = random.Random(f"{seed}/{case}")
            path = Path(folder, f"case-{case}")
            shutil.copytree(whole, path)
            kind = KINDS[case % len(KINDS)]
            victim = Victim(path, chance)
            kind(victim)
            result, why = judge_damage(path, victim.outside)
            counts[result] += 1
            by_kind.setdefault(kind.__name__, Counter())[result] += 1
            if result in ("wrong", "ugly"):
                show(f"{result}  case {case} of seed {seed}, {kind.__name__}: {why}")
            shutil.rmtree(path)
            shutil.rmtree(victim.outside)
    for name, ended in by_kind.items():
        show(f"{name:<24}" + "  ".join(f"{word} {ended[word]}" for word in sorted(ended)))
    return counts


def main() -> None:
    cases = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    start = time.monotonic()
    counts = run(cases, seed)
    summary = "  ".join(
        f"{word} {counts[word]}" for word in ("found", "harmless", "undone", "wrong", "ugly")
    )
    print(f"{cases} damages of {len(KINDS)} kinds in {time.monotonic() - start:.0f} s: {summary}")
    sys.exit(bool(counts["wrong"] or counts["ugly"]))


if __name__ == "__main__":
    main()
