"""Find the C++ compiler of the CPU executor and run it."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from cunorm.core import settings
from cunorm.core.errors import CompileError, NoCompilerError, first_lines

INSTALL = "install a C++ compiler: pip install 'cunorm[cpu]', or a system g++ or clang++, or set CUNORM_CXX"
#: Errors of a system that is out of processes, memory or file handles; a later call may succeed.
BUSY = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
#: Options of the sanitised build, which runs only if the libraries of the sanitisers are loaded before it.
SANITISERS = (
    "-fsanitize=address,undefined,float-cast-overflow",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
)


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler that works on this machine.

    Attributes
    ----------
    name : str
        Name for the user: ``g++``, ``clang++``, ``zig``, or the text of ``CUNORM_CXX``.
    command : tuple of str
        Command line that starts it; the first word is an absolute path.
    version : str
        First line of its ``--version`` output; for zig, the version of the package.
    """

    name: str
    command: tuple[str, ...]
    version: str


def _busy(name: str, error: OSError) -> str:
    return f"the compiler {name} cannot be started now: {error.strerror}; call again when fewer processes run"


@cache
def _version(command: tuple[str, ...]) -> str | None:
    """Return the first line of ``--version``, or None if the command does not run.

    Raises
    ------
    CompileError
        If the system cannot start a process at the moment. This result is not cached.
    """
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, errors="replace", timeout=60)
    except OSError as error:
        if error.errno in BUSY:
            raise CompileError(_busy(command[0], error)) from error
        return None
    except subprocess.SubprocessError:
        return None
    return done.stdout.partition("\n")[0].strip() if done.returncode == 0 else None


def _asked(text: str) -> Compiler | None:
    """Return the compiler of ``CUNORM_CXX``, or None if it does not run; raise ValueError if it is no command."""
    return _find(text, shlex.split(text))


def _find(name: str, words: list[str]) -> Compiler | None:
    path = shutil.which(words[0]) if words else None
    if path is None:
        return None
    command = (os.path.abspath(path), *words[1:])
    version = _version(command)
    return None if version is None else Compiler(name, command, version)


def _find_zig() -> Compiler | None:
    spec = importlib.util.find_spec("ziglang")
    if spec is None:
        return None
    # Read the version from the folder name: importing importlib.metadata takes as long as importing this executor.
    found = sorted(Path(spec.origin or "").parent.parent.glob("ziglang-*.dist-info"))
    version = found[-1].name.removeprefix("ziglang-").removesuffix(".dist-info") if found else "of unknown version"
    return Compiler("zig", (sys.executable, "-m", "ziglang", "c++"), f"zig {version}")


def present() -> list[Compiler]:
    """Find all compilers, in the order of preference.

    Returns
    -------
    list of Compiler
        ``CUNORM_CXX``, g++, clang++ and zig, without those that are missing.
    """
    asked, found = settings.cxx(), []
    if asked is not None:
        with contextlib.suppress(ValueError):
            found.append(_asked(asked))
    found += [_find("g++", ["g++"]), _find("clang++", ["clang++"]), _find_zig()]
    return [compiler for compiler in found if compiler is not None]


def chosen() -> Compiler:
    """Return the compiler to use.

    Raises
    ------
    CompileError
        If the system cannot start a process at the moment.
    NoCompilerError
        If no compiler is found, or the one that ``CUNORM_CXX`` names does not run. The message says what to do.
    """
    asked = settings.cxx()
    if asked is not None:
        try:
            compiler = _asked(asked)
        except ValueError as error:
            why = str(error)[:1].lower() + str(error)[1:]
            raise NoCompilerError(f"CUNORM_CXX: {asked!r} is no command: {why}; unset it, or {INSTALL}") from None
        if compiler is None:
            raise NoCompilerError(f"CUNORM_CXX: {asked!r} does not run; unset it, or {INSTALL}")
        return compiler
    compiler = _find("g++", ["g++"]) or _find("clang++", ["clang++"]) or _find_zig()
    if compiler is None:
        raise NoCompilerError(f"the CPU executor needs a C++ compiler and found none of g++, clang++, zig; {INSTALL}")
    return compiler


