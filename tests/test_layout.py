"""Rules for the source: the order of imports, the length of files, and how kernels access global memory."""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.rooms import KERNEL_ROOMS, PACKAGE, ROOMS, below, imports, includes, module_of
from tests.support.rooms import SOURCES as KERNELS

#: The folders of ops.
OPS = {path.name for path in (PACKAGE / "ops").iterdir() if path.is_dir()} - {"common", "__pycache__"}
#: The folders of ops from the top down: an op may import common, and the registry may import the ops. InstanceNorm
#: launches GroupNorm's kernels.
OPS_ROOMS = [{"parse_problem"}, {"registry"}, {"instance_norm"}, OPS - {"instance_norm"}, {"common"}]
DEPENDENCIES = ("numpy", "ml_dtypes", "platformdirs", "filelock")
#: Third-party modules that a file may import at its top, although cunorm can be imported without them.
HEAVY = {"executors/gpu.py": "cupy"}
#: Folders for users of a framework: the only ones whose files may import it at their top.
FACES = {"torch": "torch"}


def faults(text: str, path: str) -> list[str]:
    """The illegal imports of a file of cunorm, as messages."""
    found = []
    _, *own = module_of(path)
    for name, top in imports(text, path):
        first, *rest = name.split(".")
        late = own[:1] in (["cli"], ["distributed"]) and not top
        if own == ["reference"]:
            right = first == "numpy" or first in sys.stdlib_module_names
        elif first == "cunorm" and rest:
            if rest[0] in ("tuning", "examples"):
                right = late
            elif not own or rest == ["__version__"]:
                right = True
            elif not any(rest[0] in names for names in ROOMS):
                right = own[0] == "cli" and not top  # a public name
            elif own[0] == rest[0] == "ops" and len(own) > 1:
                right = below(OPS_ROOMS, own[1], rest[1])
            else:
                right = below(ROOMS, own[0], rest[0])
        elif first == "cunorm":
            right = own[0] == "cli" and not top
        elif first in ("cupy", "optuna"):
            right = first == "cupy" and (late or HEAVY.get(path) == first)
        elif first in FACES:
            right = late or FACES.get(own[0] if own else "") == first
        else:
            right = late or first in DEPENDENCIES or first in sys.stdlib_module_names
        if not right:
            found.append(f"{path} imports {name}")
    return found


@pytest.mark.parametrize("path", sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")))
def test_imports_run_downwards(path: str) -> None:
    _, *own = module_of(path)
    assert not own or any(own[0] in names for names in ROOMS), (
        f"{own[0]} is missing from ROOMS, expected an entry for each folder"
    )
    assert faults((PACKAGE / path).read_text(), path) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("core/strategy.py", "from cunorm.runtime.plans import Plan"),
        ("core/strategy.py", "from ..runtime.plans import Plan"),
        ("runtime/plans.py", "from cunorm.ops import registry"),
        ("tiling/choose_tile.py", "from cunorm.executors.cpu import executor"),
        ("core/arrays.py", "from cunorm import group_norm"),
        ("core/arrays.py", "import cunorm"),
        ("ops/group_norm/slab.py", "from cunorm.ops.layer_norm.grid import LayerGrid"),
        ("ops/common/register_rows.py", "from cunorm.ops.registry import OPS"),
        ("ops/group_norm/op.py", "from cunorm.ops.instance_norm.strategies import FORWARD"),
        ("core/arrays.py", "import cupy"),
        ("runtime/plans.py", "def late():\n    import cupy.cuda"),
        ("runtime/plans.py", "def late():\n    from .call import Call\n    from cunorm.ops.registry import OPS"),
        ("cli/main.py", "import cupy"),
        ("core/arrays.py", "import torch"),
        ("distributed/engines.py", "import mpi4py"),
        ("cli/main.py", "def late():\n    import optuna"),
        ("cli/main.py", "from cunorm.tuning import workloads"),
        ("runtime/plans.py", "from cunorm.tuning import workloads"),
        ("reference.py", "import ml_dtypes"),
        ("reference.py", "from . import NAMES"),
    ],
)
def test_illegal_imports_are_found(path: str, text: str) -> None:
    assert faults(text, path)[-1:] == [f"{path} imports {list(imports(text, path))[-1][0]}"]


