"""What the page is answered: the same figures as the library gives, and words where there are none."""

import csv
import io
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from web_pages import NAMES, TEST, TRAIN, WRONG, settled

import gradkeep as gk
from gradkeep.data import GPT
from gradkeep.evaluate._groups import map_rows
from gradkeep.store import current_decisions


def test_runs_say_what_was_captured_and_how_good_it_was(shared, master):
    runs = {one["name"]: one for one in settled(shared, "/api/runs").json()["runs"]}
    main = runs["main"]
    assert main["rows"] == {"train": TRAIN, "test": TEST, "test-as-3": TEST}
    assert (main["queries"], main["train"], main["checkpoints"]) == ("test", "train", 2)
    block = gk.open(master).read(gk.store.CaptureKey("epoch-12", "test"))
    right = float((block.column("label") == block.column("predicted")).mean())
    last = [
        one for one in main["points"] if (one["split"], one["checkpoint"]) == ("test", "epoch-12")
    ]
    assert last[0]["accuracy"] == pytest.approx(right)
    assert last[0]["loss"] == pytest.approx(float(block.column("loss").mean()))


@pytest.mark.parametrize("source", ["saved:kept", "method:kernel", "method:dot", "method:tracin"])
def test_why_ranks_as_the_library_does(shared, master, source):
    kind, _, name = source.partition(":")
    at = "epoch-12" if name == "dot" else None
    scores = (
        gk.Scores.load(gk.open(master), name)
        if kind == "saved"
        else gk.attribute(master, method=name, checkpoints=at)
    )
    response = settled(shared, f"/api/why?query=7&k=5&source={source}").json()
    (answer,) = response["answers"]
    for side, ranked in (("helped", scores.top(5, query=7)), ("hurt", scores.bottom(5, query=7))):
        assert [one["row"]["id"] for one in answer[side]] == ranked.ids.tolist()
        assert [one["score"] for one in answer[side]] == pytest.approx(
            ranked.values.tolist(), rel=1e-4
        )
    total = float(np.abs(scores.of(7)).sum())
    assert answer["absolute"] == pytest.approx(total, rel=1e-4)
    shares = [one["share"] for one in answer["helped"]]
    assert shares == pytest.approx((scores.top(5, query=7).values / total).tolist(), rel=1e-4)
    if scores.confidence is not None:
        at = int(np.flatnonzero(scores.query_ids == 7)[0])
        assert answer["confidence"] == pytest.approx(float(scores.confidence[at]), abs=1e-4)


def test_two_methods_stand_side_by_side_with_what_is_known_of_each(shared):
    url = "/api/why?query=7&source=method:kernel&source=method:dot"
    first, second = settled(shared, url).json()["answers"]
    assert (first["source"]["method"], second["source"]["method"]) == ("kernel", "dot")
    assert first["judged"]["name"] == "lds-kernel"
    assert second["judged"] is None


def test_a_label_can_be_chosen_where_the_store_can_answer_it(shared):
    answer = settled(shared, "/api/why?query=7").json()
    assert {one["queries"] for one in answer["explained"]} == {"test", "test-as-3"}
    other = settled(shared, "/api/why?query=7&queries=test-as-3&source=method:kernel").json()
    assert other["query"]["label"] == 3
    mine = settled(shared, "/api/why?query=7&source=method:kernel").json()
    assert other["answers"][0]["helped"] != mine["answers"][0]["helped"]


def test_layers_add_up_to_the_score(shared):
    query = "query=7&source=method:kernel&k=3"
    parts = settled(shared, f"/api/why/layers?{query}").json()
    assert parts["layers"] == ["0", "2"]
    (answer,) = settled(shared, f"/api/why?{query}").json()["answers"]
    scores = {one["row"]["id"]: one["score"] for one in (*answer["helped"], *answer["hurt"])}
    for row, added in zip(parts["rows"], parts["parts"], strict=True):
        assert sum(added) == pytest.approx(scores[row], rel=1e-3, abs=1e-6)


def test_groups_are_those_of_the_library(shared, master):
    answer = settled(shared, "/api/why/groups?query=7&source=method:kernel").json()
    expected = gk.groups(gk.attribute(master, method="kernel"), 7)
    assert [one["name"] for one in answer["groups"]] == [one.name for one in expected.groups]
    assert answer["rest"] == expected.rest


