"""Counts the code that training runs: every module of this project that `molt_gym.train` can import.

    python scripts/count_lines.py --limit 3500

The graph is read from the source, imports inside functions included, `if TYPE_CHECKING:` left out; importing a module
imports the packages around it. Of the functions in molt_gym/__init__.py only `train` is followed (`--verb sft` follows
another one, `--verb all` all of them). A code line holds more than blanks, comments or docstrings (bare strings). Envs
are named by strings and so are not on the path; `--from molt_gym.envs.code_exec` adds one.
"""

import argparse
import ast
import io
import statistics
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
    tokenize.ENCODING,
}  # fmt: skip


@dataclass(frozen=True)
class Module:
    """A source file of the project under the name by which it is imported."""

    name: str
    path: Path
    is_package: bool

    @property
    def text(self) -> str:
        """The source."""
        return self.path.read_text(encoding="utf-8")


def find_modules(root: Path) -> dict[str, Module]:
    """All modules of the project by name, packages found where pyproject.toml's package-dir says."""
    folders = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    modules = {}
    for package, folder in folders.items():
        for path in sorted((root / folder).rglob("*.py")):
            *parents, stem = path.relative_to(root / folder).with_suffix("").parts
            is_package = stem == "__init__"
            name = ".".join([package, *parents, *([] if is_package else [stem])])
            modules[name] = Module(name, path, is_package)
    return modules


def reachable(modules: dict[str, Module], starts: Sequence[str], verb: str = "all") -> list[Module]:
    """The modules that importing `starts` can import, themselves included, by name.

    verb: the function of the first start that is called, of the public ones; or "all".
    """
    found: set[str] = set()
    waiting = [parent for name in starts for parent in _with_parents(name)]
    while waiting:
        name = waiting.pop()
        if name in modules and name not in found:
            found.add(name)
            called = verb if name == starts[0] else "all"
            waiting += [parent for target in imports(modules[name], called) for parent in _with_parents(target)]
    return [modules[name] for name in sorted(found)]


def imports(module: Module, verb: str = "all") -> Iterator[str]:
    """Names that a module imports: modules, and for `from a import b` also a.b, which may be one.

    verb: the one public function whose imports count, beside the module's own; or "all".
    """
    package = module.name if module.is_package else module.name.rpartition(".")[0]
    tree = ast.parse(module.text)
    if verb != "all":
        tree.body = [node for node in tree.body if not isinstance(node, ast.FunctionDef) or node.name.startswith("_")
                     or node.name == verb]
    for node in _runtime_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def code_lines(text: str) -> int:
    """Lines that hold more than blanks, comments or docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def function_lengths(text: str) -> list[int]:
    """Lines from `def` to the end of each function, methods and inner ones included."""
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [node.end_lineno - node.lineno + 1 for node in functions]


def report(modules: Sequence[Module]) -> tuple[str, int]:
    """A table of the modules with totals, and the code lines of all."""
    rows = [(code_lines(module.text), len(module.text.splitlines()), module.name) for module in modules]
    functions = sorted(length for module in modules for length in function_lengths(module.text)) or [0]
    total, lengths = sum(code for code, _, _ in rows), [length for _, length, _ in rows]
    table = [f"{'code':>6} {'lines':>6}  module"]
    table += [f"{code:>6,} {length:>6,}  {name}" for code, length, name in sorted(rows, reverse=True)]
    packages: Counter[str] = Counter()
    for (code, _, name), module in zip(rows, modules, strict=True):
        packages[name if module.is_package else name.rpartition(".")[0]] += code
    table += [f"{code:>6,} {'':6}  in {package}" for package, code in packages.most_common()]
    table += [
        f"{total:>6,} {sum(lengths):>6,}  in {len(rows)} modules",
        f"lines a file: median {statistics.median(lengths):.0f}, most {max(lengths)}; "
        f"lines a function: median {statistics.median(functions):.0f}, "
        f"95th percentile {functions[int(0.95 * (len(functions) - 1))]}, most {functions[-1]}",
    ]
    return "\n".join(table), total


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 if the code lines are over the limit."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--limit", type=int, help="most code lines; exit 1 above it")
    parser.add_argument("--from", dest="starts", action="append", default=[], metavar="MODULE", help="a further start")
    parser.add_argument("--verb", default="train", help="function of molt_gym that is called, or all")
    parser.add_argument("--root", type=Path, default=Path(__file__).parent.parent, help="folder of pyproject.toml")
    options = parser.parse_args(argv)
    modules = find_modules(options.root)
    for start in options.starts:
        if start not in modules:
            parser.error(f"--from {start}: no such module; write one of {', '.join(modules)}")
    table, total = report(reachable(modules, ["molt_gym", *options.starts], options.verb))
    print(table)
    if options.limit is not None and total > options.limit:
        print(f"{total:,} code lines are {total - options.limit:,} over the limit of {options.limit:,}")
        return 1
    return 0


def _with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def _runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below `node` but those under `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield other
                yield from _runtime_nodes(other)
            continue
        yield child
        yield from _runtime_nodes(child)


if __name__ == "__main__":
    sys.exit(main())
