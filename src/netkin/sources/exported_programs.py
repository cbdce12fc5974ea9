"""Exported programs: the path of a `.pt2` file, which needs no Python class; it is vetted before torch reads it.

torch says of its own `torch.export.load` that it is not for untrusted files. In torch 2.13 a file could run code
through sizes (`sympy.sympify` evaluates them), through the trees of inputs and outputs (they import modules by name)
and through guards (they become Python source). Its text has further ways: weights, constants and sample inputs may be
pickles, read without limits; the target of a node may be any function that can be reached from `torch`, such as
`torch.os.system`; names become source, too; and a package may hold compiled code.

So the archive is read as data first, and torch reads only a copy with the program and its tensors. Nodes may call
operators of `aten` that touch no files, and arithmetic on sizes. Sizes are made of symbols, whole numbers and sympy's
arithmetic; trees of tuples, lists and dictionaries; names of letters, digits and a few signs; tensors of raw numbers.
Anything else is left out where the program runs without it (sample inputs, guards, stack traces, extra files) and
refused where it does not. The copy is a new archive, so that torch reads no byte of the archive that was not checked.
"""

from __future__ import annotations

import ast
import io
import json
import logging
import re
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from netkin.errors import SourceError
from netkin.sources.names import Refused, content, reading


def load_exported(path: Path) -> nn.Module:
    """Return the network of an exported program, its layers by the module paths they had before.

    The file is vetted first, see `vet`: nothing in it is unpickled or evaluated. A program that was exported with a
    fixed number of examples in a batch refuses any other number.
    """
    with reading(path, "exported program", "export the network alone with `torch.export.save` of torch 2.8 or newer"):
        copy = vet(content(path, "exported program"))
    logger = logging.getLogger("torch.export")
    level = logger.level
    try:
        # torch logs its own account of a failure, and ours follows
        logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.load(copy)
        return unflattened(program)
    except Exception as error:  # torch's loader has no common error
        reason = " ".join([f"{type(error).__name__}:", *str(error).strip().splitlines()[-1:]])[:230]
        raise SourceError(
            f"{str(path)!r} could not be loaded by torch {torch.__version__} ({reason}); export it again with this "
            "torch."
        ) from error
    finally:
        logger.setLevel(level)


def unflattened(program: torch.export.ExportedProgram) -> nn.Module:
    """Return the network of an exported program, its layers by the module paths they had before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: nn.Module = torch.export.unflatten(program)
    _give_types_back(model)
    return model


def _give_types_back(model: nn.Module) -> None:
    """Give modules the names of their original types, and containers their kind, by which layers are found."""
    kinds: dict[str, type[nn.Module]] = {}
    for module in list(model.modules()):
        name, kind = getattr(module, "_ty", None), type(module)
        if kind is nn.Module:
            # what has children and is not called was a list or a dictionary of modules
            module.__class__ = nn.ModuleList
        elif isinstance(name, str) and module is not model:
            bases = (kind, nn.Sequential) if name == "torch.nn.modules.container.Sequential" else (kind,)
            module.__class__ = kinds.setdefault(name, type(name.rpartition(".")[2], bases, {}))


_WORD = re.compile(r"[\w.@-]*")
_TEXT = re.compile(r"[\w .,:<>=/+-]*")
_OPERATOR = re.compile(
    r"torch\.ops\.aten\.\w+(\.\w+)?|torch\.ops\.higher_order\.wrap_with_set_grad_enabled|torch\.sym_\w+"
    r"|_operator\.(add|sub|mul|truediv|floordiv|mod|neg|pos|pow|eq|ne|lt|le|gt|ge|and_|or_|getitem)"
    r"|math\.(ceil|floor|trunc|sqrt)"
)
_WITH_FILES = re.compile(r"torch\.ops\.aten\.(from_file|save|load)\b")
_STACK = re.compile(r"[^,\"\\\n]*,[\w.@]*,[\w.]*")
_ARITHMETIC = {
    *("Symbol", "Integer", "Rational", "Add", "Mul", "Pow", "Max", "Min", "Mod", "PythonMod", "FloorDiv", "CeilDiv"),
    *("CleanDiv", "ModularIndexing", "IntTrueDiv", "FloatTrueDiv", "TruncToInt", "FloorToInt", "CeilToInt", "ToFloat"),
    *("Equality", "Unequality", "StrictLessThan", "LessThan", "StrictGreaterThan", "GreaterThan", "PowByNatural"),
    *("floor", "ceiling", "Eq", "Ne", "Lt", "Le", "Gt", "Ge"),
}
# by which torch identifies the archive; it compares these and runs nothing in them
_MARKS: tuple[str, ...] = ("archive_format", "archive_version", "byteorder", ".data/version", "version")
_TREES = (None, "builtins.tuple", "builtins.list", "builtins.dict")
_REFUSED_ARGUMENTS = {"as_operator": "a function as argument", "as_custom_obj": "an object of its own"}


def vet(archive: bytes) -> io.BytesIO:
    """Return a copy of a `.pt2` archive that torch can load without running anything of the file's own."""
    with zipfile.ZipFile(io.BytesIO(archive)) as source:
        names = source.namelist()
        if len(set(names)) < len(names):
            raise Refused("two entries of one name")
        if "serialized_exported_program.json" in names:  # of torch below 2.8, which has no folder at the top
            raise Refused("an older layout")
        return _copied({name.partition("/")[2]: source.read(name) for name in names})  # below the folder at the top


