"""The original experiments' names of models and sizes, in the zoo's words."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_MODELS = {"unroll_gan": "unrolled_gan", "treelstm_old": "treelstm"}
# There, `batch_size` was the number of steps of an LSTM and the depth of a tree, and `input_size`
# the number of rows: only a command with `input_size` speaks that way.
_ROWS = {"lstm": "length", "treelstm": "depth"}
_SIZES = {
    "transformer": {
        "input_seq_length": "length",
        "target_seq_length": "target_length",
        "num_feature": "dim",
    },
    "unrolled_gan": {"d_hid": "d_hidden", "g_hid": "g_hidden", "g_inp": "noise_dim"},
}


def zoo_name(model: str) -> str:
    """The zoo's name of a model.

    >>> zoo_name("tv_densenet121"), zoo_name("unroll_gan"), zoo_name("lstm")
    ('densenet121', 'unrolled_gan', 'lstm')
    """
    torchvision = re.fullmatch(r"tv_((?:res|dense)net\d+)", model)
    return torchvision[1] if torchvision else _MODELS.get(model, model)


def zoo_sizes(name: str, sizes: Mapping[str, float]) -> dict[str, float]:
    """The sizes in the zoo's words.

    >>> zoo_sizes("lstm", {"batch_size": 256, "input_size": 512})
    {'length': 256, 'batch_size': 512}
    """
    words = dict(_SIZES.get(name, {}))
    if name in _ROWS and "input_size" in sizes:
        words |= {"batch_size": _ROWS[name], "input_size": "batch_size"}
    return {words.get(key, key): value for key, value in sizes.items()}
