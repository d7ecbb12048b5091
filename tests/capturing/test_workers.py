"""Many workers, one capture: the bytes of one process, whoever dies, and nothing of a stranger."""

import dataclasses
import importlib.util
import os
import random
import signal
import threading
import time

import pytest
import torch
from raises import raises
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import gradkeep as gk
from gradkeep import farm
from gradkeep.capturing._capture import device_for, segment_ranges
from gradkeep.errors import CaptureError, FarmError, GradkeepError

KEY = gk.store.CaptureKey("final", "train")
BUDGET = "150kB"
"""Segments of few rows, so that there are many."""


class Forked:
    """Workers as forks of this process, of which some are killed at random moments."""

    threads = 1
    num_workers = 2

    def __init__(self, kills=0, before=lambda: None):
        self.left, self.before = kills, before
        self.killed = 0

    def run(self, spec, report):
        spec = dataclasses.replace(spec, lease_seconds=0.3, max_attempts=1000)
        chance = random.Random(0)
        running = {self.start(spec): chance.uniform(0.03, 0.15) for _ in range(2)}
        began = dict.fromkeys(running, time.monotonic())
        while running:
            time.sleep(0.01)
            for child, seconds in list(running.items()):
                ended, status = os.waitpid(child, os.WNOHANG)
                if not ended and self.left and time.monotonic() - began[child] > seconds:
                    os.kill(child, signal.SIGKILL)
                    ended, status = os.waitpid(child, 0)
                    self.left, self.killed = self.left - 1, self.killed + 1
                if ended:
                    del running[child]
                    if os.WIFSIGNALED(status):
                        child = self.start(spec)
                        running[child] = chance.uniform(0.03, 0.15)
                        began[child] = time.monotonic()

    def start(self, spec):
        child = os.fork()
        if child == 0:
            try:
                self.before()
                farm.work(spec)
            finally:
                os._exit(0)
        return child


class Nobody:
    """A cluster whose last node is gone."""

    threads = 1

    def run(self, spec, report):
        report()


class Rows(Dataset):
    """A data set of one's own, with texts."""

    def __init__(self, count, shift=0.0):
        self.count, self.shift = count, shift

    def __len__(self):
        return self.count

    def __getitem__(self, at):
        chance = torch.Generator().manual_seed(at)
        x = torch.randn(1, 8, 8, generator=chance) + self.shift
        return {"x": x, "label": at % 10, "source": f"from {at}"}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)).eval()


def batches(count=96, size=8):
    chance = torch.Generator().manual_seed(1)
    x = torch.randn(count, 1, 8, 8, generator=chance)
    y = torch.randint(0, 10, (count,), generator=chance)
    cuts = range(0, count, size)
    return [(x[at : at + size].clone(), y[at : at + size].clone()) for at in cuts]


def captured(folder, loader=None, model=None, **options):
    values = {"task": gk.Classification(), "memory_budget": BUDGET} | options
    return gk.capture(
        folder,
        network() if model is None else model,
        batches() if loader is None else loader,
        split="train",
        progress=False,
        **values,
    )


def contents(folder):
    """All segments that can be read, and those of the moments of layers that are kept dense.

    A writer that was killed leaves unnamed beginnings, which gc removes.
    """
    beside = folder / KEY.moments.folder / "seg"
    roots = [folder / KEY.folder / "seg", *([beside] if beside.exists() else [])]
    files = [path for root in roots for path in sorted(root.iterdir())]
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in files
        if not path.name.startswith(".tmp-")
    }


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