def _copied(entries: dict[str, bytes]) -> io.BytesIO:
    compiled = [name for name in entries if name.startswith(("data/aotinductor/", "data/executorch/"))]
    if compiled:
        raise Refused("compiled code")
    if "models/model.json" not in entries:
        raise Refused("no program")
    copies = {name: entries[name] for name in _MARKS if name in entries}
    copies["models/model.json"] = json.dumps(clean(json.loads(entries["models/model.json"]))).encode()
    for kind in ("weights", "constants"):
        copies |= _tensors(entries, kind)
    copies["data/sample_inputs/model.pt"] = b""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for name, stored in copies.items():
            archive.writestr(f"vetted/{name}", stored)
    target.seek(0)
    return target


def _tensors(entries: dict[str, bytes], kind: str) -> dict[str, bytes]:
    table = f"data/{kind}/model_{kind}_config.json"
    if table not in entries:
        raise Refused(f"{kind} in an older layout")
    config = json.loads(entries[table])
    for meta in config["config"].values():
        if meta.get("use_pickle") is not False or not re.fullmatch(r"(weight|tensor)_\d+", meta["path_name"]):
            raise Refused(f"{kind} that are pickled")
        sizes = [size.get("as_int") for size in meta["tensor_meta"]["sizes"]]
        if not entries[f"data/{kind}/{meta['path_name']}"] and 0 not in sizes:
            # torch would make zeros of any size that is written there
            raise Refused("a tensor without its numbers")
    files = {f"data/{kind}/{meta['path_name']}" for meta in config["config"].values()}
    return {table: json.dumps(clean(config)).encode()} | {name: entries[name] for name in sorted(files)}


def clean(value: Any, key: str = "") -> Any:
    """Return a part of a program's JSON, which stands under `key`, examined and without what it does not need."""
    if key in _REFUSED_ARGUMENTS:
        raise Refused(_REFUSED_ARGUMENTS[key])
    if key == "metadata":
        return _module_stack(value)
    if key == "guards_code":
        return []
    if isinstance(value, dict):
        return {_word(inner): clean(part, inner) for inner, part in value.items()}
    if isinstance(value, list):
        return [clean(part, key) for part in value]
    return _CHECKS.get(key, _word)(value) if isinstance(value, str) else value


def _module_stack(metadata: dict[str, Any]) -> dict[str, str]:
    """Return which modules a node lies in, the one part of its metadata that the layers are found by."""
    stack = metadata.get("nn_module_stack")
    if stack is None:
        return {}
    if not all(_STACK.fullmatch(part) for part in stack.split(";")):
        raise Refused(f"a module of the name {_short(stack)}")
    return {"nn_module_stack": stack}


def _word(text: str) -> str:
    if not _WORD.fullmatch(text):
        raise Refused(f"the name {_short(text)}")
    return text


def _plain_text(text: str) -> str:
    if not _TEXT.fullmatch(text):
        raise Refused(f"the text {_short(text)}")
    return text


def _operator(target: str) -> str:
    if not _OPERATOR.fullmatch(target) or _WITH_FILES.match(target):
        raise Refused(f"a call of {_short(target)}")
    return target


def _expression(text: str) -> str:
    if not all(map(_is_arithmetic, ast.walk(ast.parse(text, mode="eval")))):
        raise Refused(f"the size {_short(text)}")
    return text


def _is_arithmetic(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        small = isinstance(node.value, (bool, int, float)) and abs(node.value) < 2**63
        return small or (isinstance(node.value, str) and bool(re.fullmatch(r"[a-z]+\d+", node.value)))
    if isinstance(node, ast.Name):
        return node.id in _ARITHMETIC or bool(re.fullmatch(r"[a-z]+\d+|true|false", node.id))
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _ARITHMETIC
    operators = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.USub)
    return isinstance(node, (ast.Expression, ast.Load, ast.keyword, ast.BinOp, ast.UnaryOp, *operators))


def _tree(text: str) -> str:
    protocol, top = json.loads(text)
    waiting = [top]
    while waiting:
        node = waiting.pop()
        context = json.loads(node["context"]) if isinstance(node["context"], str) else node["context"]
        plain = context is None or (isinstance(context, list) and all(isinstance(key, str) for key in context))
        if node["type"] not in _TREES or not plain:
            raise Refused(f"inputs or outputs of type {_short(str(node['type']))}")
        waiting += node["children_spec"]
    return json.dumps([protocol, top])


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}...")


_CHECKS: dict[str, Callable[[str], str]] = {
    "target": _operator,
    "expr_str": _expression,
    "in_spec": _tree,
    "out_spec": _tree,
    "torch_version": _plain_text,
    "as_string": _plain_text,
    "as_strings": _plain_text,
}
