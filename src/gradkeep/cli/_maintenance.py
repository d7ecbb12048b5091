"""`gradkeep info`, `sql`, `verify`, `gc`, `delete` and `import trak`."""

from __future__ import annotations

import sys
from pathlib import Path  # noqa: TC003 - typer reads it
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradkeep._display import format_size, progress
from gradkeep.cli._files import MAX_COUNT, input_folder
from gradkeep.cli._options import JsonOption, StoreArgument, print_json
from gradkeep.errors import StoreError

if TYPE_CHECKING:
    from rich.tree import Tree

    from gradkeep.store import BlockKey, Verdict
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


def verify(
    store: StoreArgument,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Move damaged files to the store's quarantine and remove unfinished writes.",
        ),
    ] = False,
    sample: Annotated[
        int | None,
        typer.Option(
            "--sample",
            min=1,
            max=MAX_COUNT,
            help="Read only so many files of rows, drawn anew each time; all documents are checked.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Read every file of a store and compare it with its checksums.

    Exits with 0 if the store is healthy, and with 1 after naming each damaged file and tensor.
    With --repair, running the work again afterwards recreates exactly what was moved aside.
    """
    import gradkeep.store as stores

    with progress("verify", "files") as report:
        verdict = stores.verify(store, repair=repair, sample=sample, progress=report)
    if json:
        print_json(_fields(verdict))
    else:
        _show(verdict)
    if not verdict.healthy:
        raise typer.Exit(1)


def _fields(verdict: Verdict) -> dict[str, Any]:
    return {
        "healthy": verdict.healthy,
        "files": verdict.files,
        "bytes": verdict.bytes,
        "segments": verdict.segments,
        "read": verdict.read,
        "damage": [
            {"path": item.path, "tensor": item.tensor, "what": item.what} for item in verdict.damage
        ],
        "orphans": list(verdict.orphans),
        "unknown": list(verdict.unknown),
        "repaired": list(verdict.repaired),
    }


def _show(verdict: Verdict) -> None:
    from gradkeep._display import format_size

    for item in verdict.damage:
        print(f"damaged  {item.path}  {item.what}")
    for path in verdict.orphans:
        print(f"unfinished  {path}  left by a writer that is gone")
    for path in verdict.unknown:
        print(f"unknown  {path}  not put there by gradkeep; left alone")
    for sentence in verdict.repaired:
        print(f"repair  {sentence}")
    read = f"{verdict.files} files, {format_size(verdict.bytes)}"
    if verdict.read < verdict.segments:
        read += f" (a sample: {verdict.read} of {verdict.segments} files of rows were read)"
    if verdict.healthy:
        print(f"healthy: {read}")
        return
    files = len({item.path for item in verdict.damage})
    print(f"{files} of {read} damaged")
    if not verdict.repaired:
        print("next: add --repair to move them aside, then run the work again", file=sys.stderr)


def gc(
    store: StoreArgument,
    keep_versions: Annotated[
        int,
        typer.Option(
            "--keep-versions", min=1, max=MAX_COUNT, help="How many versions of a block stay."
        ),
    ] = 1,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be removed.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Remove old versions, the segments only they needed, and unfinished writes.

    Safe at any moment, also while others read and write.
    """
    import gradkeep.store as stores

    swept = stores.gc(store, keep_versions=keep_versions, dry_run=dry_run)
    if json:
        fields = {"dry_run": dry_run, "files": list(swept.files), "bytes": swept.bytes}
        print_json(fields)
        return
    verb = "would remove" if dry_run else "removed"
    for file in swept.files:
        print(f"{verb}  {file}")
    print(f"{verb} {len(swept.files)} files, {format_size(swept.bytes)}")


def delete(
    store: StoreArgument,
    capture: Annotated[
        str,
        typer.Argument(
            metavar="CAPTURE",
            help="RUN/CHECKPOINT/SPLIT/CAPTURE as info shows it, scores/NAME or datamodels/NAME.",
        ),
    ],
    yes: Annotated[
        bool, typer.Option("--yes", help="Really delete; there is no way back.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Delete a capture, or saved scores, with all versions."""
    import gradkeep.store as stores

    opened = stores.open(store, create=False)
    parts = capture.strip("/").split("/")
    row_set = parts[1] if len(parts) == 2 and parts[0] == "datamodels" else None
    key = None if row_set is not None else _key(capture)
    folders = [f"datamodels/{row_set}"]
    if key is not None:
        folders = [one.folder for one in (key, *opened.owned(key))]
    found = [block for block in opened.info().blocks if block.address.folder in folders]
    if not found:
        raise StoreError(
            f"there is no {capture!r} in this store",
            path=opened.location,
            fix=f"`gradkeep info {opened.location}` shows what there is",
        )
    found.sort(key=lambda block: folders.index(block.address.folder))
    rows, size = found[0].rows, sum(block.bytes for block in found)
    if not yes:
        raise StoreError(
            "nothing was deleted",
            path=f"{opened.location}/{folders[0]}",
            found=f"{rows} rows, {format_size(size)}",
            fix="add --yes to delete this for ever",
        )
    if key is not None:
        opened.delete(key)
    else:
        opened.delete_rows(str(row_set))
    where = folders[0]
    if json:
        print_json({"deleted": where, "rows": rows, "bytes": size})
    else:
        print(f"deleted {where}: {rows} rows, {format_size(size)}")


def _key(name: str) -> BlockKey:
    from gradkeep.store import BasisKey, CaptureKey, EvaluationKey, ScoresKey

    parts = name.strip("/").split("/")
    if len(parts) == 2 and parts[0] == "scores":
        return ScoresKey(parts[1])
    if len(parts) == 2 and parts[0] == "evaluations":
        return EvaluationKey(parts[1])
    if len(parts) == 4 and parts[0] == "bases":
        return BasisKey(parts[2], run=parts[1], capture=parts[3])
    if len(parts) == 4:
        run, checkpoint, split, capture = parts
        return CaptureKey(checkpoint, split, run=run, capture=capture)
    raise StoreError(
        "this names no capture",
        found=name,
        expected="RUN/CHECKPOINT/SPLIT/CAPTURE, for example main/final/train/main, scores/NAME, "
        "evaluations/NAME, datamodels/NAME, or bases/RUN/CHECKPOINT/CAPTURE",
    )


def trak(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The save_dir of the released TRAK package.")
    ],
    store: Annotated[
        str | None,
        typer.Option("--store", help="Folder or URL; by default beside DIR, as DIR-gradkeep."),
    ] = None,
    run: Annotated[str, typer.Option(help="The name that the run gets.")] = "trak",
    json: JsonOption = False,
) -> None:
    """Bring projected gradients, weights and scores of TRAK into a store; DIR is left as it is."""
    from gradkeep.compat.trak import import_save_dir

    whole = input_folder(folder, error=StoreError).resolve()
    target = store or str(whole.with_name(f"{whole.name}-gradkeep"))
    found = import_save_dir(folder, target, run=run)
    if json:
        print_json(
            {
                "store": target,
                "checkpoints": found.checkpoints,
                "scores": found.scores,
                "skipped": found.skipped,
            }
        )
        return
    for name in found.checkpoints:
        print(f"imported   projected gradients of {name}")
    for name in found.scores:
        print(f"imported   scores {name}: gk.Scores.load(store, {name!r})")
    for reason in found.skipped:
        print(f"skipped    {reason}")
    print(f"next       gradkeep info {target}")
