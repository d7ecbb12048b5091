"""Compare bergson and gradkeep on one transformers model, in an environment that has both.

`python -m bench._lm_bergson ROWS ROUNDS`, started by `_lm_bergson_env`. The first part measures the
price on a GPT-2 of 4 x 256: bytes per row, CPU time of capturing against plain passes, and of
scoring 50 queries. The second part measures LDS: the GPT of `_lm_truth` with its weights copied
into a GPT-2 of transformers, bergson with the defaults of its trackstar command, gradkeep in a
quarter of its bytes.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bergson.build import build
from bergson.cli.trackstar import trackstar
from bergson.collection import collect_gradients
from bergson.config.config import (
    DataConfig,
    HessianConfig,
    HessianPipelineConfig,
    IndexConfig,
    PreprocessConfig,
    QuerySetConfig,
    ScoreConfig,
    TrackstarConfig,
    TrackstarIndexConfig,
)
from bergson.data import allocate_batches, column_offsets, load_gradients, load_scores
from bergson.gradients import GradientProcessor
from bergson.hessians.pipeline import hessian_pipeline
from bergson.query.attributor import Attributor
from bergson.utils import weighted_causal_lm_ce
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import gradkeep as gk
from bench import _lm_price, _lm_truth
from gradkeep.data import GPT

PROJECTION_SIDE = 16
"""bergson's default projection size."""
QUERIES = 50
KEEP = "4KiB"
LDS_MARGIN = 0.25
"""How much higher the LDS of gradkeep must be."""
PRICE = 1.3


