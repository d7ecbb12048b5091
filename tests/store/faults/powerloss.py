"""A model of a disk that loses what was not made durable when the power fails.

Pessimistic, as POSIX allows: the bytes of a file are safe up to its last fsync, a name is safe when
the folder that holds it was synced since it came or went, and of all that was not, any part may
have reached the disk.
"""

import os
import random
from dataclasses import dataclass, field

from faultkit import Watched


class Recorder(Watched):
    """Real calls, written down as events for the model."""

    def __init__(self, base):
        self.base = base
        self.events = []

    def acknowledge(self, word):
        self.events.append(("ack", word))

    def around(self, name, call, *args):
        ino = _ino(args[0]) if name in ("write", "sync") else None
        result = call(*args)
        if name == "create":
            event = (name, self._relative(args[0]), _ino(result))
        elif name == "write":
            event = (name, ino, bytes(args[1][:result]))
        elif name == "sync":
            event = (name, ino)
        elif name == "close":
            return result
        else:
            event = (name, *map(self._relative, args))
        self.events.append(event)
        return result

    def _relative(self, path):
        return os.path.relpath(path, self.base)


def _ino(fd):
    return os.fstat(fd).st_ino


@dataclass(eq=False)
class File:
    written: bytes = b""
    durable: bytes = b""


@dataclass(eq=False)
class Folder:
    now: dict = field(default_factory=dict)
    durable: dict = field(default_factory=dict)
    pending: list = field(default_factory=list)

    def set(self, name, node):
        """Let a name come, or go if there is no node; pending until the folder is synced."""
        self.pending.append((name, node))
        _apply(self.now, name, node)

    def sync(self):
        self.durable = dict(self.now)
        self.pending.clear()


def _apply(entries, name, node):
    if node is None:
        entries.pop(name, None)
    else:
        entries[name] = node


class Keep:
    """Which of the pending changes reach the disk: none, all, or some."""

    def __init__(self, what, seed=0):
        self.what = what
        self._random = random.Random(str(seed))

    def name(self):
        return self.what == "all" or (self.what == "some" and self._random.random() < 0.5)

    def content(self, file):
        if self.what == "none" or file.written == file.durable:
            return file.durable
        if self.what == "all":
            return file.written
        # A part of the bytes, or only their number: delayed allocation leaves zeros.
        cut = self._random.randrange(len(file.written) + 1)
        zeros = bytes(len(file.written) - len(file.durable))
        return self._random.choice([file.durable, file.written[:cut], file.durable + zeros])


class Disk:
    """Contents of the folder `base`, now and after a power cut."""

    def __init__(self, base):
        """All that is in the folder already is durable."""
        self.root = Folder()
        self.inodes = {}
        for path, _, names in os.walk(base):
            where = os.path.relpath(path, base)
            if where != ".":
                self._make_folder(where)
            for name in names:
                with open(os.path.join(path, name), "rb") as opened:
                    content = opened.read()
                    file = File(content, content)
                    self.inodes[_ino(opened.fileno())] = file
                self._folder(where).set(name, file)
        for folder in self._folders(self.root):
            folder.sync()

    def apply(self, event):
        """Let one event of a recorder happen."""
        kind, *args = event
        getattr(self, f"_{kind}")(*args)

    def after_power_cut(self, keep):
        """The files and folders that are there afterwards: contents by path, None for a folder."""
        return dict(self._surviving(self.root, "", keep))

    def _surviving(self, folder, path, keep):
        entries = dict(folder.durable)
        for name, node in folder.pending:
            if keep.name():
                _apply(entries, name, node)
        for name, node in entries.items():
            where = os.path.join(path, name)
            if isinstance(node, Folder):
                yield where, None
                yield from self._surviving(node, where, keep)
            else:
                yield where, keep.content(node)

    def follow(self, base):
        """The same files lie in another folder now: know them by their new inodes."""
        self.inodes = {}
        for path, _, names in os.walk(base):
            for name in names:
                file = os.path.join(path, name)
                self.inodes[os.stat(file).st_ino] = self._node(os.path.relpath(file, base))

    def _folders(self, folder):
        yield folder
        for node in folder.now.values():
            if isinstance(node, Folder):
                yield from self._folders(node)

    def _node(self, path):
        folder, name = os.path.split(path)
        return self._folder(folder).now[name]

    def _folder(self, path):
        node = self.root
        for part in path.split(os.sep) if path not in ("", ".") else ():
            node = node.now[part]
        return node

    def _set(self, path, node):
        folder, name = os.path.split(path)
        self._folder(folder).set(name, node)

    def _create(self, path, ino):
        self.inodes[ino] = File()
        self._set(path, self.inodes[ino])

    def _write(self, ino, data):
        self.inodes[ino].written += data

    def _sync(self, ino):
        self.inodes[ino].durable = self.inodes[ino].written

    def _link(self, source, target):
        self._set(target, self._node(source))

    def _rename(self, source, target):
        self._set(target, self._node(source))
        self._set(source, None)

    _rename_no_replace = _rename

    def _unlink(self, path):
        self._set(path, None)

    def _make_folder(self, path):
        self._set(path, Folder())

    def _sync_folder(self, path):
        self._folder(path).sync()


def lay_out(files, base):
    """Put the files of a state on a real disk."""
    os.makedirs(base)
    for path, content in files.items():
        target = os.path.join(base, path)
        if content is None:
            os.makedirs(target, exist_ok=True)
        else:
            with open(target, "wb") as opened:
                opened.write(content)