def test_queries_are_filtered_and_searched(shared, master):
    block = gk.open(master).read(gk.store.CaptureKey("epoch-12", "test"))
    wrong = np.flatnonzero(block.column("label") != block.column("predicted"))
    answer = shared.get("/api/queries?show=wrong&count=100").json()
    assert sorted(one["id"] for one in answer["rows"]) == wrong.tolist()
    losses = [one["loss"] for one in answer["rows"]]
    assert losses == sorted(losses, reverse=True)
    assert all(
        0.1 < one["probability"] < 0.9
        for one in shared.get("/api/queries?show=unsure").json()["rows"]
    )
    named = shared.get("/api/queries?search=seven").json()["rows"]
    assert named
    assert {one["label_name"] for one in named} == {"seven"}
    assert {one["id"] for one in shared.get("/api/queries?search=3&count=100").json()["rows"]} == {
        3,
        *range(30, 40),
    }
    assert shared.get("/api/queries/random?show=wrong").json()["id"] in wrong


def test_suspects_are_those_of_the_library(shared, master):
    answer = settled(shared, "/api/suspects?count=20").json()
    expected = gk.suspects(master, checkpoints=["epoch-04", "epoch-12"])
    assert [one["row"]["id"] for one in answer["rows"]] == expected.ids[:20].tolist()
    assert answer["classes"] == NAMES
    assert answer["noise"] is None
    noisy = settled(shared, "/api/suspects?run=losses&by=noise").json()
    assert 0 <= noisy["noise"]["low"] <= noisy["noise"]["rate"] <= noisy["noise"]["high"] <= 1


def decide(client, row, action, label=None):
    return client.post("/api/decisions", json={"row": row, "action": action, "label": label})


def test_decisions_are_an_append_only_log_that_undo_adds_to(client, folder):
    assert decide(client, 3, "relabel", 5).json()["number"] == 0
    assert decide(client, 4, "accept").json()["number"] == 1
    assert decide(client, 3, "undo").json()["of"] == 0
    assert decide(client, 3, "undo").status_code == 409
    assert decide(client, 10**6, "accept").status_code == 409
    log = gk.open(folder).decisions("train")
    assert [one.action for one in log] == ["relabel", "accept", "undo"]
    assert set(current_decisions(log)) == {4}
    decided = settled(client, "/api/suspects?show=decided").json()
    assert [one["row"]["id"] for one in decided["rows"]] == [4]
    assert settled(client, "/api/suspects?show=open").json()["matching"] == TRAIN - 1
    assert gk.store.verify(folder).healthy


def test_decisions_are_exported(client):
    decide(client, 3, "relabel", 5)
    decide(client, 50, "relabel")
    decide(client, 4, "accept")
    answer = client.get("/api/decisions/export?form=csv")
    assert "attachment" in answer.headers["content-disposition"]
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert [(one["id"], one["action"], one["label"]) for one in rows] == [
        ("3", "relabel", "5"),
        ("50", "relabel", ""),
        ("4", "accept", ""),
    ]
    as_json = client.get("/api/decisions/export?form=json").json()
    assert [one["id"] for one in as_json["decisions"]] == [3, 50, 4]


def test_a_killed_process_loses_no_decision_that_was_acknowledged(folder):
    code = (
        "import sys, gradkeep as gk\n"
        "store = gk.open(sys.argv[1])\n"
        "for row in range(10**6):\n"
        "    print(store.decide(gk.store.Decision('train', row, 'accept')).number, flush=True)\n"
    )
    answer = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True
    )
    for _ in range(25):
        last = int(answer.stdout.readline())
    answer.send_signal(signal.SIGKILL)
    answer.communicate()
    log = gk.open(folder).decisions("train")
    assert [one.number for one in log] == list(range(len(log)))
    assert len(log) > last >= 24


def test_models_that_never_saw_a_row_suggest_its_label(client):
    assert settled(client, "/api/suspects").json()["suggestions"] == "none"
    values = {"run": "main", "split": "train", "name": "main"}
    assert settled(client, "/api/suspects/suggestions", post=values).json() == {"there": True}
    answer = settled(client, "/api/suspects?count=120").json()
    assert answer["suggestions"] == "there"
    text = {one["row"]["id"]: one["suggestion"] for one in answer["rows"]}
    assert all(
        one["name"] == NAMES[one["label"]] and 0 < one["probability"] <= 1 for one in text.values()
    )
    assert sum(text[row]["label"] != 0 for row in WRONG if row in text) >= 1


