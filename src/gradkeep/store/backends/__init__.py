"""Places that hold a store's bytes: a folder, memory, a bucket, or a place of your own."""

from gradkeep.store.backends._backend import Backend, Durability, Entry, Readable
from gradkeep.store.backends._bucket import Bucket
from gradkeep.store.backends._disk import LocalDisk
from gradkeep.store.backends._memory import Memory
from gradkeep.store.backends._schemes import backend_for, register_backend
from gradkeep.store.backends._syscalls import Syscalls

__all__ = [
    "Backend",
    "Bucket",
    "Durability",
    "Entry",
    "LocalDisk",
    "Memory",
    "Readable",
    "Syscalls",
    "backend_for",
    "register_backend",
]
