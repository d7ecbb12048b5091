"""Malformed command lines of every command: a sample; `./x bench fuzz_cli` tries thousands."""

import command_fuzz as fuzz
import pytest


@pytest.fixture(scope="module")
def box(tmp_path_factory):
    fuzz.preload()
    return fuzz.Sandbox(tmp_path_factory.mktemp("fuzz") / "box")


def test_every_command_has_parameters_that_can_be_drawn():
    known = fuzz.commands()
    assert len(known) > 25
    assert all(
        part.kind in (bool, int, float, str, fuzz.Path) for c in known.values() for part in c
    )


def test_malformed_lines_are_refused_in_a_sentence(box):
    result = fuzz.try_lines(fuzz.lines(2 * len(fuzz.commands()), seed=7), box)
    assert not result.bad, "\n".join(result.bad)
    assert result.counts["refused"] > result.counts["ok"] > 0


@pytest.mark.parametrize(
    "place", ["binary.bin", "pipe", "folder", "latin.txt", "deep.yaml", "circle"]
)
@pytest.mark.parametrize(
    "line",
    [
        ("info", "{}"),
        ("capture", "{}"),
        ("remat", "simulate", "{}", "--ratio", "0.5"),
        ("remat", "record", "{}"),
        ("remat", "experiments", "{}"),
        ("datamodels", "init", "new", "--spec", "{}"),
    ],
    ids=lambda line: "-".join(line[:2]),
)
def test_files_that_are_something_else_are_named(box, line, place):
    ended = fuzz.run_forked([word.format(place) for word in line], box, fuzz.SECOND_PATIENCE)
    box.settle()
    assert ended.code == 2, ended
    assert place in ended.err
    assert "Traceback" not in ended.err


def test_the_judge_sees_what_is_ugly_wrong_and_hung():
    line = fuzz.Line(("info", "store"), never="count='nan'")
    judged = {
        "hung": fuzz.Ended(None, "", "", 9.0),
        "ugly": fuzz.Ended(70, "", "gradkeep: an error of gradkeep itself", 0.1),
        "wrong": fuzz.Ended(0, "fine", "", 0.1),
        "refused": fuzz.Ended(2, "", "gradkeep: no", 0.1),
    }
    for verdict, ended in judged.items():
        assert fuzz.judge(line, ended, None)[0] == verdict
    shown = fuzz.Ended(2, "", "Traceback (most recent call last):", 0.1)
    assert fuzz.judge(line, shown, None)[0] == "ugly"
    assert fuzz.judge(line, judged["refused"], "changed ['victim']")[0] == "wrong"
