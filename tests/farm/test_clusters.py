"""The same order on a Ray cluster whose node dies, and through submitit as SLURM would run it."""

import importlib.util
import sys
import threading
import time
import types

import pytest
from raises import raises

from gradkeep import farm
from gradkeep.errors import FarmError

NO_RAY = importlib.util.find_spec("ray") is None
LOOPBACK = {"node_ip_address": "127.0.0.1"}
NO_SUBMITIT = importlib.util.find_spec("submitit") is None


def check_complete(store, count):
    import farm_jobs

    rows = store.rows("models")
    assert rows.done().tolist() == list(range(count))
    stored = rows.read(range(count))
    assert [value.tolist() for value in stored["value"]] == [
        farm_jobs.value(n).tolist() for n in range(count)
    ]


@pytest.fixture
def by_value():
    """Cluster workers do not share this process's path: the jobs travel whole."""
    import cloudpickle
    import farm_jobs

    cloudpickle.register_pickle_by_value(farm_jobs)
    yield farm_jobs
    cloudpickle.unregister_pickle_by_value(farm_jobs)


@pytest.fixture
def cluster(monkeypatch):
    """A real cluster of three nodes on this machine: a head without cores, and two that work."""
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Everything on the loopback, as Ray itself does where clusters are not supported.
    monkeypatch.setattr(ray._private.ray_constants, "ENABLE_RAY_CLUSTER", False)
    head = {"num_cpus": 0, "include_dashboard": False, **LOOPBACK}
    ray_cluster = Cluster(initialize_head=True, head_node_args=head)
    yield ray_cluster
    ray.shutdown()
    ray_cluster.shutdown()


@pytest.mark.slow
@pytest.mark.skipif(NO_RAY, reason="ray is not installed: pip install -e '.[ray]'")
@pytest.mark.filterwarnings("default")  # those of Ray are its own
def test_a_ray_node_dies_in_the_middle_and_the_rows_are_complete(rows_of, cluster, by_value):
    store = rows_of(60)
    rows = store.rows("models")
    nodes = [cluster.add_node(num_cpus=1, **LOOPBACK) for _ in range(2)]
    cluster.wait_for_nodes()
    place = farm.engine("ray", address=cluster.address, workers=2)
    assert place.num_workers == 2
    killed = threading.Event()

    def kill_a_node_when_a_third_is_done():
        while len(rows.done()) < 20:
            time.sleep(0.1)
        cluster.remove_node(nodes[0], allow_graceful=False)
        killed.set()

    killer = threading.Thread(target=kill_a_node_when_a_third_is_done)
    killer.start()
    outcome = farm.run(
        store,
        "models",
        by_value.Slow(0.1),
        engine=place,
        lease_seconds=3.0,
        max_attempts=5,
    )
    killer.join()
    assert killed.is_set()
    assert outcome.complete
    check_complete(store, 60)


@pytest.mark.slow
@pytest.mark.skipif(NO_SUBMITIT, reason="submitit is not installed: pip install -e '.[slurm]'")
@pytest.mark.filterwarnings("default")  # those of submitit are its own
def test_pullers_submitted_as_to_slurm_complete_the_rows(rows_of, by_value, tmp_path):
    store = rows_of(40)
    place = farm.engine("slurm", workers=2, cluster="local", folder=str(tmp_path / "logs"))
    outcome = farm.run(store, "models", by_value.Hanging({3}, tmp_path), engine=place, timeout=2.0)
    assert outcome.complete
    check_complete(store, 40)
    assert store.rows("models").states()[3].attempts == 1
    # Two pullers, however many rows.
    assert len({path.name.split("_")[0] for path in (tmp_path / "logs").glob("*_result.pkl")}) == 2


def test_slurm_without_srun_is_told_in_words(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "submitit", types.ModuleType("submitit"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with raises(FarmError, "farm.no_slurm", fix="cluster="):
        farm.Slurm(workers=1).run(None, lambda: None)
