"""`gradkeep info`, `sql`, `verify`, `gc`, `delete` and `import trak`."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path  # noqa: TC003 - typer reads it
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradkeep._display import format_ratio, format_size, pick_fields, progress
from gradkeep.cli._inputs import input_folder
from gradkeep.cli._options import JsonOption, Positive, StoreArgument, print_json
from gradkeep.errors import StoreError

if TYPE_CHECKING:
    from rich.tree import Tree

    from gradkeep.store import BlockKey, Verdict
    from gradkeep.store.catalog._info import StoreInfo
    from gradkeep.store.catalog._scan import BlockFacts


def info(store: StoreArgument, json: JsonOption = False) -> None:
    """Show the contents of a store: runs, checkpoints, captures, layers, rows and sizes.

    Sizes are those of the newest version; "dense" is the size of float32 gradients of the same layers
    and rows.
    """
    import gradkeep.store as stores

    contents = stores.open(store, create=False).info()
    if json:
        print_json(contents.to_fields())
        return
    from rich.console import Console

    # Not on a terminal: no wrapping, so that grep sees whole lines.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 10_000)
    console.print(_tree(contents), soft_wrap=True)


def _tree(info: StoreInfo) -> Tree:
    from rich.markup import escape
    from rich.tree import Tree

    title = info.title
    if info.ratio is not None:
        title += f" ({format_size(info.dense_bytes)} dense, {format_ratio(info.ratio)} smaller)"
    tree = Tree(escape(title), guide_style="dim")
    for run in info.runs:
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
    for block in info.scores:
        _add_block(tree, f"scores {block.address.name}", block)
    for row_set in info.row_sets:
        states = ("done", "leased", "failed", "pending")
        counts = ", ".join(f"{getattr(row_set, state)} {state}" for state in states)
        _add_block(tree, f"rows {row_set.facts.address.name}", row_set.facts, counts)
    return tree


def _add_block(tree: Tree, name: str, block: BlockFacts, counts: str | None = None) -> None:
    from rich.markup import escape

    parts = [
        name,
        f"{block.rows_text} rows" if counts is None else counts,
        format_size(block.data_bytes),
    ]
    if block.ratio is not None:
        parts.append(f"{format_ratio(block.ratio)} smaller than {format_size(block.dense_bytes)}")
    parts.append(block.state_text)
    branch = tree.add(escape("  ".join(parts)) + _problem(block.problem))
    groups: dict[str, list[Any]] = {}
    for layer in block.layers:
        groups.setdefault(layer.type if len(block.layers) > 6 else layer.name, []).append(layer)
    for label, layers in groups.items():
        stored = sum(layer.row_bytes for layer in layers)
        dense = sum(layer.dense_row_bytes for layer in layers)
        ratio = format_ratio(dense / stored if stored else None)
        kind = f"{len(layers)} layers" if len(block.layers) > 6 else layers[0].type
        count = sum(layer.parameters for layer in layers)
        sizes = f"{format_size(stored)} of {format_size(dense)} per row"
        branch.add(escape(f"{label}  {kind}  {count} parameters  {sizes}  {ratio}"))


def _problem(problem: str | None) -> str:
    from rich.markup import escape

    return "" if problem is None else f"  [red]{escape(problem)}[/red]"


def sql(
    store: StoreArgument,
    query: Annotated[str, typer.Argument(metavar="QUERY")],
    json: JsonOption = False,
    csv: bool = False,
) -> None:
    """Query a store in SQL, offline and read-only.

    Tables: samples (a row per sample: run, checkpoint, split, capture, id, all scalars), captures,
    scores, runs, checkpoints. "DESCRIBE samples" lists columns.

    Options:
        query: One SELECT or DESCRIBE statement.
        csv: Print CSV; NULL is an empty cell.
    """
    import gradkeep.store as stores

    if json and csv:
        raise typer.BadParameter("--json and --csv exclude each other")
    result = stores.open(store, create=False).sql(query)
    if json:
        print_json({"columns": result.columns, "rows": result.rows()})
    elif csv:
        from csv import writer

        table = writer(sys.stdout, lineterminator="\n")
        table.writerow(result.columns)
        table.writerows(result.rows())
    else:
        print(result.text())


def verify(
    store: StoreArgument,
    repair: bool = False,
    sample: Positive | None = None,
    json: JsonOption = False,
) -> None:
    """Verify the checksums of every file of a store.

    Exit code 0 if the store is healthy, 1 if there is damage; damaged files and tensors are listed.
    After --repair, run the capture again to recreate what was moved to quarantine.

    Options:
        repair: Move damaged files to quarantine and remove unfinished writes.
        sample: Verify a random sample of this many segments; all documents are verified.
    """
    import gradkeep.store as stores

    with progress("verify", "files") as report:
        verdict = stores.verify(store, repair=repair, sample=sample, progress=report)
    if json:
        print_json({"healthy": verdict.healthy, **dataclasses.asdict(verdict)})
    else:
        _show(verdict)
    if not verdict.healthy:
        raise typer.Exit(1)


def _show(verdict: Verdict) -> None:
    for item in verdict.damage:
        print(f"damaged  {item.path}  {item.what}")
    for path in verdict.orphans:
        print(f"unfinished  {path}  left by an interrupted writer")
    for path in verdict.unknown:
        print(f"unknown  {path}  not a file of gradkeep; not touched")
    for sentence in verdict.repaired:
        print(f"repair  {sentence}")
    read = f"{verdict.files} files, {format_size(verdict.bytes)}"
    if verdict.read < verdict.segments:
        read += f" (a sample: {verdict.read} of {verdict.segments} segments)"
    if verdict.healthy:
        print(f"healthy: {read}")
        return
    files = len({item.path for item in verdict.damage})
    print(f"{files} of {read} damaged")
    if not verdict.repaired:
        print("next: --repair moves them to quarantine; then capture again", file=sys.stderr)


def gc(
    store: StoreArgument,
    keep_versions: Positive = 1,
    dry_run: bool = False,
    json: JsonOption = False,
) -> None:
    """Remove old versions, segments that only they refer to, and unfinished writes.

    Safe at any time, also while others read and write.

    Options:
        keep_versions: Versions of a block to keep.
        dry_run: Only list what would be removed.
    """
    import gradkeep.store as stores

    swept = stores.gc(store, keep_versions=keep_versions, dry_run=dry_run)
    if json:
        print_json({"dry_run": dry_run, "files": swept.files, "bytes": swept.bytes})
        return
    verb = "would remove" if dry_run else "removed"
    for file in swept.files:
        print(f"{verb}  {file}")
    print(f"{verb} {len(swept.files)} files, {format_size(swept.bytes)}")


def delete(
    store: StoreArgument,
    capture: Annotated[str, typer.Argument(metavar="CAPTURE")],
    yes: bool = False,
    json: JsonOption = False,
) -> None:
    """Delete a capture, or saved scores, with all versions.

    Options:
        capture: RUN/CHECKPOINT/SPLIT/CAPTURE as info shows it, scores/NAME or datamodels/NAME.
        yes: Confirm; deletion cannot be undone.
    """
    import gradkeep.store as stores

    opened = stores.open(store, create=False)
    parts = capture.strip("/").split("/")
    row_set = parts[1] if len(parts) == 2 and parts[0] == "datamodels" else None
    key = None if row_set is not None else _key(capture)
    folders = [f"datamodels/{row_set}"]
    if key is not None:
        folders = [one.folder for one in (key, *opened.owned(key))]
    blocks = [block for block in opened.info().blocks if block.address.folder in folders]
    if not blocks:
        raise StoreError(
            f"there is no {capture!r} in this store",
            code="cli.unknown_capture",
            path=opened.location,
            fix=f"`gradkeep info {opened.location}` lists the contents",
        )
    blocks.sort(key=lambda block: folders.index(block.address.folder))
    rows, size = blocks[0].rows, sum(block.bytes for block in blocks)
    if not yes:
        raise StoreError(
            "nothing was deleted",
            code="cli.nothing_deleted",
            path=f"{opened.location}/{folders[0]}",
            found=f"{rows} rows, {format_size(size)}",
            fix="Add --yes to delete it.",
        )
    if key is not None:
        opened.delete(key)
    else:
        opened.delete_rows(str(row_set))
    if json:
        print_json({"deleted": folders[0], "rows": rows, "bytes": size})
    else:
        print(f"deleted {folders[0]}: {rows} rows, {format_size(size)}")


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
        "invalid name of a capture",
        code="cli.capture_name",
        found=name,
        expected="RUN/CHECKPOINT/SPLIT/CAPTURE, for example main/final/train/main, scores/NAME, "
        "evaluations/NAME, datamodels/NAME, or bases/RUN/CHECKPOINT/CAPTURE",
    )


def trak(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    store: str | None = None,
    run: str = "trak",
    json: JsonOption = False,
) -> None:
    """Import projected gradients, weights and scores of TRAK into a store; DIR is not changed.

    Options:
        folder: save_dir of the released TRAK package.
        store: Folder or URL; default: DIR-gradkeep.
        run: Name of the run.
    """
    from gradkeep.compat.trak import import_save_dir

    whole = input_folder(folder, error=StoreError).resolve()
    target = store or str(whole.with_name(f"{whole.name}-gradkeep"))
    imported = import_save_dir(folder, target, run=run)
    if json:
        print_json({"store": target, **pick_fields(imported, "checkpoints", "scores", "skipped")})
        return
    for name in imported.checkpoints:
        print(f"imported   projected gradients of {name}")
    for name in imported.scores:
        print(f"imported   scores {name}: gk.Scores.load(store, {name!r})")
    for reason in imported.skipped:
        print(f"skipped    {reason}")
    print(f"next       gradkeep info {target}")