def test_training_without_what_was_said_to_be_wrong_shows_the_difference(client):
    url, values = "/api/suspects/retrained", {"run": "main", "split": "train", "name": "main"}
    assert client.post(url, json=values).status_code == 409  # nothing was said yet
    for row in WRONG:
        decide(client, row, "relabel", 1)
    answer = settled(client, url, post=values).json()
    assert answer["rows"] == len(WRONG)
    assert answer["gain"]["low"] <= answer["gain"]["value"] <= answer["gain"]["high"]
    assert client.get(url).json() == answer


def test_without_a_recipe_the_command_is_named(shared):
    answer = shared.get("/api/suspects/retrained").json()["problem"]
    assert "--recipe" in answer["fix"]


def test_the_map_is_that_of_the_library(shared, master):
    answer = settled(shared, "/api/clusters?clusters=4").json()
    expected = map_rows(master, checkpoints="epoch-12", clusters=4)
    assert answer["ids"] == expected.ids.tolist()
    assert answer["x"] == pytest.approx(expected.places[:, 0].tolist(), abs=1e-4)
    assert answer["cluster"] == expected.clusters.tolist()
    assert [one["size"] for one in answer["clusters"]] == np.bincount(expected.clusters).tolist()
    members = shared.get("/api/rows?row=5&row=6&row=9999").json()
    assert [one["known"] for one in members] == [True, True, False]


def test_budgets_cost_what_the_simulator_says(shared, master):
    from gradkeep.remat import read_log, simulate, unlimited_peak

    answer = settled(shared, "/api/memory").json()
    program = read_log(master / "remat" / "step.log")
    peak = unlimited_peak(program)
    assert answer["peak"] == peak
    curve = {one["ratio"]: one for one in answer["curves"][0]["points"]}
    outcome = simulate(program, heuristic="dtr-eq", budget=int(0.8 * peak), limit=4.0)
    assert (curve[0.8]["status"], curve[0.8]["overhead"]) == (outcome.status, outcome.overhead)
    answer = settled(shared, "/api/memory/timeline?log=step.log&ratio=0.8").json()
    assert answer["total_evictions"] == outcome.evictions
    assert max(answer["memory"]) <= answer["budget"]
    assert "80% of its memory" in answer["sentence"]
    assert shared.get("/api/memory/timeline?log=../STORE.json").status_code == 409


def test_evaluations_carry_intervals(shared):
    (answer,) = shared.get("/api/evaluations").json()["evaluations"]
    assert answer["low"] <= answer["value"] <= answer["high"]
    assert answer["name"] == "lds-kernel"


def test_the_store_and_its_health(client, folder):
    view = client.get("/api/store").json()
    assert {one["kind"] for one in view["blocks"]} == {"capture", "scores", "evaluation"}
    assert view["ratio"] > 1
    assert settled(client, "/api/health", post={}).json()["healthy"]
    (segment,) = (folder / "blocks/main/epoch-04/train/main/seg").iterdir()
    data = bytearray(segment.read_bytes())
    data[-9] ^= 1
    segment.write_bytes(data)
    sick = settled(client, "/api/health", post={}).json()
    assert not sick["healthy"]
    assert "blocks/main/epoch-04/train/main" in sick["damage"][0]["path"]


def test_a_capture_that_is_being_written_is_shown_and_not_asked(client, folder):
    store = gk.open(folder)
    schema = gk.store.Schema((gk.store.Array("loss"),), num_rows=100, rows_per_segment=10)
    writer = store.write(gk.store.CaptureKey("now", "train", "live"), schema)
    writer.append(np.arange(30), {"loss": np.zeros(30, "f4")})
    until = time.monotonic() + 10
    while time.monotonic() < until:
        live = [one for one in client.get("/api/store").json()["blocks"] if one["run"] == "live"]
        if live and live[0]["rows"]:
            break
        time.sleep(0.1)
    assert (live[0]["state"], live[0]["wanted"]) == ("open", 100)
    assert 0 < live[0]["rows"] <= 30
    answer = client.get("/api/suspects?run=live")
    assert answer.status_code == 404
    assert "open" in answer.json()["problem"]["found"]