LOADERS = {
    "a list": lambda: (batches(), {}),
    "slices": lambda: (
        DataLoader(TensorDataset(*(torch.cat(part) for part in zip(*batches(), strict=True))), 7),
        {},
    ),
    "own data set": lambda: (DataLoader(Rows(61), 9), {"columns": ["source"]}),
    "own ids": lambda: (batches(), {"ids": list(range(1000, 1096))}),
    "some bytes": lambda: (batches(1000, 50), {"keep": "1KiB", "memory_budget": "4MB"}),
    "16 bits": lambda: (batches(90, 30), {"encoding": "bfloat16", "embeddings": ["0"]}),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_workers_leave_the_bytes_of_one_process(tmp_path, kind):
    loader, options = LOADERS[kind]()
    alone = captured(tmp_path / "alone", loader, **options)
    report = captured(tmp_path / "many", loader, engine=Forked(), **options)
    assert len(contents(tmp_path / "many")) > 1
    assert contents(tmp_path / "many") == contents(tmp_path / "alone")
    assert gk.open(tmp_path / "many").has(KEY.moments) == ("keep" not in options)
    assert (report.rows, report.bytes, report.reused_rows) == (alone.rows, alone.bytes, 0)
    assert gk.open(tmp_path / "many").row_sets() == []
    second = captured(tmp_path / "many", loader, engine=Forked(), **options)
    assert second.reused_rows == second.rows


def test_twenty_kills_cost_no_more_than_the_segments_they_hit(tmp_path):
    loader = batches(1920)
    captured(tmp_path / "alone", loader)
    engine = Forked(kills=20)
    captured(tmp_path / "many", loader, engine=engine)
    assert engine.killed == 20
    assert contents(tmp_path / "many") == contents(tmp_path / "alone")
    assert gk.store.verify(gk.open(tmp_path / "many")).healthy


@pytest.mark.slow
class Patient(Rows):
    """Rows that come slowly until another process asks for them, too: it takes seconds to start."""

    def __init__(self, count, notes):
        super().__init__(count)
        self.notes = notes

    def __getitem__(self, at):
        if at > 100:  # the first batches are looked at by everybody
            (self.notes / str(os.getpid())).touch()
        if len(list(self.notes.iterdir())) == 1:
            time.sleep(0.05)
        return super().__getitem__(at)


def test_real_processes_and_one_that_is_killed(tmp_path):
    (tmp_path / "notes").mkdir()
    captured(tmp_path / "alone", DataLoader(Rows(480), 8), columns=["source"])

    def others():
        return [name for name in os.listdir(tmp_path / "notes") if int(name) != os.getpid()]

    def kill_one():
        while not others() and not ended.is_set():
            time.sleep(0.01)
        os.kill(int(others()[0]), signal.SIGKILL)

    ended = threading.Event()
    killer = threading.Thread(target=kill_one)
    killer.start()
    slow = DataLoader(Patient(480, tmp_path / "notes"), 8)
    report = captured(tmp_path / "many", slow, columns=["source"], workers=2)
    ended.set()
    killer.join()
    assert report.rows == 480
    assert contents(tmp_path / "many") == contents(tmp_path / "alone")


def test_a_cluster_that_shrinks_to_nothing_is_an_error_and_the_rest_goes_on(tmp_path):
    captured(tmp_path / "alone")
    with raises(CaptureError, "capture.workers_failed", mentions="6 of 6 parts") as raised:
        captured(tmp_path / "many", engine=Nobody())
    assert "run the same call again" in str(raised.value)
    with pytest.raises(GradkeepError):  # nothing that is not whole can be asked
        gk.gradients(tmp_path / "many", split="train")
    captured(tmp_path / "many", engine=Forked())
    assert contents(tmp_path / "many") == contents(tmp_path / "alone")


class Shifting(Dataset):
    """Data that are others on other machines."""

    shift = 0.0

    def __len__(self):
        return 96

    def __getitem__(self, at):
        chance = torch.Generator().manual_seed(at)
        return torch.randn(1, 8, 8, generator=chance) + Shifting.shift, at % 10


class Scaled(gk.Classification):
    """A task whose code is another on other machines."""

    scale = 1.0

    def measure(self, model, batch):
        result = super().measure(model, batch)
        return dataclasses.replace(result, losses=result.losses * Scaled.scale, outputs=None)


@pytest.mark.parametrize(
    ("before", "mentions"),
    [
        (lambda: setattr(Shifting, "shift", 1.0), "reads other data"),
        (lambda: setattr(Scaled, "scale", 2.0), "whose code differs"),
    ],
)
def test_workers_with_other_data_or_code_are_refused_and_leave_nothing(tmp_path, before, mentions):
    loader, task = DataLoader(Shifting(), 8), Scaled()
    with raises(CaptureError, "capture.workers_failed", mentions=mentions):
        captured(tmp_path / "many", loader, task=task, engine=Forked(before=before))
    assert not (tmp_path / "many" / KEY.folder / "seg").exists()
    captured(tmp_path / "many", loader, task=task, engine=Forked())
    captured(tmp_path / "alone", loader, task=task)
    assert contents(tmp_path / "many") == contents(tmp_path / "alone")


class Late(Dataset):
    """Data that are others from some row on, which the first batch does not tell."""

    shift = 0.0

    def __len__(self):
        return 96

    def __getitem__(self, at):
        chance = torch.Generator().manual_seed(at)
        shift = Late.shift if at >= 60 else 0.0
        return torch.randn(1, 8, 8, generator=chance) + shift, at % 10


def test_rows_of_other_data_are_never_sealed(tmp_path):
    engine = Forked(before=lambda: setattr(Late, "shift", 1.0))
    with raises(CaptureError, "capture.rows_changed"):
        captured(tmp_path / "many", DataLoader(Late(), 8), engine=engine)
    with pytest.raises(GradkeepError):
        gk.gradients(tmp_path / "many", split="train")


def test_a_sample_that_is_no_number_is_named_as_in_one_process(tmp_path):
    loader = batches()
    loader[7][0][3, 0, 0, 0] = float("nan")
    with raises(CaptureError, "capture.workers_failed", mentions="sample 59 "):
        captured(tmp_path / "many", loader, engine=Forked())


def test_what_cannot_be_shared_out_is_refused(tmp_path):
    with pytest.raises(CaptureError, match="cannot reach"):
        captured(gk.open(gk.store.Memory()), workers=2)
    with pytest.raises(FarmError, match="workers"):
        captured(tmp_path / "none", workers=0)
    with pytest.raises(FarmError, match="either workers= or engine="):
        captured(tmp_path / "both", workers=2, engine=Nobody())
    with pytest.raises(FarmError, match="engine"):
        captured(tmp_path / "no", engine="ray")
    random = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))
    with raises(CaptureError, "capture.random_with_workers"):
        captured(tmp_path / "random", model=random, mode="train", workers=2)

    class Endless:
        def __iter__(self):
            return iter(batches())

    with raises(CaptureError, "capture.unknown_length"):
        captured(tmp_path / "endless", Endless(), workers=2)


