"""A recorded step says exactly what the step did, and does not change it."""

import json
import subprocess
import sys

import pytest
import torch
from raises import raises
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from gradkeep.compat.dtr.zoo import build
from gradkeep.errors import RematError
from gradkeep.remat import read_log, record, unlimited_peak
from gradkeep.remat._log_recorder import LoggedCall, LoggedStep

SIZES = {
    "resnet20": {},
    "resnet32": {"batch_size": 2},
    "resnet56": {"batch_size": 1},
    "resnet18": {"height": 32, "width": 32},
    "densenet100": {"batch_size": 1, "height": 16, "width": 16},
    "unet": {},
    "lstm": {},
    "lstm_encoder": {},
    "gru_encoder": {"length": 8},
    "treelstm": {},
    "transformer": {},
    "transformer_encoder": {},
    "unrolled_gan": {},
}


class Bytes(TorchDispatchMode):
    """The bytes of storages alive at once, by looking at all of them after every operator."""

    @classmethod
    def _should_skip_dynamo(cls):
        return False

    def __init__(self):
        super().__init__()
        self.storages, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        flat, _ = torch.utils._pytree.tree_flatten((args, kwargs, out))
        for tensor in flat:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = torch.multiprocessing.reductions.StorageWeakRef(
                    storage
                )
        self.storages = {k: ref for k, ref in self.storages.items() if not ref.expired()}
        alive = [
            torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self.storages.values()
        ]
        self.peak = max(self.peak, sum(storage.nbytes() for storage in alive))
        return out


def lines(path, instruction=None):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if instruction in (None, row["INSTRUCTION"])]


@pytest.mark.parametrize("name", SIZES)
def test_the_simulated_peak_is_the_largest_number_of_bytes_alive(name, tmp_path):
    work = build(name, **SIZES[name])
    work.step()
    recorder = record(tmp_path / "step.log")
    with recorder:
        work.step()
    program = read_log(recorder.path)
    assert unlimited_peak(program) == recorder.live_peak
    assert program.ignored_releases == 0


@pytest.mark.parametrize("name", ["lstm", "treelstm", "unrolled_gan"])
def test_the_peak_is_that_of_counting_all_storages_after_every_operator(name, tmp_path):
    work = build(name)
    recorder, counted = record(tmp_path / "step.log"), Bytes()
    with recorder:
        work.step()
    with counted:
        work.step()
    assert recorder.live_peak == counted.peak


@pytest.mark.parametrize("name", ["resnet20", "unet", "densenet100", "unrolled_gan"])
def test_recorded_as_mutations_the_log_reads_and_needs_no_fewer_bytes(name, tmp_path):
    work = build(name, **SIZES[name])
    recorder = record(tmp_path / "step.log", in_place="mutate")
    with recorder:
        work.step()
    assert lines(recorder.path, "MUTATE")
    assert unlimited_peak(read_log(recorder.path)) >= recorder.live_peak


@pytest.mark.parametrize("in_place", ["alias", "mutate"])
@pytest.mark.parametrize("name", ["resnet20", "unet", "treelstm", "transformer", "unrolled_gan"])
def test_recording_changes_no_loss_no_gradient_and_no_buffer(name, in_place, tmp_path):
    def run(*, recorded):
        work = build(name, seed=7)
        torch.manual_seed(1)
        if recorded:
            with record(tmp_path / "step.log", in_place=in_place):
                loss = work.step()
        else:
            loss = work.step()
        gradients = [p.grad for p in work.model.parameters() if p.grad is not None]
        return [loss, *gradients, *work.model.buffers(), torch.get_rng_state()]

    plain, recorded = run(recorded=False), run(recorded=True)
    assert len(plain) == len(recorded)
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))


def test_repeats_keep_the_least_time_of_every_operator(tmp_path):
    work = build("lstm", length=4)
    recorder, seen = record(tmp_path / "step.log"), []
    for count in range(1, 4):
        with recorder:
            work.step()
        seen.append(list(recorder._step.times))
        assert recorder.repeats == count
    least = [min(times) for times in zip(*seen, strict=True)]
    assert [int(row["TIME"]) for row in lines(recorder.path, "CALL")] == least
    assert sum(least) < min(map(sum, seen))


def test_another_step_starts_over(tmp_path):
    recorder = record(tmp_path / "step.log")
    for length, repeats in ((4, 1), (4, 2), (5, 1)):
        work = build("lstm", length=length)
        with recorder:
            work.step()
        assert recorder.repeats == repeats
    assert unlimited_peak(read_log(recorder.path)) == recorder.live_peak


def test_notes_of_the_same_events_take_the_smaller_times():
    event = LoggedCall("relu", (1,), ((2, 8, -1),))
    first, second = LoggedStep([event, 1], [5]), LoggedStep([event, 1], [3])
    assert first.with_least_times(second).times == [3]
    assert second.with_least_times(first).times == [3]
    other = LoggedStep([event], [9])
    assert first.with_least_times(other) is other


