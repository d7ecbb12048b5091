"""All methods of a store on one board, and the commands that show it."""

from raises import raises

import gradkeep as gk
from gradkeep import evaluate
from gradkeep.errors import EvaluationError
from gradkeep.evaluate._truth import GroundTruth


def test_every_method_stands_on_the_board_with_its_price(world):
    seen = []
    judgement = evaluate.judge_methods(world, report=seen.append)
    names = {one.name for one in (*judgement.methods, *judgement.refused)}
    assert names >= {one.name for one in gk.methods() if one.about_queries}
    values = [one.evaluation.value for one in judgement.methods]
    assert values == sorted(values, reverse=True)
    assert len(seen) == len(names)
    by_name = {one.name: one for one in judgement.methods}
    kernel = by_name["kernel"]
    assert (
        kernel.evaluation.value
        == evaluate.lds(gk.attribute(world, method="kernel"), judgement.truth).value
    )
    assert not by_name["random"].evaluation.from_zero
    assert kernel.bytes_per_row > 0
    assert by_name["random"].bytes_per_row is None
    assert any(name.startswith("hybrid of") for name in names)
    table = str(judgement)
    assert all(one.name in table for one in judgement.methods)
    assert "reporting half" in table
    assert judgement.against_best("random").value > 0


def test_scores_from_elsewhere_join_the_board(world):
    truth = evaluate.load_truth(world)
    mine = gk.attribute(world, method="dot")
    judgement = evaluate.judge_methods(
        world, truth, methods=["kernel"], extra_scores={"mine": mine}, hybrid_of_best=False
    )
    assert {one.name for one in judgement.methods} == {"kernel", "mine"}
    with raises(EvaluationError, "evaluate.no_methods"):
        evaluate.judge_methods(world, truth, methods=["nonsense"])


def test_methods_are_judged_where_subsets_are_too_few_for_a_hybrid(world):
    whole = evaluate.load_truth(world)
    few = GroundTruth("few", whole.masks[:10], whole.outputs[:10])
    judgement = evaluate.judge_methods(world, few, methods=["kernel"])
    assert [one.name for one in judgement.methods] == ["kernel"]
    assert [one.name for one in judgement.refused] == ["hybrid of kernel"]
    assert "too few subsets" in str(judgement)