@pytest.mark.parametrize(
    "path",
    [one for folder in (PACKAGE, ROOT / "tuning", ROOT / "tests") for one in sorted(folder.rglob("__init__.py"))],
    ids=lambda path: path.parent.relative_to(ROOT).as_posix(),
)
def test_an_init_file_only_re_exports_names(path: Path) -> None:
    """Exception: ``cunorm/__init__.py`` also finds the kernels, in an ``if`` statement, and sets its version."""
    for node in ast.parse(path.read_text()).body:
        names = [ast.unparse(target) for target in node.targets] if isinstance(node, ast.Assign) else []
        own = path.parent == PACKAGE and (names == ["__version__"] or isinstance(node, ast.If))
        doc = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        assert doc or own or isinstance(node, (ast.Import, ast.ImportFrom)) or names == ["__all__"], ast.unparse(node)


@pytest.mark.parametrize("path", sorted(path.relative_to(KERNELS).as_posix() for path in KERNELS.rglob("*.cu*")))
def test_includes_run_downwards(path: str) -> None:
    room = path.split("/")[0]
    for included in includes((KERNELS / path).read_text()):
        assert below(KERNEL_ROOMS, room, included.split("/")[0]), f"{path} includes {included}"


def test_the_names_of_kernel_files_are_unique() -> None:
    """A launch identifies its kernel's file by the name without the folder."""
    names = [path.name for path in KERNELS.rglob("*.cu*")]
    assert len(names) == len(set(names))


#: The folders of the tuner from the top down. The empty name is for the files that are in no folder.
TUNING_ROOMS = [{""}, {"report", "bench"}, {"measure"}, {"search", "verify", "problems"}]


def room_of(path: Path) -> str:
    """The folder of a file of the tuner; "" for none."""
    parent = path.relative_to(ROOT / "tuning").parent.as_posix()
    return "" if parent == "." else parent


@pytest.mark.parametrize("path", sorted((ROOT / "tuning").rglob("*.py")), ids=lambda path: path.stem)
def test_the_tuner_imports_downwards(path: Path) -> None:
    """Only the folder search may import Optuna."""
    package = ["tuning", *path.relative_to(ROOT / "tuning").parts[:-1]]
    folders = {folder for names in TUNING_ROOMS for folder in names}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            source = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")][1:]
            whence = source[0] if source[0] in folders else ""
            assert below(TUNING_ROOMS, room_of(path), whence), f"imports {node.module}"
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
            assert room_of(path) == "search" or not any(name.split(".")[0] == "optuna" for name in names)
            assert not any(name.split(".")[0] == "tuning" for name in names), (
                "imports tuning, expected cunorm.tuning: the module would load twice"
            )


