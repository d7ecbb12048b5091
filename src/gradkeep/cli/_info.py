"""`gradkeep info` and `gradkeep sql`: what a store holds."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from gradkeep.cli._output import JsonOption, StoreArgument, print_json

if TYPE_CHECKING:
    from rich.tree import Tree

    from gradkeep.store.catalog._info import RowSetInfo, StoreInfo
    from gradkeep.store.catalog._scan import BlockFacts, LayerFacts
    from gradkeep.store.catalog._sql import SqlResult


def info(store: StoreArgument, json: JsonOption = False) -> None:
    """Show what a store holds: runs, checkpoints, captures, layers, rows, bytes, ratio to dense.

    Sizes are those of the newest version; dense is what float32 gradients of the same layers and
    rows would take.
    """
    import gradkeep.store as stores

    found = stores.open(store, create=False).info()
    if json:
        print_json(found.to_fields())
        return
    from rich.console import Console

    # Off a terminal nothing is wrapped or cut: a line stays a line for grep.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 10_000)
    console.print(_tree(found), soft_wrap=True)


def _tree(found: StoreInfo) -> Tree:
    from rich.markup import escape
    from rich.tree import Tree

    tree = Tree(escape(_title(found)), guide_style="dim")
    for run in found.runs:
        problem = None if run.record is None else run.record.problem
        branch = tree.add(escape(f"run {run.name}") + _problem(problem))
        for checkpoint in run.checkpoints:
            record = checkpoint.record
            step = "" if record is None or record.step is None else f"  step {record.step}"
            text = escape(f"checkpoint {checkpoint.name}{step}")
            twig = branch.add(text + _problem(None if record is None else record.problem))
            for capture in checkpoint.captures:
                address = capture.address
                _add_block(twig, f"{address.split}/{address.name}", capture)
    for block in found.scores:
        _add_block(tree, f"scores {block.address.name}", block)
    for row_set in found.row_sets:
        _add_block(tree, f"rows {row_set.facts.address.name}", row_set.facts, _counts(row_set))
    return tree


def _title(found: StoreInfo) -> str:
    from gradkeep._display import format_ratio, format_size

    if found.ratio is None:
        return found.title
    dense = f"{format_size(found.dense_bytes)} dense"
    return f"{found.title} ({dense}, {format_ratio(found.ratio)} smaller)"


def _add_block(tree: Tree, name: str, block: BlockFacts, counts: str | None = None) -> None:
    from rich.markup import escape

    from gradkeep._display import describe_rows, describe_state, format_ratio, format_size

    parts = [
        name,
        f"{describe_rows(block)} rows" if counts is None else counts,
        format_size(block.data_bytes),
    ]
    if block.ratio is not None:
        parts.append(f"{format_ratio(block.ratio)} smaller than {format_size(block.dense_bytes)}")
    parts.append(describe_state(block))
    branch = tree.add(escape("  ".join(parts)) + _problem(block.problem))
    for layer in block.layers:
        branch.add(escape(_layer(layer)))


def _layer(layer: LayerFacts) -> str:
    from gradkeep._display import format_ratio, format_size

    ratio = layer.dense_row_bytes / layer.row_bytes if layer.row_bytes else None
    sizes = f"{format_size(layer.row_bytes)} of {format_size(layer.dense_row_bytes)} per row"
    return (
        f"{layer.name}  {layer.type}  {layer.parameters} parameters  {sizes}  {format_ratio(ratio)}"
    )


def _counts(row_set: RowSetInfo) -> str:
    states = ("done", "leased", "failed", "pending")
    return ", ".join(f"{getattr(row_set, state)} {state}" for state in states)


def _problem(problem: str | None) -> str:
    from rich.markup import escape

    return "" if problem is None else f"  [red]{escape(problem)}[/red]"


def sql(
    store: StoreArgument,
    query: Annotated[str, typer.Argument(metavar="QUERY", help="One reading SQL statement.")],
    json: JsonOption = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV; NULL is an empty cell.")] = False,
) -> None:
    """Ask a store in SQL, offline and reading only.

    Tables: samples (a row per sample: run, checkpoint, split, capture, id, all scalars), captures,
    scores, runs, checkpoints. "DESCRIBE samples" lists columns.
    """
    import gradkeep.store as stores

    if json and csv:
        raise typer.BadParameter("--json and --csv exclude each other")
    result = stores.open(store, create=False).sql(query)
    if json:
        print_json({"columns": result.columns, "rows": result.rows()})
    elif csv:
        _print_csv(result)
    else:
        print(result.text())


def _print_csv(result: SqlResult) -> None:
    import csv

    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(result.columns)
    writer.writerows(result.rows())
