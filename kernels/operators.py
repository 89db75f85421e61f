"""The interface between Python and C++ as operators.h declares it: argument types of functions, structures for ctypes.

The compiler checks every function that it compiles against the header. Whether ctypes lays out structures like the
compiler is checked once, when a library is loaded, with sizes and offsets that the library contains, see `table`.
"""

import ctypes
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

TYPES: dict[str, Any] = {
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "void": None,
}
TABLE = "coppice_structures"
_DECLARATION = re.compile(
    r"\s*(?:struct (?P<structure>\w+) \{(?P<fields>[^}]*)\};"
    r"|(?P<result>\w+) coppice_(?P<name>\w+)\((?P<takes>[^()]*)\);)"
)
_VARIABLE = re.compile(r"\s*(?:const )?(?P<type>\w+)(?P<pointer>\*{0,2}) (?P<names>\w+(?:, \w+)*)\s*")


@dataclass(frozen=True)
class Operators:
    """The functions and structures that a header declares.

    Attributes:
        header: its text, which is a part of the library's sources.
        functions: types of the result and of the arguments, by name without "coppice_".
        structures: by name.
    """

    header: str
    functions: dict[str, tuple[Any, list[Any]]]
    structures: dict[str, type[ctypes.Structure]]

    @cached_property
    def layout(self) -> list[int]:
        """The size of each structure and the offsets of its fields, as ctypes has them."""
        numbers = []
        for structure in self.structures.values():
            offsets = (getattr(structure, field).offset for field, *_ in structure._fields_)
            numbers += [ctypes.sizeof(structure), *offsets]
        return numbers

    def table(self) -> str:
        """C++ that exports the same numbers as the compiler has them, after how many there are."""
        numbers = [str(len(self.layout))]
        for name, structure in self.structures.items():
            numbers += [f"sizeof({name})", *(f"offsetof({name}, {field})" for field, *_ in structure._fields_)]
        table = f'extern "C" {{ int64_t {TABLE}[] = {{{", ".join(numbers)}}}; }}'
        header = self.header.replace("#pragma once\n", "")  # of which compilers warn in a file that is compiled
        return f"#include <cstddef>\n#include <cstdint>\n{header}\n{table}\n"

    def differences(self, library: ctypes.CDLL) -> str | None:
        """Returns why Python cannot call a library, or None if it can."""
        missing = [name for name in self.functions if not hasattr(library, f"coppice_{name}")]
        if missing or not hasattr(library, TABLE):
            return f"lacks {', '.join(missing) or TABLE}"
        (count,) = (ctypes.c_int64 * 1).in_dll(library, TABLE)
        found = list((ctypes.c_int64 * (1 + count)).in_dll(library, TABLE))[1:]
        if found != self.layout:
            return (
                f"lays out its structures ({', '.join(self.structures)}) otherwise than Python: "
                f"expected sizes and offsets {self.layout}, got {found}"
            )
        return None


def parse(header: str) -> Operators:
    """Reads a header of the form that operators.h describes. Raises ValueError for any other."""
    declared = re.sub(r"//.*", "", header).partition('extern "C" {')[2].rstrip().removesuffix("}").rstrip()
    functions, structures, at = {}, {}, 0
    while at < len(declared):
        found = _DECLARATION.match(declared, at)
        if found is None:
            raise ValueError(f"operators.h: expected a structure or a prototype, got {declared[at:].strip()[:80]!r}")
        if name := found["structure"]:
            fields = [field for line in found["fields"].split(";")[:-1] for field in _variables(line, structures)]
            structures[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
        else:
            taken = [_variables(each, {})[0][1] for each in found["takes"].split(",") if each.strip()]
            functions[found["name"]] = TYPES[found["result"]], taken
        at = found.end()
    return Operators(header, functions, structures)


def _variables(declaration: str, structures: dict[str, Any]) -> list[tuple[str, Any]]:
    """Names and types of `type name, name`; what a pointer points to does not matter."""
    found = _VARIABLE.fullmatch(declaration)
    kind = found and (ctypes.c_void_p if found["pointer"] else (TYPES | structures).get(found["type"]))
    if not found or kind is None:
        raise ValueError(f"operators.h: expected a type and names, got {declaration.strip()!r}")
    return [(name, kind) for name in found["names"].split(", ")]