def test_modules_that_measure_do_not_import_optuna() -> None:
    """Workers, clocks and workloads are also used without tuning, where Optuna may be missing."""
    modules = (
        "problems.workloads",
        "measure.clock",
        "measure.worker",
        "measure.race",
        "measure.result",
        "verify.verifier",
    )
    modules += ("measure.precompile", "bench.command")
    code = (
        f"import sys; {'; '.join(f'import cunorm.tuning.{one}' for one in modules)}; sys.exit('optuna' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


#: Maximum lines of code of a file, without docstrings, comments and blank lines.
BUDGET = 600

NO_CODE = {getattr(tokenize, name) for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")}


def lines_of_code(path: Path) -> int:
    """The number of lines that are not blank, not a comment and not part of a docstring."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return sum(bool(line.strip()) for line in _COMMENT.sub(" ", text).splitlines())
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            found.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(found)


def test_files_are_within_the_budget_of_lines() -> None:
    """A file covers one subject."""
    files = [path for folder in ("cunorm", "tuning", "examples", "benchmarks", "tests") for path in
             (ROOT / folder).rglob("*") if path.suffix in (".py", ".h", ".cpp", ".cu")]  # fmt: skip
    files += KERNELS.rglob("*.cu*")
    assert len(files) > 300
    long = [path for path in files if len(path.read_text(encoding="utf-8").splitlines()) > BUDGET]
    assert long  # with docstrings and comments some files are; counting their code takes a while
    assert {path.name: lines for path in long if (lines := lines_of_code(path)) > BUDGET} == {}


def test_lines_of_code_are_counted(tmp_path: Path) -> None:
    python = (
        '"""A subject.\n\nMore.\n"""\n\n# why\nx = """a\nb\n"""  # and\n\n\ndef f():\n    """It."""\n    return 1\n'
    )
    kernel = "// A contract.\n\nint f() {  /* and\nmore */\n    return 1;\n}\n"
    for name, text, lines in (("a.py", python, 5), ("a.cuh", kernel, 3)):
        (tmp_path / name).write_text(text)
        assert lines_of_code(tmp_path / name) == lines, name


#: A file with fewer lines must not be imported by one file only: it should be part of that file.
CRUMB = 60


def test_no_small_file_is_imported_by_one_file_only() -> None:
    modules = {}
    for folder, prefix in (("cunorm", ""), ("tuning", "cunorm."), ("tests", ""), ("benchmarks", ""), ("examples", "")):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            modules[prefix + ".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    users: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        package = name.split(".") if path.stem == "__init__" else name.split(".")[:-1]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                above = package[: len(package) - node.level + 1] if node.level else []
                source = ".".join([*above, *([node.module] if node.module else [])])
                for imported in {source, *(f"{source}.{alias.name}" for alias in node.names)} & {*modules}:
                    users[imported].add(name)
    small = {name for name, path in modules.items() if len(path.read_text().splitlines()) < CRUMB}
    stems = ("__init__", "__main__", "oracle")  # `oracle_of` imports an oracle by its name
    whole = {name for name, path in modules.items() if path.stem in stems or "test_" in path.stem}
    assert {name: users[name] for name in small - whole if len(users[name]) == 1} == {}
    assert len(users["cunorm.core.errors"]) > 10


# ---- kernels --------------------------------------------------------------------------------------------------------

SOURCES = sorted(KERNELS.rglob("*.cu*"))
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_PARENTHESES = r"\((?:[^()]|\([^()]*\))*\)"
_KERNEL = re.compile(
    rf'extern "C" __global__ void (?:CLUSTER )?__launch_bounds__{_PARENTHESES}\s*(\w+)({_PARENTHESES})\s*\{{'
)
_DEVICE = re.compile(rf"__device__[^;{{}}()]*?\b(\w+)({_PARENTHESES})[^;{{}}]*\{{")
_GLOBAL = re.compile(
    r"\b(?:(?:data_t|gamma_t|beta_t|stat_t|const T)\s*\*\s*(?:const\s+)?(\w+)|Pair\s*\*\s*(workspace)\b)"
)


def _body(text: str, start: int) -> str:
    """The text from ``start``, just after an opening brace, up to and including the closing brace."""
    depth, end = 1, start
    while depth:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
    return text[start:end]


def functions(text: str) -> Iterator[tuple[set[str], str]]:
    """For each function, the names of its pointers to global memory, and its body.

    In a kernel these are all pointer parameters, and local pointers to a storage type. In other functions they are
    the parameters that point to a storage type.
    """
    text = _COMMENT.sub(" ", text)
    for found in _KERNEL.finditer(text):
        pointers = [part for part in found[2].strip("()").split(",") if "*" in part]
        body = _body(text, found.end())
        locals_ = {name for pair in _GLOBAL.findall(body) for name in pair if name}
        yield {part.split("*")[-1].split()[-1] for part in pointers} | locals_, body
    for found in _DEVICE.finditer(text):
        yield {name for pair in _GLOBAL.findall(found[2]) for name in pair if name}, _body(text, found.end())


def dereferences(text: str) -> list[str]:
    """The expressions that dereference or cast a pointer to global memory, instead of passing it to a function."""
    found = []
    for names, body in functions(text):
        for name in names:
            patterns = (
                rf"(?<![\w.]){name}\s*\[(?!\d\]\s*=\s*\{{)",  # name[i], but not the declaration of an array of pointers
                rf"(?<![\w.]){name}\s*->",  # name->field
                rf"(?:[=(,;{{}}!?:+\-<&|]|\breturn)\s*\*\s*\(?\s*{name}\b",  # *name, *(name + i)
                rf"reinterpret_cast<[^()]*\*>\(\s*{name}\b",  # a pointer of another type
            )
            found += [match[0] for pattern in patterns for match in re.finditer(pattern, body)]
    return found


@pytest.mark.parametrize("path", [p for p in SOURCES if p.name != "types.cuh"], ids=lambda path: path.name)
def test_kernels_do_not_dereference_pointers_to_global_memory(path: Path) -> None:
    assert dereferences(path.read_text()) == []


@pytest.mark.parametrize("path", [p for p in SOURCES if p.parent.name != "common"], ids=lambda path: path.name)
def test_pointers_are_cast_in_common_only(path: Path) -> None:
    """There each cast is to an address that is checked, or aligned by construction. So no pointer is misaligned."""
    assert "reinterpret_cast" not in _COMMENT.sub(" ", path.read_text())


@pytest.mark.parametrize(
    "body",
    [
        "y[i] = x[i];",
        "store(y, i, x[i]);",
        "float v = *x;",
        "float v = *(x + i);",
        "return *x;",
        "workspace->first = 1;",
        "auto p = reinterpret_cast<const Pack<data_t>*>(x);",
    ],
)
def test_a_raw_dereference_is_found(body: str) -> None:
    parameters = "const data_t* x, data_t* y, Pair* workspace, long long N"
    head = f'extern "C" __global__ void __launch_bounds__(Tile::threads, 1)\nname({parameters}) {{'
    assert dereferences(f"{head} {body} }}")
    assert dereferences(f"{head} store(y, i, load(x, N * i)); /* y[i] = x[i] */ }}") == []
    device = "__device__ __forceinline__ void name(const data_t* x, data_t* y, Pair* workspace, int N) {"
    assert dereferences(f"{device} {body} }}")


def test_every_kernel_and_its_parameters_are_parsed() -> None:
    for path in KERNELS.rglob("*.cu"):
        entries = _KERNEL.findall(path.read_text())
        assert len(entries) == path.read_text().count("__global__"), path
        assert all(name.startswith(path.stem) for name, _ in entries)
        for name, parameters in entries:
            for part in parameters.strip("()").split(","):
                assert "*" in part or part.split()[:-1] in (["long", "long"], ["double"]), f"{name}: {part}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_kernels_include_only_their_own_files(path: Path) -> None:
    for line in path.read_text().splitlines():
        if line.lstrip().startswith("#") and "include" in line:
            assert (found := re.fullmatch(r'#include "(\w+/\w+\.cuh)"', line)), line
            assert (KERNELS / found[1]).is_file()


# ---- import ---------------------------------------------------------------------------------------------------------


def test_import_is_quick_and_light() -> None:
    code = (
        "import sys, time, numpy, ml_dtypes, platformdirs; began = time.process_time(); import cunorm;"
        "took = time.process_time() - began; import json;"
        "print(json.dumps([took, sorted({name.partition('.')[0] for name in sys.modules})]))"
    )
    runs = []
    for _ in range(5):  # CPU time, and the minimum of five runs, because the machine may be busy
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
        runs.append(json.loads(done.stdout))
    assert min(took for took, _ in runs) < 0.3
    heavy = {"cupy", "optuna", "torch", "sklearn", "matplotlib", "tqdm", "ziglang", "scipy", "tuning", "kernels_cu"}
    assert not heavy & set(runs[0][1])


#: Matches string literals that contain the name of an op or a part of it.
OP_WORDS = re.compile(r"_norm|backward|^layer$|^batch$")
PIECES = ("startswith", "endswith", "removeprefix", "removesuffix", "split", "rsplit", "partition", "rpartition")


def op_questions(text: str) -> list[str]:
    """The expressions that test an op's name, or a part of it. The code must use a field of `OpSpec` instead."""

    def named(node: ast.expr) -> bool:
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            return any(map(named, node.elts))
        return (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and OP_WORDS.search(node.value) is not None
        )

    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare):
            asks = any(map(named, (node.left, *node.comparators)))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in PIECES:
            asks = any(map(named, node.args))
        else:
            asks = isinstance(node, ast.MatchValue) and named(node.value)
        if asks:
            found.append(ast.unparse(node))
    return found


#: The one compares with other libraries' functions, which it calls by op; the limits of the other differ by family.
BY_OP = {"benchmarks/accuracy_others.py", "benchmarks/byte_floor.py"}
CODE = sorted(
    path.relative_to(ROOT).as_posix()
    for room in (PACKAGE, ROOT / "tuning", ROOT / "benchmarks")
    for path in room.rglob("*.py")
)


@pytest.mark.parametrize("path", [path for path in CODE if path not in BY_OP])
def test_code_does_not_test_the_name_of_an_op(path: str) -> None:
    assert op_questions((ROOT / path).read_text()) == []


def test_tests_of_the_name_of_an_op_are_found() -> None:
    asking = [
        'problem.op == "layer_norm"',
        "'backward' in op",
        "op.startswith(('group_norm', 'layer_norm'))",
        "op.split('_norm')",
        "op.endswith('backward')",
        "op not in ('batch_norm_stats', 'batch_norm_elemt')",
        "family == 'layer'",
    ]
    assert [bool(op_questions(one)) for one in asking] == [True] * len(asking)
    assert op_questions("match op:\n    case 'group_norm':\n        pass") == ["'group_norm'"]
    assert op_questions('{"group_norm": forward}[op]; axis == "group"; "dy" in spec.inputs') == []


def attributes(node: ast.ClassDef) -> tuple[set[str], set[str], set[str]]:
    """The attributes of a class: those that it documents, its public fields, and all others that it defines."""
    _, _, section = (ast.get_docstring(node) or "").partition("Attributes\n----------\n")
    section = re.split(r"\n\n\w+\n-+\n", section)[0]
    heads = [line.split(" : ")[0] for line in section.splitlines() if line and not line[0].isspace()]
    fields = {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    inside = [one for one in ast.walk(node) if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name)]
    others = {one.attr for one in inside if ast.unparse(one.value) == "self"}
    others |= {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
    return {name.strip() for head in heads for name in head.split(",")}, fields, others


def test_documented_attributes_are_those_of_the_class() -> None:
    seen = 0
    for path in CODE:
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.ClassDef) and "Attributes\n-" in (ast.get_docstring(node) or ""):
                documented, fields, others = attributes(node)
                assert {name for name in fields if not name.startswith("_")} <= documented, (path, node.name)
                assert node.bases or documented <= fields | others, (path, node.name)
                seen += 1
    assert seen > 50


def test_undocumented_attributes_are_found() -> None:
    text = '''class A:
    """Facts.

    Attributes
    ----------
    first, second : int
    third : str
        Words.

    Examples
    --------
    words : none
    """

    first: int
    fourth: int

    def second(self):
        return self.fifth
'''
    (node,) = ast.parse(text).body
    assert isinstance(node, ast.ClassDef)
    assert attributes(node) == ({"first", "second", "third"}, {"first", "fourth"}, {"second", "fifth"})