def test_an_exception_inside_leaves_no_log_and_no_mode(tmp_path):
    recorder = record(tmp_path / "logs" / "step.log")
    with pytest.raises(ZeroDivisionError), recorder:
        torch.ones(3).add(1).apply_(lambda value: value / 0)
    assert _get_current_dispatch_mode() is None
    assert not (tmp_path / "logs").exists()
    assert not recorder._alive
    with recorder:
        tensor = torch.ones(3) + 1
    assert recorder.repeats == 1
    assert len(lines(recorder.path, "CALL")) == 2
    assert tensor.sum() == 6


def test_a_failed_step_leaves_the_log_of_the_one_before(tmp_path):
    recorder = record(tmp_path / "step.log")
    with recorder:
        torch.ones(3) + 1
    before = recorder.path.read_bytes()
    with pytest.raises(RuntimeError), recorder:
        torch.ones(3) @ torch.ones(4)
    assert recorder.path.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["step.log"]


def test_a_log_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with raises(RematError, "remat.log_not_written"), record(tmp_path / "file" / "a.log"):
        torch.ones(3)


def test_views_and_in_place_operators_take_no_bytes(tmp_path):
    base = torch.zeros(4, 4)
    recorder = record(tmp_path / "step.log")
    with recorder:
        view = base.view(16)[3:]
        view.add_(1)
        base.t().mul_(2)
    assert recorder.live_peak == 64
    assert unlimited_peak(read_log(recorder.path)) == 64
    assert base.sum() == 26


def test_writing_several_storages_at_once_repeats_in_the_same_order(tmp_path):
    recorder = record(tmp_path / "step.log")
    for count in range(1, 9):
        # Other addresses every time.
        holes = [torch.empty(1000 * count) for _ in range(count)]
        many = [torch.zeros(10 + at) for at in range(12)]
        with recorder:
            torch._foreach_add_(many, 1.0)
        assert recorder.repeats == count, "the events differ from those of the run before"
        del holes
    assert len(lines(recorder.path, "CONSTANT")) == 12


def test_a_storage_that_an_operator_resizes_counts_with_its_new_size(tmp_path):
    a, out = torch.ones(100), torch.empty(0)
    recorder = record(tmp_path / "step.log")
    with recorder:
        torch.add(a, a, out=out)
        out.mul_(2)
    assert recorder.live_peak == 800
    assert unlimited_peak(read_log(recorder.path)) == 800


def test_backward_is_marked_where_it_begins(tmp_path):
    work = build("lstm", length=2)
    recorder = record(tmp_path / "step.log")
    with recorder:
        work.step()
    names = [row.get("ANNOTATION") or row.get("NAME") for row in lines(recorder.path)]
    at = names.index("BACKWARD")
    assert names.count("BACKWARD") == 1
    assert "tanh" in names[:at]
    assert "tanh_backward" in names[at:]
    assert "tanh_backward" not in names[:at]


def test_sparse_gradients_are_refused_with_what_to_do(tmp_path):
    embedding = nn.Embedding(5, 3, sparse=True)
    with (
        raises(RematError, "remat.no_storage", fix="sparse gradients"),
        record(tmp_path / "step.log"),
    ):
        embedding(torch.tensor([1, 2])).sum().backward()
    assert _get_current_dispatch_mode() is None


def test_compiled_functions_are_recorded_operator_by_operator(tmp_path):
    # In a process of its own: loading the compiler changes how later tests record.
    code = """if True:
        import sys, warnings
        warnings.simplefilter("error")
        import torch
        from gradkeep.remat import record, read_log, unlimited_peak
        def plain(x): return (x.sin() + 1).cos()
        def recorded(function, path):
            x = torch.ones(4, requires_grad=True)
            recorder = record(path)
            with recorder: function(x).sum().backward()
            program = read_log(path)
            assert unlimited_peak(program) == recorder.live_peak
            return [op.name for op in program.ops]
        one = recorded(plain, "one.log")
        assert "torch._dynamo" not in sys.modules, "seconds for nothing"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled = torch.compile(plain, backend="eager")
        assert recorded(compiled, "two.log") == one, one
    """
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_an_unknown_way_to_record_in_place_is_refused(tmp_path):
    with pytest.raises(RematError, match=r"^in_place must be"):
        record(tmp_path / "step.log", in_place="copy")


def test_mutated_positions_are_numbers_as_in_the_original_logs(tmp_path):
    log = tmp_path / "step.log"
    with record(log, in_place="mutate"):
        torch.ones(3).add_(torch.ones(3))
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["MUTATE"] for line in lines if line["INSTRUCTION"] == "MUTATE"] == [[0]]


def test_what_conjugates_within_an_operator_comes_out_as_without_a_recorder(tmp_path):
    torch.manual_seed(0)
    z = torch.randn(4, 6, dtype=torch.complex64)
    plain = torch.linalg.pinv(z)
    with record(tmp_path / "step.log"):
        recorded = torch.linalg.pinv(z)
    assert torch.equal(recorded, plain)