def compare_prices(rows: int, rounds: int) -> bool:
    """Time both captures between plain passes of the same model, then both scorings."""
    torch.manual_seed(0)
    size = _lm_price.VOCABULARY, _lm_price.LENGTH
    net = GPT2LMHeadModel(_config(*size, 256, 4, 4)).eval()
    tokens = _lm_price.draw_tokens(rows + QUERIES)
    train, queries = tokens[:rows], tokens[rows:]
    batches = list(train.split(_lm_price.BATCH))
    passes = batches if len(batches) <= 16 else batches[: len(batches) // 4]
    share = len(torch.cat(passes)) / rows
    print(f"\nGPT-2 4x256 of transformers, tied; {rows} rows of {_lm_price.LENGTH} tokens")
    run_plain_passes(net, passes[:1])
    ratios: dict[str, list[float]] = {"bergson": [], "ours": []}
    plains: list[float] = []
    with tempfile.TemporaryDirectory(prefix="gradkeep-lm-") as place:
        for turn in range(rounds):
            before = _lm_price.cpu_seconds(lambda: run_plain_passes(net, passes))
            index = Path(place) / f"bergson-{turn}"
            theirs = _lm_price.cpu_seconds(lambda at=index: build_index(net, train, at))
            net.requires_grad_(requires_grad=True).zero_grad(set_to_none=True)
            middle = _lm_price.cpu_seconds(lambda: run_plain_passes(net, passes))
            net.zero_grad(set_to_none=True)
            store = gk.open(Path(place) / f"ours-{turn}")
            began = time.process_time()
            report = capture(store, net, batches, KEEP)
            ours = time.process_time() - began
            after = _lm_price.cpu_seconds(lambda: run_plain_passes(net, passes))
            plains += [before, middle, after]
            ratios["bergson"].append(theirs * share / ((before + middle) / 2))
            ratios["ours"].append(ours * share / ((middle + after) / 2))
        taken = {"bergson": _bytes_per_row(index, rows), "ours": report.bytes / report.rows}
        build_index(net, queries, Path(place) / "asked")
        net.requires_grad_(requires_grad=True)
        capture(store, net, [queries], "queries", split="test")
        scoring = {
            "bergson": min(
                _lm_price.cpu_seconds(lambda: search_by_cosine(index, place)) for _ in range(3)
            ),
            "ours": min(_lm_price.cpu_seconds(lambda: gk.attribute(store)) for _ in range(3)),
        }
    for name, rounds_of_side in ratios.items():
        print(
            f"  {name:8} {taken[name]:>8,.0f} bytes per row, captured at {statistics.median(rounds_of_side):.2f} x "
            f"a plain pass, {QUERIES} queries scored in {scoring[name]:.2f} CPU s"
        )
    spent = (
        _lm_price.measure_basis_seconds(net, batches[:8], KEEP) * share / statistics.median(plains)
    )
    many = statistics.median(ratios["ours"]) - spent + spent * min(1.0, rows / _lm_price.ROWS)
    is_missed = many > PRICE
    print(
        f"  ours: {spent:.2f} of it for the basis, {many:.2f} for {_lm_price.ROWS} rows "
        f"{'MISSES' if is_missed else 'reaches'} {PRICE}",
        flush=True,
    )
    return is_missed


def search_by_cosine(index: Path, place: str) -> torch.Tensor:
    """Score stored query gradients with the defaults of bergson's query command."""
    attributor = Attributor(index, unit_norm=True)
    return attributor.search(_gradients(Path(place) / "asked"), None)[0]


def run_plain_passes(net: nn.Module, batches: list[torch.Tensor]) -> None:
    for batch in batches:
        net.zero_grad(set_to_none=True)
        logits = net(input_ids=batch, use_cache=False).logits
        targets = nn.functional.pad(batch[:, 1:], (0, 1), value=-100)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss.backward()


def build_index(net: GPT2LMHeadModel, tokens: torch.Tensor, at: Path) -> None:
    """Write bergson's index of projected gradients to `at`; changes `requires_grad` of the
    model."""
    config = IndexConfig(run_path=str(at), projection_dim=PROJECTION_SIDE)
    net.requires_grad_(requires_grad=False)
    net.get_input_embeddings().requires_grad_(True)
    net.loss_function = lambda logits, labels, **more: weighted_causal_lm_ce(
        logits, labels, reduction=config.loss_reduction, **more
    )
    rows = _dataset(tokens)
    config.partial_run_path.mkdir(parents=True)
    collect_gradients(
        net,
        rows,
        GradientProcessor(projection_dim=PROJECTION_SIDE),
        config,
        batches=allocate_batches(rows["length"][:], config.token_batch_size),
    )
    config.partial_run_path.rename(at)


def capture(
    store: gk.Store,
    net: nn.Module,
    batches: list[torch.Tensor],
    keep: int | str,
    *,
    split: str = "train",
) -> gk.Captured:
    rows = [{"input_ids": batch} for batch in batches]
    task = gk.LanguageModeling()
    return gk.capture(store, net, rows, task=task, keep=keep, split=split, progress=False)


def compare_lds() -> bool:
    """Compare the LDS of both from the same weights at the same epoch."""
    truth = _lm_truth.compute_truth(_lm_truth.build_gpt())
    setting, missed = truth.setting, False
    print(f"\n{setting.name}, in transformers; ceiling {truth.ceiling:.3f}")
    for epoch in (2, setting.epochs):
        net = convert_to_transformers(truth.model(epoch))
        with torch.no_grad():
            difference = net(setting.queries).logits - truth.model(epoch)(setting.queries)
        print(f"  epoch {epoch}: logits differ by {float(difference.abs().max()):.1e} at most")
        assert float(difference.abs().max()) < 1e-4
        scores, taken = score_with_bergson(net, setting.train, setting.queries)
        their_scores = [_lm_truth.compute_lds(values, truth) for values in scores.values()]
        default, best = their_scores[0], max(their_scores, key=lambda score: score.mean)
        for name, score in zip(scores, their_scores, strict=True):
            print(f"    {name:44} {taken:>7,.0f} bytes per row  {score}", flush=True)
        streamed = _lm_truth.compute_lds(
            score_with_streamed_ekfac(net, setting.train, setting.queries), truth
        )
        print(
            f"    {'bergson, EK-FAC, rows reread per query':44} {0:>7,} bytes per row  {streamed}"
        )
        for keep in (int(taken) // 4, KEEP):
            score, size = score_with_gradkeep(net, truth, keep)
            more = score.minus(default)
            line = f"    {f'ours, keep={keep!r}':44} {size:>7,.0f} bytes per row  {score}"
            line += f"; above its default: {more}, above its best: {score.minus(best)}"
            if keep != KEEP:
                few = more.mean < LDS_MARGIN or size > taken / 4
                missed |= few
                line += f"  {'MISSES' if few else 'reaches'} {LDS_MARGIN} in a quarter of its bytes"
            print(line, flush=True)
    return missed


def convert_to_transformers(model: nn.Module) -> GPT2LMHeadModel:
    """Copy the model into GPT-2 of transformers: one transposed layer for queries, keys and
    values."""
    assert isinstance(model, GPT)
    length, dim = model.wpe.weight.shape
    heads = model.h[0].attn.heads
    net = GPT2LMHeadModel(_config(len(model.wte.weight), length, dim, len(model.h), heads)).eval()
    with torch.no_grad():
        net.transformer.wte.weight.copy_(model.wte.weight)
        net.transformer.wpe.weight.copy_(model.wpe.weight)
        net.transformer.ln_f.load_state_dict(model.ln_f.state_dict())
        for into, block in zip(net.transformer.h, model.h, strict=True):
            attention = block.attn
            parts = (attention.query, attention.key, attention.value)
            into.attn.c_attn.weight.copy_(torch.cat([one.weight for one in parts]).T)
            into.attn.c_attn.bias.copy_(torch.cat([one.bias for one in parts]))
            for layer, source in (
                (into.attn.c_proj, attention.out),
                (into.mlp.c_fc, block.mlp.fc),
                (into.mlp.c_proj, block.mlp.out),
            ):
                layer.weight.copy_(source.weight.T)
                layer.bias.copy_(source.bias)
            into.ln_1.load_state_dict(block.ln_1.state_dict())
            into.ln_2.load_state_dict(block.ln_2.state_dict())
    return net


def score_with_bergson(
    net: GPT2LMHeadModel, train: torch.Tensor, queries: torch.Tensor
) -> tuple[dict[str, np.ndarray], float]:
    """Return scores `[Q, N]` by name, the default first, and the bytes per row of the index."""
    with tempfile.TemporaryDirectory(prefix="gradkeep-lm-") as place:
        folder = Path(place)
        common, query_config = _write_inputs(folder, net, train, queries)
        scores_by_name = {}
        for name, unit in (("default (trackstar)", False), ("unit norm (TrackStar's paper)", True)):
            config = TrackstarIndexConfig(run_path=str(folder / f"unit-{unit}"), **common)
            steps = TrackstarConfig(query=query_config)
            steps.preprocess_cfg.unit_normalize = unit
            with _silence_output():
                trackstar(config, steps)
            scores = load_scores(folder / f"unit-{unit}" / "scores")
            scores_by_name[f"bergson, {name}"] = np.asarray(scores[:], np.float64).T
        index = IndexConfig(
            run_path=str(folder / "index"), projection_dim=PROJECTION_SIDE, **common
        )
        with _silence_output():
            build(index, PreprocessConfig())
            by_value, places = Attributor(folder / "index", unit_norm=True).search(
                _gradients(folder / "unit-False" / "query"), None
            )
        cosine = np.empty(by_value.shape)
        np.put_along_axis(cosine, places.numpy(), by_value.numpy(), 1)
        scores_by_name["bergson, cosine (query)"] = cosine
        return scores_by_name, _bytes_per_row(folder / "index", len(train))


def score_with_streamed_ekfac(
    net: GPT2LMHeadModel, train: torch.Tensor, queries: torch.Tensor
) -> np.ndarray:
    """Return bergson's scores `[Q, N]` from whole gradients, which it does not store."""
    with tempfile.TemporaryDirectory(prefix="gradkeep-lm-") as place:
        folder = Path(place)
        common, query_config = _write_inputs(folder, net, train, queries)
        with _silence_output():
            hessian_pipeline(
                IndexConfig(run_path=str(folder / "run"), **common),
                HessianConfig(method="kfac", ev_correction=True),
                ScoreConfig(),
                PreprocessConfig(),
                HessianPipelineConfig(query=query_config),
            )
        return np.asarray(load_scores(folder / "run" / "scores")[:], np.float64).T


def _write_inputs(
    folder: Path, net: GPT2LMHeadModel, train: torch.Tensor, queries: torch.Tensor
) -> tuple[dict[str, Any], QuerySetConfig]:
    """Write the model and both sets of rows to files that bergson's pipelines read."""
    net.save_pretrained(folder / "model")
    vocabulary = {f"t{number}": number for number in range(net.config.vocab_size)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder / "model")
    for name, tokens in (("train", train), ("queries", queries)):
        _dataset(tokens).save_to_disk(str(folder / name))
    common = {
        "model": str(folder / "model"),
        # bergson refuses batches with more tokens than the model has positions.
        "token_batch_size": net.config.n_positions,
        "data": DataConfig(dataset=str(folder / "train")),
    }
    return common, QuerySetConfig(dataset=str(folder / "queries"))


def score_with_gradkeep(
    net: GPT2LMHeadModel, truth: _lm_truth.Truth, keep: int | str
) -> tuple[_lm_truth.Lds, float]:
    with tempfile.TemporaryDirectory(prefix="gradkeep-lm-") as place:
        store = gk.open(place, durability="process")
        report = capture(store, net, list(truth.setting.train.split(25)), keep)
        capture(store, net, [truth.setting.queries], "queries", split="test")
        score = _lm_truth.compute_lds(gk.attribute(store).values, truth)
        return score, report.bytes / report.rows


def _config(vocabulary: int, length: int, dim: int, layers: int, heads: int) -> GPT2Config:
    return GPT2Config(
        vocab_size=vocabulary,
        n_positions=length,
        n_embd=dim,
        n_layer=layers,
        n_head=heads,
        activation_function="gelu",
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        bos_token_id=0,
        eos_token_id=0,
    )


def _dataset(tokens: torch.Tensor) -> Dataset:
    return Dataset.from_dict(
        {"input_ids": tokens.tolist(), "length": [tokens.shape[1]] * len(tokens)}
    )


def _gradients(at: Path) -> dict[str, torch.Tensor]:
    sizes = json.loads((at / "info.json").read_text())["grad_sizes"]
    rows = load_gradients(at)
    return {
        name: torch.from_numpy(np.array(rows[:, start:stop]))
        for name, (start, stop) in column_offsets(sizes).items()
    }


def _bytes_per_row(index: Path, rows: int) -> float:
    """Return the size of all files of an index, divided by its rows."""
    return sum(file.stat().st_size for file in index.rglob("*") if file.is_file()) / rows


@contextlib.contextmanager
def _silence_output():
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def main(rows: str, rounds: str) -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    return int(any([compare_lds(), compare_prices(int(rows), int(rounds))]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