def flags(compiler: Compiler, build: str = "plain", *, runtime: bool = False) -> tuple[str, ...]:
    """Return compiler options for fast code whose results are bitwise equal for every compiler and build.

    The plain build of a kernel has ``-O1``, or ``-Og`` and two optimisations for g++: most builds are used for a few
    small calls, and compiling takes longer than these. g++ compiles fastest with ``-Og``. The two, scalar replacement
    of aggregates and inlining of functions that are called once, cost hardly any time to compile, and kernels run
    faster with them.

    The runtime of the plain and of the checked build has ``-O2`` and no hooks, because it is compiled once and used by
    every kernel. That of the sanitised build has the kernel's options.

    There is no contraction of a * b + c, because compilers differ in it, and no fast-math. Without ``errno`` and
    floating-point traps, which nothing here reads, square roots and selections are single instructions.
    ``-nostdinc++`` restricts the runtime and the kernels to C headers. A function whose frame could overrun a fiber's
    stack does not compile.

    In the checked build the compiler inserts a call to the runtime before every memory access of a kernel: the calls of
    the thread sanitiser, without its library. With ``-fno-tree-sra`` structs are copied as a whole, as on a GPU. Then
    these calls check alignment too. clang splits structs and has its sanitiser of alignment. zig adds sanitisers to
    ``-Og``.

    The sanitised build is not optimised: it compiles sooner, and no undefined behaviour is optimised away before it is
    detected.
    """
    clang = compiler.name == "zig" or "clang" in compiler.version.lower()
    machine = platform.machine().lower()
    native = {"x86_64": ("-march=native", "-fcf-protection=none"), "aarch64": ("-mcpu=native",)}
    hooks: tuple[str, ...] = (
        "-O1" if clang else "-Og",
        "-g1",
        "-fsanitize=thread",
        "-fsanitize=integer-divide-by-zero",
    )
    # clang calls a hook for every atomic operation, even in functions without instrumentation. g++ does not.
    unused = ("func-entry-exit", "atomics")
    of_clang = tuple(word for name in unused for word in ("-mllvm", f"-tsan-instrument-{name}=0"))
    hooks += ("-fsanitize=alignment", *of_clang) if clang else ("-fno-tree-sra",)
    plain = ("-O1",) if clang else ("-Og", "-ftree-sra", "-finline-functions-called-once")
    of_kernels = {"plain": plain, "checked": hooks, "sanitised": ("-O0", "-g1", *SANITISERS)}
    fast = dict.fromkeys(("plain", "checked"), ("-O2",))
    frame = ("-Wframe-larger-than=32768", "-Werror=frame-larger-than=" + ("" if clang else "32768"))
    return (
        "-std=c++17",
        *(fast if runtime and build in fast else of_kernels)[build],
        *native.get("x86_64" if machine == "amd64" else machine, ()),
        "-fPIC",
        "-fvisibility=hidden",
        "-fno-exceptions",
        "-fno-rtti",
        "-nostdinc++",
        "-fno-strict-aliasing",
        "-U_FORTIFY_SOURCE",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-Wno-unknown-pragmas",
        "-Wno-attributes",
        *frame,
    )


@cache
def processor() -> str:
    """Return the CPU's model and features, on which ``-march=native`` depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "CPU implementer", "CPU part", "Features")
    facts = dict.fromkeys(line for line in lines if line.startswith(wanted))
    return "\n".join([platform.machine(), *facts])


def shared_object(
    source: str,
    target: str,
    entry: str,
    compiler: Compiler,
    options: tuple[str, ...],
    libraries: tuple[str, ...],
    folder: Path,
    zig_cache: Path,
) -> None:
    """Compile and link a file.

    Parameters
    ----------
    source, target : str
        Names of the source file and of the shared object, in ``folder``.
    entry : str
        Name of the build, for error messages.
    compiler : Compiler
    options, libraries : tuple of str
        Options for compiling, and extra options for linking.
    folder, zig_cache : Path
        Working folder, and the folder in which zig caches its own compiled libraries.

    Raises
    ------
    CompileError
        If the source does not compile, or the compiler does not run.
    OSError
        If the folder cannot be written.
    """
    object_file(source, "kernel.o", entry, compiler, options, folder, zig_cache)
    # Link in a separate step, without -fsanitize=thread: the runtime defines the hooks, so the library of the thread
    # sanitiser must not be linked.
    link = ("-shared", "-O2", "-Wl,--no-gc-sections", "kernel.o", "-o", target, *libraries, "-lm")
    _run(_linker(compiler), link, folder, entry, zig_cache)
    _check_written(folder / target, entry, compiler)
    (folder / "kernel.o").unlink(missing_ok=True)


def object_file(
    source: str,
    target: str,
    entry: str,
    compiler: Compiler,
    options: tuple[str, ...],
    folder: Path,
    zig_cache: Path,
) -> None:
    """Compile a file without linking. The parameters and errors are those of `shared_object`."""
    _run(compiler, (*options, "-c", source, "-o", target), folder, entry, zig_cache)
    _check_written(folder / target, entry, compiler)


def _check_written(path: Path, entry: str, compiler: Compiler) -> None:
    """Raise an error if a command that reported success wrote no file."""
    if not path.is_file():
        raise CompileError(
            f"{entry}: {compiler.name} ({compiler.version}) reported success but wrote no file; is it a C++ "
            f"compiler? unset CUNORM_CXX, or {INSTALL}"
        )


def _linker(compiler: Compiler) -> Compiler:
    """Return the linker: ``zig cc``, because ``zig c++`` would first build a C++ library, for about a minute."""
    return replace(compiler, command=(*compiler.command[:-1], "cc")) if compiler.name == "zig" else compiler


def _run(compiler: Compiler, options: tuple[str, ...], folder: Path, entry: str, zig_cache: Path) -> None:
    environment = dict(os.environ, LC_ALL="C")
    environment.setdefault("ZIG_GLOBAL_CACHE_DIR", str(zig_cache))  # its default may be a home that is not writable
    environment.setdefault("ZIG_LOCAL_CACHE_DIR", str(zig_cache))
    try:
        done = subprocess.run(
            [*compiler.command, *options],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        if not folder.is_dir():
            raise
        if error.errno in BUSY:
            raise CompileError(f"{entry}: {_busy(compiler.name, error)}") from error
        # If a script's interpreter is missing, the system reports the script itself as missing.
        raise CompileError(
            f"{entry}: the compiler {compiler.name} does not run: {compiler.command[0]}, or the interpreter that it "
            f"names: {error.strerror or error}; {INSTALL}"
        ) from error
    if done.returncode == 0:
        return
    log = first_lines(done.stdout) or f"no output, exit status {done.returncode}"
    hint = "; its folder is full: set CUNORM_CACHE_DIR or TMPDIR" if "No space left" in done.stdout else ""
    raise CompileError(f"{entry} does not compile with {compiler.name} ({compiler.version}){hint}\n{log}")