def test_ranges_cover_all_segments_and_end_where_batches_do():
    for rows, per, batch, workers in (
        (3072, 64, 128, 2),
        (100, 8, 7, 3),
        (5, 8, 2, 4),
        (64, 1, 64, 2),
    ):
        ranges = segment_ranges(rows, per, batch=batch, workers=workers)
        covered = [number for start, stop in ranges for number in range(start, stop)]
        assert covered == list(range(-(-rows // per)))
    assert all(stop * 64 % 128 == 0 for _, stop in segment_ranges(3072, 64, batch=128, workers=2))


def test_workers_of_one_machine_share_its_devices_out():
    cuda = torch.device("cuda", 0)
    assert [device_for(cuda, worker, 2).index for worker in range(4)] == [0, 1, 0, 1]
    assert device_for(torch.device("cpu"), 3, 2).type == "cpu"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="pip install -e '.[ray]'")
@pytest.mark.filterwarnings("default")  # those of Ray are its own
def test_a_ray_cluster_of_two_workers_loses_a_node(tmp_path, monkeypatch):
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    monkeypatch.setattr(ray._private.ray_constants, "ENABLE_RAY_CLUSTER", False)
    here = {"node_ip_address": "127.0.0.1"}
    loader = batches(1920)
    captured(tmp_path / "alone", loader)
    seen = tmp_path / "many" / KEY.folder / "seg"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **here})
    try:
        nodes = [cluster.add_node(num_cpus=1, **here) for _ in range(2)]
        cluster.wait_for_nodes()
        gone = threading.Event()

        def lose_a_node():
            while not seen.exists() or len(list(seen.iterdir())) < 5:
                time.sleep(0.01)
            cluster.remove_node(nodes[0], allow_graceful=False)
            gone.set()

        loser = threading.Thread(target=lose_a_node)
        loser.start()
        engine = farm.engine("ray", address=cluster.address, workers=2)
        report = captured(tmp_path / "many", loader, engine=engine)
        loser.join()
        assert gone.is_set()
        assert report.rows == 1920
        assert contents(tmp_path / "many") == contents(tmp_path / "alone")
    finally:
        ray.shutdown()
        cluster.shutdown()


class Experts(nn.Module):
    """Each row goes to the expert of its label."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(64, 10) for _ in range(3))

    def forward(self, x):
        flat, chosen = x.flatten(1), (x[:, 0, 0, 0] * 1e3).long() % 3
        out = flat.new_zeros(len(flat), 10)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                out = out.index_copy(0, rows, expert(flat[rows]))
        return out


def test_layers_that_first_run_in_a_workers_batch_are_captured(tmp_path):
    torch.manual_seed(0)
    loader = batches(32, 4)
    loader[0][0][:, 0, 0, 0] = 0.0  # all to the first expert
    model = Experts().eval()
    captured(tmp_path / "alone", loader, model)
    captured(tmp_path / "many", loader, model, engine=Forked())
    assert contents(tmp_path / "many") == contents(tmp_path / "alone")
    (key,) = gk.open(tmp_path / "many").captures()
    names = [layer.name for layer in gk.open(tmp_path / "many").read(key).schema.layers]
    assert sorted(names) == ["experts.0", "experts.1", "experts.2"]
