"""A sample of `./x bench sweep`: functions and modules of torch, trained inside budgets, to the bit."""

import random
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("expecttest", reason="torch needs it to show the samples of its own tests")

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # torch's own, about what it samples
]

NAMES = (
    *("abs", "add", "addmm", "angle", "bmm", "cat", "chunk", "clamp", "complex", "conj", "cumprod"),
    *(
        "cumsum",
        "einsum",
        "exp",
        "fft_fft",
        "fft_irfft",
        "fft_rfft2",
        "gather",
        "index_put",
        "istft",
    ),
    *(
        "lerp",
        "linalg_eigh",
        "linalg_inv",
        "linalg_norm",
        "linalg_qr",
        "linalg_solve",
        "linalg_svd",
    ),
    *("logsumexp", "masked_fill", "matmul", "mul", "nn_functional_conv2d", "nn_functional_dropout"),
    *("nn_functional_embedding", "nn_functional_gelu", "nn_functional_group_norm", "prod", "real"),
    *("nn_functional_layer_norm", "nn_functional_scaled_dot_product_attention", "polar", "scatter"),
    *(
        "sin",
        "sort",
        "special_i0e",
        "split",
        "stft",
        "svd",
        "to_sparse",
        "unbind",
        "view_as_complex",
    ),
    *("nn.BatchNorm2d", "nn.GRU", "nn.GRUCell", "nn.LSTM", "nn.LSTMCell", "nn.Embedding"),
    *("nn.MultiheadAttention", "nn.RNNCell", "nn.TransformerEncoderLayer", "nn.InstanceNorm1d"),
)


@pytest.fixture(scope="module")
def sweep():
    root = Path(__file__).parents[2]
    sys.path.insert(0, str(root))
    try:
        import bench.sweep

        yield bench.sweep
    finally:
        sys.path.remove(str(root))


def test_functions_and_modules_train_to_the_same_bits_or_are_refused(sweep):
    exactly = set(NAMES)
    subjects = [
        subject
        for subject in (
            *sweep.function_subjects(exactly),
            *sweep.module_subjects(exactly),
        )
        if subject.name.split()[0] in exactly
    ]
    chosen = random.Random(0).sample(subjects, 30)
    verdicts = [
        verdict
        for number, subject in enumerate(chosen)
        for verdict in sweep.judge(
            subject, (sweep.BUDGETS[number % 3],), (sweep.MODES[number // 2 % 2],)
        )
    ]
    assert [v for v in verdicts if v.kind in ("wrong", "ugly")] == []
    assert sum(v.dropped and v.kind == "exact" for v in verdicts) >= 12


def test_every_way_to_take_memory_unwritten_is_known():
    import torch

    from gradkeep.remat._rerun import is_uninitialized

    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    # Quantized tensors are never made again.
    takes = [n for n in names if re.fullmatch(r"aten::(new_)?empty(_\w+)?", n) and "quant" not in n]
    assert len(takes) >= 6
    assert [name for name in takes if not is_uninitialized(name)] == []
