"""A byte budget for a question is kept by the process that asks it."""

import subprocess
import sys
import textwrap

import pytest

ROWS, QUERIES, BUDGET = 50_000, 100, 512 << 20


@pytest.mark.slow
def test_a_large_question_stays_inside_its_budget(tmp_path):
    script = textwrap.dedent(
        f"""
        import resource, sys, threading, time
        import torch
        import gradkeep as gk
        from gradkeep.data import model
        torch.set_num_threads(1)
        torch.manual_seed(0)

        def memory():
            with open("/proc/self/status") as status:
                return next(int(l.split()[1]) << 10 for l in status if l.startswith("VmRSS"))

        if sys.argv[1] == "make":
            net = model("mlp").eval()
            for split, rows in (("train", {ROWS}), ("test", {QUERIES})):
                batches = [(torch.randn(500, 64), torch.randint(0, 10, (500,)))] * (rows // 500)
                if split == "test":
                    batches = [(torch.randn(rows, 64), torch.randint(0, 10, (rows,)))]
                gk.capture(sys.argv[2], net, batches, task=gk.Classification(), split=split,
                           progress=False)
            sys.exit()
        store = gk.open(sys.argv[2])
        small = gk.gradients(store, split="test")
        gk.query.dot(small, small)  # libraries are loaded and the machine is known
        before, peak, done = memory(), [0], threading.Event()

        def watch():
            while not done.is_set():
                peak[0] = max(peak[0], memory())
                time.sleep(0.002)

        threading.Thread(target=watch, daemon=True).start()
        queries, train = gk.gradients(store, split="test"), gk.gradients(store, split="train")
        found = gk.query.dot(queries, train, memory_budget={BUDGET})
        best = gk.query.top(queries, train, 5, memory_budget={BUDGET})
        done.set()
        assert found.values.shape == ({QUERIES}, {ROWS})
        assert torch.equal(found.values.max(1).values, best.values[:, 0])
        print(peak[0] - before)
        """
    )
    for task in ("make", "ask"):
        ran = subprocess.run(
            [sys.executable, "-c", script, task, str(tmp_path / "store")],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) <= 1.1 * BUDGET
