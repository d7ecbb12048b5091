"""Reading logs: what each instruction does, and what is wrong with bad ones."""

import json
import re

import pytest
from raises import raises

from gradkeep.errors import RematError
from gradkeep.remat import read_log, simulate, unlimited_peak
from gradkeep.remat.simulator._program import StepKind


def line(instruction, **values):
    return json.dumps({"INSTRUCTION": instruction, **values})


def constant(name, size):
    return [line("CONSTANT", NAME=name), line("MEMORY", NAME=name, MEMORY=str(size))]


def call(result, args, *, size=4, alias=-1, time=10, name="op"):
    return [
        line("CALL", NAME=name, RESULT=[result], ARGS=args, TIME=str(time)),
        line("MEMORY", NAME=result, MEMORY=str(size)),
        line("ALIAS", NAME=result, ALIAS=str(alias)),
    ]


def read(*parts, **options):
    lines = [text for part in parts for text in ([part] if isinstance(part, str) else part)]
    return read_log(lines, from_start=False, **options)


def steps(program):
    return [(step.kind.name, step.index) for step in program.steps]


def test_constants_calls_and_outputs():
    program = read(constant("w", 8), call("y", ["w"]))
    assert [op.name for op in program.ops] == ["constant", "op"]
    assert steps(program) == [("RUN", 0), ("PIN", 0), ("RUN", 1), ("PIN", 0), ("PIN", 1)]
    assert (program.compute, program.constant_bytes, program.bottleneck_bytes) == (10, 8, 12)


def test_an_alias_takes_no_bytes():
    program = read(constant("w", 8), call("y", ["w"]), call("v", ["w", "y"], size=4, alias=1))
    assert program.ops[2].sizes == (0,)
    assert unlimited_peak(program) == 12


def test_a_mutation_is_a_copy_under_the_same_name():
    program = read(
        constant("w", 8),
        call("y", ["w"]),
        call("v", ["y"], alias=0),
        line("MUTATE", NAME="add_", ARGS=["v", "w"], MUTATE=[0], TIME="5"),
        line("RELEASE", NAME="v"),
    )
    assert program.ops[3].sizes == (4,)
    assert program.tensors[3] == "v$"
    assert steps(program)[4:] == [
        *[("RUN", 3), ("RELEASE", 2), ("RELEASE", 3)],
        *[("PIN", 0), ("PIN", 1)],
    ]


def test_copies_are_references():
    program = read(
        constant("w", 8),
        call("y", ["w"]),
        line("COPY", DST="z", SRC="y"),
        line("RELEASE", NAME="y"),
        call("u", ["w"]),
        line("COPY_FROM", DST="u", SRC="z"),
    )
    assert ("GET", 1) in steps(program)
    assert steps(program)[-6:-4] == [("RELEASE", 2), ("GET", 1)]
    # All three names mean the same tensor now, and each is an output.
    assert steps(program)[-4:] == [("PIN", 0), ("PIN", 1), ("PIN", 1), ("PIN", 1)]


def test_everything_before_start_is_dropped_and_backward_is_marked():
    lines = [
        *constant("old", 99),
        line("ANNOTATE", ANNOTATION="START"),
        *constant("w", 8),
        *call("y", ["w"]),
        *call("g", ["y"], name="mul_backward"),
        *call("h", ["g"]),
    ]
    program = read_log(lines)
    assert program.constant_bytes == 8
    assert [op.backward for op in program.ops] == [False, False, True, True]


def test_outputs_can_be_set_aside_instead():
    parts = (constant("w", 8), call("y", ["w"]), call("v", ["y"], alias=0))
    program = read(*parts, outputs="preallocate")
    assert program.output_bytes == 12
    assert all(step.kind is not StepKind.PIN or step.index == 0 for step in program.steps)
    assert simulate(program, budget=23).status == "oom"
    assert simulate(program, budget=24).status == "ok"


def test_releases_of_unknown_names_are_counted():
    assert read(constant("w", 8), line("RELEASE", NAME="nobody")).ignored_releases == 1


@pytest.mark.parametrize(
    ("parts", "reason", "line"),
    [
        (["{broken"], "not_an_instruction", "line 1: .*malformed"),
        (["[]"], "not_an_instruction", "line 1: not an instruction"),
        ([line("EXPLODE", NAME="x")], "not_an_instruction", "line 1: .*EXPLODE"),
        ([line("CONSTANT")], "not_an_instruction", "line 1: .*NAME"),
        ([line("CONSTANT", NAME="w")], "unexpected", "line 1:"),
        (
            [line("CONSTANT", NAME="w"), line("MEMORY", NAME="v", MEMORY="1")],
            "unexpected",
            "line 2:",
        ),
        (
            [line("CONSTANT", NAME="w"), line("MEMORY", NAME="w", MEMORY="x")],
            "not_an_instruction",
            "line 2: .*MEMORY",
        ),
        (
            [line("CONSTANT", NAME="w"), line("MEMORY", NAME="w", MEMORY="-1")],
            "not_an_instruction",
            "line 2: .*MEMORY",
        ),
        ([line("MEMORY", NAME="w", MEMORY="1")], "orphan", "line 1:"),
        ([*constant("w", 1), *call("y", ["q"])], "undefined_tensor", "line 3:"),
        ([*constant("w", 1), *call("y", ["w"], alias=1)], "alias_position", "line 5:"),
        ([*constant("w", 1), *call("y", ["w"], time=-3)], "not_an_instruction", "line 3: .*TIME"),
        ([*constant("w", 1), *call("w", ["w"])], "result_exists", "line 5:"),
        ([*constant("w", 1), line("COPY", DST="w", SRC="w")], "copy_exists", "line 3:"),
        ([*constant("w", 1), *constant("w", 2)], "constant_exists", "line 3:"),
        ([*constant("w", 8), *call("y", ["w"], size=5, alias=0)], "alias_size", "line 5:"),
        (
            [*constant("w", 1), line("MUTATE", NAME="m", ARGS=["w"], MUTATE=[3], TIME="1")],
            "mutate_position",
            "line 3:",
        ),
        (
            [*constant("w", 1), *[line("RELEASE", NAME="w")] * 2],
            "release_unreferenced",
            "line 4:",
        ),
        (
            [line("CALL", NAME="f", RESULT="y", ARGS=[], TIME="1")],
            "not_an_instruction",
            "line 1: .*RESULT",
        ),
    ],
)
def test_bad_logs_are_refused_with_their_line(parts, reason, line):
    with raises(RematError, f"remat.log_{reason}") as caught:
        read(parts)
    assert re.match(line, caught.value.message)


def test_a_log_without_start_says_what_to_do():
    with raises(RematError, "remat.log_without_start", fix="from_start=False"):
        read_log(constant("w", 1))


def test_a_missing_or_binary_log(tmp_path):
    with raises(RematError, "remat.log_unreadable"):
        read_log(tmp_path / "none.log")
    (tmp_path / "binary.log").write_bytes(b"\xff\xfe\x00")
    with raises(RematError, "remat.log_unreadable"):
        read_log(tmp_path / "binary.log")
