"""What a capture loads: neither pandas nor the compiler of torch, which cost more than it does."""

import subprocess
import sys

SCRIPT = """
import sys, tempfile, torch
import gradkeep as gk
net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
data = [(torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1]))]
with tempfile.TemporaryDirectory() as folder:
    gk.capture(folder, net, data, task=gk.Classification(), split="train", progress=False)
heavy = ("pandas", "torch._dynamo", "torch._inductor", "sympy", "transformers", "ray")
print([name for name in heavy if name in sys.modules])
"""


def test_a_capture_loads_neither_pandas_nor_the_compiler():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.strip() == "[]"
