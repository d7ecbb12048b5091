"""A contract for import-linter: what is private to a room stays in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from importlinter import Contract, ContractCheck, fields, output

if TYPE_CHECKING:
    from grimp import ImportGraph


class PrivateRooms(Contract):
    """No room imports a private module (one with a leading underscore) of another room.

    A room is a package directly below `package`; private modules beside the rooms belong to all.
    """

    type_name = "private_rooms"
    package = fields.StringField()

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        del verbose
        rooms = {m for m in graph.find_children(self.package) if graph.find_children(m)}
        broken = []
        for importer in graph.modules:
            room = self._room(importer)
            if room not in rooms:
                continue
            for imported in graph.find_modules_directly_imported_by(importer):
                other = self._room(imported)
                parts = imported.split(".")[2:]
                if other in rooms - {room} and any(part.startswith("_") for part in parts):
                    lines = graph.get_import_details(importer=importer, imported=imported)
                    broken += [
                        f"{importer}:{line['line_number']} imports {imported}" for line in lines
                    ]
        return ContractCheck(kept=not broken, metadata={"broken": sorted(broken)})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for line in check.metadata["broken"]:
            output.print_error(line)
        output.print_error(
            "Import it from the room itself, or export it there if others may use it."
        )

    def _room(self, module: str) -> str:
        return ".".join(module.split(".")[:2])
