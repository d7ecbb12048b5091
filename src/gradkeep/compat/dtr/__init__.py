"""The names of the DTR prototype, on top of the online runtime.

The prototype needed its own build of torch, and every tensor had to be converted. Here
`set_memory_budget` is enough: from then on every tensor of this thread can be evicted, and is
recomputed when an operator needs it. `checkpoint` and related functions exist so that scripts keep
running; `install` adds them all to `torch` and `torch.Tensor`, as in the prototype.

>>> import torch
>>> from gradkeep.compat import dtr
>>> net = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(6)])
>>> dtr.set_memory_budget(7500)
>>> loss = net(dtr.checkpoint(torch.ones(24, 8))).sum()
>>> loss.backward()
>>> dtr.decheckpoint(loss).item() == loss.item(), dtr.remat_compute_time() > 0
(True, True)
>>> dtr.set_memory_budget(None)
"""

from gradkeep.compat.dtr._install import InstalledNames, install, uninstall
from gradkeep.compat.dtr._prototype import (
    annotate_log,
    base_compute_time,
    checkpoint,
    clear_checkpointpool,
    compute_time,
    cost_time,
    decheckpoint,
    is_checkpoint,
    loop_time,
    new_log,
    pin,
    remat_compute_time,
    reset_profile,
    search_time,
    set_memory_budget,
    toggle_ignore_small_tensors,
    toggle_log,
    toggle_profile,
    toggle_sampling,
    try_checkpoint,
    uncheckpoint,
    unset_memory_budget,
)

__all__ = [
    "InstalledNames",
    "annotate_log",
    "base_compute_time",
    "checkpoint",
    "clear_checkpointpool",
    "compute_time",
    "cost_time",
    "decheckpoint",
    "install",
    "is_checkpoint",
    "loop_time",
    "new_log",
    "pin",
    "remat_compute_time",
    "reset_profile",
    "search_time",
    "set_memory_budget",
    "toggle_ignore_small_tensors",
    "toggle_log",
    "toggle_profile",
    "toggle_sampling",
    "try_checkpoint",
    "uncheckpoint",
    "uninstall",
    "unset_memory_budget",
]
