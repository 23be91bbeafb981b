"""Measure the house: lines, files, longest functions, private helpers with one caller."""

from __future__ import annotations

import argparse
import ast
import collections
import statistics
from collections.abc import Iterator
from pathlib import Path


def functions(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, int]]:
    """Yield each function of a file and how many lines its body has, without its docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            yield node, ((body[-1].end_lineno or 0) - body[0].lineno + 1) if body else 0


def called(tree: ast.Module) -> collections.Counter[str]:
    """Count how often each name is read in a file, on its own or as an attribute."""
    names = (
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)
    )
    return collections.Counter(names)


def main(folder: Path, once_only: bool) -> None:
    files = {path: path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in files.items()}
    found = [(length, f"{path.relative_to(folder)}:{node.lineno} {node.name}", node, path)
             for path, tree in trees.items() for node, length in functions(tree)]  # fmt: skip
    reads = {path: called(tree) for path, tree in trees.items()}
    private = [(node.name, path) for _, _, node, path in found if node.name[0] == "_" and not node.name.endswith("__")]
    once = {(name, path) for name, path in private if reads[path][name] == 1}
    if once_only:
        for length, where, node, path in found:
            if (node.name, path) in once:
                print(f"{length:4d} lines  {where}")
        return
    lengths = sorted(length for length, *_ in found)
    print(f"{len(files)} files, {sum(text.count(chr(10)) for text in files.values()):,} lines in {folder}")
    print(f"{len(found)} functions: median {statistics.median(lengths):g} lines, p90 {lengths[9 * len(lengths) // 10]}")
    print(f"{len(private)} private functions, {len(once)} of them with one caller")
    print("longest functions:")
    for length, where, *_ in sorted(found, key=lambda each: -each[0])[:10]:
        print(f"  {length:4d} lines  {where}")
    print("longest files:")
    for path in sorted(files, key=lambda path: -files[path].count("\n"))[:10]:
        print(f"  {files[path].count(chr(10)):4d} lines  {path.relative_to(folder)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("src/fedblur"), help="also of another checkout")
    parser.add_argument(
        "--once", action="store_true", help="list the private helpers with one caller, and their lengths"
    )
    options = parser.parse_args()
    if not list(options.folder.rglob("*.py")):
        parser.error(f"{options.folder} holds no Python file")
    main(options.folder, options.once)
