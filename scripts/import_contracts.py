"""Import contracts that import-linter lacks; .importlinter names the packages that they apply to."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from importlinter import Contract, ContractCheck, fields, output

if TYPE_CHECKING:
    from grimp import ImportGraph


class OnlyContract(Contract):
    """A package imports itself, the standard library and the named packages, and nothing else."""

    # import-linter puts the value in the field's place.
    package: Any = fields.StringField()
    allowed: Any = fields.SetField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:  # noqa: ARG002
        allowed = {self.package, *self.allowed, *sys.stdlib_module_names}
        strangers = [
            (importer, imported)
            for importer in sorted({self.package, *graph.find_descendants(self.package)})
            for imported in sorted(graph.find_modules_directly_imported_by(importer))
            if imported.partition(".")[0] not in allowed
        ]
        return ContractCheck(kept=not strangers, metadata={"strangers": strangers})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for importer, imported in check.metadata["strangers"]:
            output.print_error(f"{importer} imports {imported}, which is not among {', '.join(sorted(self.allowed))}")
