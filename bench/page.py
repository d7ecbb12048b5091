"""Web page with 100,000 training rows and 1,000 queries: request times of every screen, server memory.

    ./x bench page [--rows N] [--queries N]

Captures a linear model on synthetic rows at two checkpoints, saves its scores in the store (400 MB),
and sends the requests of every screen to `gradkeep serve`, query after query. A request that is
answered by "still working" counts like any other, and so does the final answer. Exit code 1 if the
95th percentile of any screen is above 300 ms, or the peak memory of the server is 500 MiB or more.
"""

import argparse
import http.client
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

import gradkeep as gk
from gradkeep import evaluate
from gradkeep.evaluate._evaluation import SampleSizes

LIMIT_MS, LIMIT_MIB = 300.0, 500.0
FEATURES, CLASSES, REPEATS = 16, 10, 40


def build_store(folder, rows, queries):
    """Build a store with captures, saved scores of all queries, an evaluation and decisions."""
    store = gk.open(folder, durability="process")
    torch.manual_seed(0)
    model = torch.nn.Linear(FEATURES, CLASSES)
    true = torch.nn.Linear(FEATURES, CLASSES)
    weights = {}
    for step, scale in ((1, 0.5), (2, 1.0)):
        model.weight.data = scale * true.weight.data
        weights[f"step-{step}"] = gk.Weights(
            {name: value.clone() for name, value in model.state_dict().items()}, step=step, lr=0.1
        )
    for split, count in (("train", rows), ("test", queries)):
        x = torch.randn(count, FEATURES)
        y = true(x).argmax(1)
        y = torch.where(torch.rand(count) < 0.05, torch.randint(CLASSES, (count,)), y)
        batches = list(zip(x.split(5000), y.split(5000), strict=True))
        gk.capture(
            store,
            model,
            batches,
            task=gk.Classification(),
            split=split,
            checkpoints=weights,
            columns={"text": [f"row {n} of {split}" for n in range(count)]},
            progress=False,
        )
    gk.attribute(store, method="dot", checkpoints="step-2", save="dot")
    rng = np.random.default_rng(0)
    items = 0.4 + 0.1 * rng.standard_normal(queries)
    draws = 0.4 + 0.01 * rng.standard_normal(1000)
    evaluate.Evaluation(
        *("lds", "dot at step-2", 0.4, (0.38, 0.42)),
        SampleSizes(queries=queries, subsets=100),
        *("synthetic", "bench", items, np.arange(queries)),
        draws=draws,
    ).save("lds-dot", store=store)
    for row in range(200):
        store.decide(gk.store.Decision("train", row, "accept" if row % 2 else "relabel"))


def list_requests(queries):
    """Return the requests of each screen, a list of addresses for each visit."""
    visit = np.random.default_rng(1).permutation(queries)[:REPEATS].tolist()
    return {
        "runs": [["/api/session", "/api/runs"]] * REPEATS,
        "why": [
            [
                "/api/sources",
                f"/api/queries?count=40&show={('all', 'wrong', 'unsure')[at % 3]}",
                f"/api/why?query={query}&source=saved:dot&k=8",
                f"/api/why?query={query}&source=saved:dot&source=method:dot&k=30",
                "/api/queries/random?show=wrong",
            ]
            for at, query in enumerate(visit)
        ],
        "why, groups": [[f"/api/why/groups?query={query}&source=saved:dot"] for query in visit[:8]],
        "why, layers": [
            [f"/api/why/layers?query={query}&source=method:dot"] for query in visit[:8]
        ],
        "suspects": [[f"/api/suspects?start={40 * at}&count=40"] for at in range(REPEATS)],
        "decisions": [["/api/decisions", "/api/decisions/export?form=csv"]] * REPEATS,
        "clusters": [["/api/clusters", "/api/rows?" + "&".join(f"row={n}" for n in range(40))]]
        * 10,
        "memory": [["/api/memory"]] * 10,
        "evaluation": [["/api/evaluations"]] * REPEATS,
        "store": [["/api/store"]] * REPEATS,
    }


def request_until_ready(connection, path, times):
    """Send a request until the answer is complete; every single request is timed."""
    until = time.monotonic() + 600
    while True:
        began = time.perf_counter()
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
        times.append(1000 * (time.perf_counter() - began))
        if response.status not in (200, 202):
            sys.exit(f"{path}: {response.status} {body[:500]!r}")
        answer = json.loads(body) if body[:1] == b"{" else {}
        if response.status == 200 and not any(one["working"] for one in answer.get("answers", ())):
            return
        if time.monotonic() > until:
            sys.exit(f"{path} took more than ten minutes")
        time.sleep(0.3)


def describe_memory(process):
    """Return the current and peak memory of the server, its own and mapped from files."""
    status = Path(f"/proc/{process}/status").read_text()
    sizes = {name: int(size) // 1024 for name, size in re.findall(r"(\w+):\s+(\d+) kB", status)}
    parts = ("VmRSS", "VmHWM", "RssAnon", "RssFile")
    return ", ".join(f"{part} {sizes[part]} MiB" for part in parts)


def read_peak_mib(process):
    status = Path(f"/proc/{process}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024


def main():
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("--rows", type=int, default=100_000)
    reader.add_argument("--queries", type=int, default=1_000)
    options = reader.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        build_store(folder, options.rows, options.queries)
        print(
            f"{options.rows} rows x {options.queries} queries, built in {time.perf_counter() - began:.0f} s"
        )
        line = [sys.executable, "-m", "gradkeep", "serve", folder, "--port", "0", "--no-open"]
        with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as server:
            try:
                port = int(re.search(r"127\.0\.0\.1:(\d+)", server.stdout.readline())[1])
                time.sleep(8)  # the server loads torch in the background
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                times = defaultdict(list)
                for screen, visits in list_requests(options.queries).items():
                    for visit in visits:
                        for path in visit:
                            request_until_ready(connection, path, times[screen])
                    print(f"{screen}: {describe_memory(server.pid)}", file=sys.stderr)
                memory = read_peak_mib(server.pid)
            finally:
                server.send_signal(signal.SIGINT)
                server.wait(20)
    missed = memory >= LIMIT_MIB
    print(f"{'screen':14}{'requests':>10}{'median ms':>12}{'95 % ms':>10}{'most ms':>10}")
    for screen, milliseconds in times.items():
        middle, high = np.percentile(milliseconds, (50, 95))
        missed |= high > LIMIT_MS
        print(
            f"{screen:14}{len(milliseconds):>10}{middle:>12.1f}{high:>10.1f}{max(milliseconds):>10.1f}"
        )
    everything = np.concatenate(list(times.values()))
    print(
        f"{'all':14}{len(everything):>10}{np.median(everything):>12.1f}{np.percentile(everything, 95):>10.1f}"
    )
    print(
        f"server memory at its peak: {memory:.0f} MiB (limit {LIMIT_MIB:.0f}; time limit {LIMIT_MS:.0f} ms)"
    )
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
