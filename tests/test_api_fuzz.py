"""Public functions with bad arguments: a sample; `./x bench fuzz_api` tries all of them."""

import importlib
import inspect

import api_fuzz as fuzz
import api_fuzz_calls
import pytest

ROOMS = ("query", "datamodels", "data", "evaluate", "farm")
NAMED = ("Keep", "completions", "capture", "attribute_once", "attribute_tokens", "text_similarity")
"""Of gradkeep itself: what people call first."""
ELSEWHERE = {
    # Without arguments, or about what only other functions make.
    *("models", "work"),
    # Their own tests refuse what they cannot take.
    *("suspects", "suggest_labels"),
}


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    return api_fuzz_calls.calls(api_fuzz_calls.World(tmp_path_factory.mktemp("world")))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(fuzz.deep_folder(tmp_path))


def test_every_public_function_of_these_rooms_is_tried(known):
    tried = {getattr(inspect.unwrap(call.function), "__name__", "") for call in known}
    tried |= {call.name.rpartition(".")[2] for call in known}
    missing = []
    for room in ROOMS:
        module = importlib.import_module(f"gradkeep.{room}")
        names = [n for n in module.__all__ if inspect.isfunction(getattr(module, n))]
        missing += [f"{room}.{name}" for name in names if name not in tried | ELSEWHERE]
    assert not missing
    assert tried >= {name for name in fuzz.gk.__all__ if name in NAMED} == {*NAMED}


@pytest.mark.filterwarnings(
    "ignore::gradkeep.errors.EvidenceWarning"
)  # toys hardly support anything
def test_good_arguments_are_taken(known):
    for call in known:
        if call.name not in fuzz.REFUSED_AS_THEY_ARE:
            call.function(**call.good())


def test_one_bad_argument_is_an_error_of_gradkeep(known):
    result = fuzz.try_all(fuzz.tries(known, 1500, seed=3))
    assert not result.bad, "\n".join(result.bad)
    assert result.counts["refused"] > 1000


def test_the_judge_sees_what_is_foreign_and_what_is_wrong():
    def foreign(k: "int"):
        return [1, 2, 3][k]

    def careless(k: "int"):
        return k

    def ours(k: "int"):
        return fuzz.gk.query.top(k, k, k)

    judged = {
        "ugly": fuzz.Call("foreign", foreign, lambda: {"k": 1}),
        "wrong": fuzz.Call("careless", careless, lambda: {"k": 1}),
        "refused": fuzz.Call("ours", ours, lambda: {"k": 1}),
    }
    for verdict, call in judged.items():
        assert fuzz.try_call(call, "k", "a word")[0] == verdict


@pytest.mark.parametrize(
    ("name", "argument", "kind"),
    [
        ("datamodels.fit", "tolerance", "nan"),
        ("farm.run", "workers", "minus one"),
        ("query.top", "k", "two and a half"),
        ("Gradients.rows", "positions", "floats"),
        ("attribute", "ids", "floats"),
        ("Training", "lr", "nan"),
        ("Scores.top", "k", "minus one"),
        ("datamodels.correlation", "level", "two and a half"),
    ],
)
def test_what_was_taken_once_is_refused(known, name, argument, kind):
    (call,) = (call for call in known if call.name == name)
    assert fuzz.try_call(call, argument, kind) == ("refused", "")