def test_a_store_that_is_none_or_damaged_is_told_in_place_and_tried_again(
    folder, tmp_path, make_client
):
    nothing = make_client(tmp_path / "nowhere")
    for url in ("/api/runs", "/api/store", "/api/why?query=1", "/api/suspects", "/api/evaluations"):
        answer = nothing.get(url)
        assert answer.status_code == 410, url
        assert "problem" in answer.json()
    sick = make_client(folder)
    identity = (folder / "STORE.json").read_bytes()
    (folder / "STORE.json").write_bytes(identity[:-9])
    assert sick.get("/api/runs").status_code == 409
    assert not settled(sick, "/api/health", post={}).json()["healthy"]
    (folder / "STORE.json").write_bytes(identity)
    assert sick.get("/api/runs").status_code == 200


def test_a_damaged_capture_is_told_where_it_is_asked(folder, make_client):
    for segment in folder.glob("blocks/main/epoch-12/train/main/seg/*"):
        segment.write_bytes(b"nothing")
    client = make_client(folder)
    answer = settled(client, "/api/why?query=7&source=method:kernel")
    assert answer.status_code in (200, 409)
    assert "problem" in answer.text
    assert settled(client, "/api/queries").status_code == 200


def test_a_query_that_does_not_exist_is_told(shared):
    answer = shared.get("/api/why?query=123456")
    assert answer.status_code == 404
    assert "has no row 123456" in answer.json()["problem"]["what"]


def test_scores_of_another_capture_are_told(folder, make_client):
    store = gk.open(folder)
    ids = np.arange(10**6, 10**6 + 30)
    gk.Scores(np.random.default_rng(0).random((TEST, 30), np.float32), np.arange(TEST), ids).save(
        "other", store=store
    )
    (answer,) = make_client(folder).get("/api/why?query=7&source=saved:other").json()["answers"]
    assert answer["foreign"] == len(answer["helped"])
    assert not any(one["row"]["known"] for one in answer["helped"])


def test_a_preview_that_raises_is_shown_in_its_place(master, make_client):
    def broken(row):
        raise LookupError(f"no picture of {row}")

    client = make_client(master, data=gk.Preview(image=broken))
    rows = client.get("/api/queries?count=2").json()["rows"]
    assert rows[0]["shown"]["problem"] == "LookupError: no picture of 0"


def test_previews_that_were_captured_are_shown_without_further_ado(tmp_path, make_client):
    model = torch.nn.Linear(4, 2)
    batch = (torch.randn(6, 4), torch.arange(6) % 2)
    preview = gk.Preview(
        image=torch.rand(6, 3, 3), text=[f"row {n}" for n in range(6)], table=batch[0]
    )
    task = gk.Classification()
    gk.capture(tmp_path, model, [batch], task=task, split="train", preview=preview, progress=False)
    gk.capture(
        tmp_path,
        model,
        [batch],
        task=task,
        split="test",
        columns={"note": ["é"] * 6},
        progress=False,
    )
    client = make_client(tmp_path)
    (shown,) = [one["shown"] for one in client.get("/api/rows?row=4").json()]
    assert shown["text"] == "row 4"
    assert shown["image"].startswith("data:image/png;base64,")
    assert len(shown["table"]) == 4
    assert client.get("/api/queries").json()["rows"][0]["shown"]["text"] == "é"


def test_tokens_carry_what_the_library_says(tmp_path, make_client):
    torch.manual_seed(0)
    model = GPT(vocabulary=20, length=8, dim=8, heads=2, layers=1).eval()
    rows = torch.randint(20, (6, 8))
    task = gk.LanguageModeling()
    for split, some in (("train", rows), ("test", rows[:2])):
        gk.capture(
            tmp_path,
            model,
            [{"input_ids": some}],
            task=task,
            split=split,
            keep="factors",
            progress=False,
        )
    words = gk.Preview(tokens=lambda row: [f"w{token}" for token in rows[row].tolist()])
    client = make_client(tmp_path, data=words)
    answer = settled(client, "/api/why/tokens?query=1&row=2&row=4").json()
    expected = gk.attribute_tokens(tmp_path, ids=[1], train_ids=[2, 4])
    assert answer["rows"][1]["values"] == pytest.approx(
        expected.of(1, 4).tolist(), rel=1e-4, abs=1e-9
    )
    assert answer["rows"][1]["tokens"] == [f"w{token}" for token in rows[4].tolist()]


def test_an_empty_store_has_empty_answers(tmp_path, make_client):
    gk.open(tmp_path / "new")
    client = make_client(tmp_path / "new")
    assert client.get("/api/runs").json() == {"runs": []}
    assert client.get("/api/memory").json()["logs"] == []
    assert client.get("/api/evaluations").json()["evaluations"] == []
