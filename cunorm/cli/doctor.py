"""`cunorm doctor`: report what is installed and what works, with a command for each problem. A fault is a finding."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import importlib
import importlib.metadata
import importlib.util
import io
import json
import os
import platform
import re
import shlex
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cunorm.core import cache_folder, devices, settings
from cunorm.core.errors import CacheWarning, CompileError, NoCompilerError, sentence
from cunorm.jit import cxx

GROUP = "Cache folders"


def _fault(name: str, folder: Path, text: str, advice: str) -> CheckResult:
    return CheckResult(GROUP, name, "fault", text, advice, {"path": str(folder), "writable": False, "bytes": 0})


def _folder(name: str, folder: Path, variable: str) -> CheckResult:
    facts: dict[str, Any] = {"path": str(folder), "writable": True, "bytes": 0}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        text = f"{folder} cannot be written: {error.strerror or error}"
        return _fault(name, folder, text, f'export {variable}="$(mktemp -d)"')
    for directory, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):
                facts["bytes"] += os.lstat(os.path.join(directory, file)).st_size
    return CheckResult(GROUP, name, "ok", f"{folder}, writable, {size(facts['bytes'])}", facts=facts)


def _own() -> CheckResult:
    """Check cunorm's cache folder. Code is loaded from it, so no other user may have write permission."""
    folder = settings.cache_dir().absolute()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CacheWarning)  # it is a finding
            used = cache_folder.root()
    except CompileError as error:
        text, _, command = str(error).partition("; type: ")
        return _fault("cunorm", folder, text, command)
    except OSError:  # _folder reports the reason
        return _folder("cunorm", folder, "CUNORM_CACHE_DIR")
    if used != folder:
        text = f"{folder} may contain files of another user; each process uses a temporary folder instead"
        return _fault("cunorm", folder, text, f"sudo rm -r {shlex.quote(str(folder))}")
    return _folder("cunorm", folder, "CUNORM_CACHE_DIR")


def _tables() -> Iterator[CheckResult]:
    """Report the tiling tables that exist and cannot be read. Without them, calls use other tiles."""
    from cunorm.ops.registry import place_named
    from cunorm.tiling import choose_tile

    try:
        device = place_named(None).device
    except Exception:  # other checks report it
        return
    for path, text in choose_tile.unreadable(device):
        advice = f"rm {shlex.quote(str(path))}"
        yield CheckResult(GROUP, "tiling table", "fault", text, advice, {"path": str(path)})


def cache_folders() -> Iterator[CheckResult]:
    """Check the cache folder of cunorm and, if CuPy is installed, of CuPy."""
    yield _own()
    yield from _tables()
    if importlib.util.find_spec("cupy") is not None:
        chosen = os.environ.get("CUPY_CACHE_DIR")
        yield _folder("CuPy", Path(chosen) if chosen else Path.home() / ".cupy" / "kernel_cache", "CUPY_CACHE_DIR")


WIDTH = 80


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Attributes
    ----------
    group, name : str
    state : str
        ``"ok"``, ``"missing"`` or ``"fault"``.
    text : str
        The result as text.
    advice : str or None
        The commands that solve the problem, separated by ``&&``; None if `state` is ``"ok"``.
    facts : dict
        The result as data.
    """

    group: str
    name: str
    state: str
    text: str
    advice: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def size(count: float) -> str:
    """Format a number of bytes with a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def works(findings: list[CheckResult], kind: str) -> bool:
    """Whether the check kernel ran on an executor with a correct result."""
    return any(finding.facts.get("executor") == kind and finding.facts["works"] for finding in findings)


def document(findings: list[CheckResult]) -> dict[str, Any]:
    """Return the findings as a JSON document."""
    executors = {kind: works(findings, kind) for kind in ("cpu", "gpu")}
    facts = [asdict(finding) for finding in findings]
    return {"schema": "cunorm-doctor/1", "ok": any(executors.values()), "executors": executors, "findings": facts}


def report(findings: list[CheckResult]) -> str:
    """Return the findings as text of 80 columns."""
    lines: list[str] = []
    group = ""
    wide = min(20, max(len(finding.name) for finding in findings))
    indent = " " * (2 + 7 + 2 + wide + 2)
    for finding in findings:
        if finding.group != group:
            group = finding.group
            lines += ["", group]
        head = f"  {finding.state:7s}  {finding.name:{wide}s}  "
        lines += textwrap.wrap(
            finding.text,
            WIDTH,
            initial_indent=head,
            subsequent_indent=indent,
            break_on_hyphens=False,
            break_long_words=False,
        )
        if finding.advice is not None:
            lines += [f"{indent}type: {command}" for command in finding.advice.split(" && ")]
    usable = [name for kind, name in (("gpu", "GPU executor"), ("cpu", "CPU executor")) if works(findings, kind)]
    wrong = sum(finding.state != "ok" for finding in findings)
    rest = f"; {wrong} finding{'s' if wrong > 1 else ''} with a command to type" if wrong else ""
    lines += ["", f"cunorm runs on: {', '.join(usable) or 'nothing yet'}{rest}."]
    return "\n".join(lines[1:])


#: The names of CuPy on the package index. Exactly one of them should be installed.
WHEELS = ("cupy-cuda12x", "cupy-cuda13x", "cupy-cuda11x", "cupy")
#: Modules that `cunorm demo` and `cunorm tune` import, with the distribution of each.
DEMO = {"sklearn": "scikit-learn", "matplotlib": "matplotlib", "tqdm": "tqdm"}
TUNE = {"optuna": "optuna", "matplotlib": "matplotlib", "tqdm": "tqdm"}
EXTRAS = {"demo": DEMO, "tune": TUNE, "torch": {"torch": "torch"}, "mpi": {"mpi4py": "mpi4py"}}
#: Group of findings -> extra, and what needs its modules.
OPTIONAL = {
    "Demo": ("demo", "`cunorm demo`"),
    "Tuner": ("tune", "`cunorm tune`"),
    "PyTorch": ("torch", "`cunorm.torch`"),
    "MPI": ("mpi", "`cunorm.distributed.MpiEngine`"),
}
TOLERANCE = 1e-4
CACHE = 'export CUNORM_CACHE_DIR="$(mktemp -d)"'


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


# ---- packages -------------------------------------------------------------------------------------------------------


def _packages() -> Iterator[CheckResult]:
    import cunorm
    from cunorm.jit import sources

    group = "Packages"
    yield CheckResult(group, "Python", "ok", f"{platform.python_version()}, {sys.executable}")
    for name in ("numpy", "ml_dtypes"):
        version = str(importlib.import_module(name).__version__)
        yield CheckResult(group, name, "ok", version, facts={"version": version})
    facts = {"version": cunorm.__version__, "package": str(Path(cunorm.__file__).parent)}
    yield CheckResult(group, "cunorm", "ok", f"{cunorm.__version__}, {facts['package']}", facts=facts)
    try:
        kernels = sources.folder()
    except FileNotFoundError as error:
        yield CheckResult(group, "kernels_cu", "fault", str(error), "pip install --force-reinstall --no-deps cunorm")
        return
    count = len(list(kernels.rglob("*.cu")))
    yield CheckResult(group, "kernels_cu", "ok", f"{count} kernel files, {kernels}", facts={"folder": str(kernels)})


def _import_cupy() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cause of a warning, for instance two installed wheels, is a finding
        return importlib.import_module("cupy")


def _driver_version() -> str | None:
    """The version of the loaded kernel driver."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(errors="replace")
    except OSError:
        return None
    return next(iter(re.findall(r"\b\d{3}\.\d+(?:\.\d+)*\b", text)), None)


def _extra() -> str:
    """Return cunorm's extra for this machine's driver. Every driver for CUDA 13 also runs CUDA 12."""
    driver = _driver_version()
    return "cuda13" if driver is not None and int(driver.partition(".")[0]) >= 580 else "cuda12"


def _cupy() -> Iterator[CheckResult]:
    group, install = "GPU executor", f"pip install 'cunorm[{_extra()}]'"
    wheels = {name: version for name in WHEELS if (version := _version_of(name)) is not None}
    named = ", ".join(f"{name} {version}" for name, version in wheels.items())
    if len(wheels) > 1:
        advice = f"pip uninstall -y {' '.join(wheels)} && {install}"
        yield CheckResult(group, "CuPy wheels", "fault", f"more than one: {named}", advice, {"wheels": wheels})
    if not wheels and importlib.util.find_spec("cupy") is None:
        yield CheckResult(group, "CuPy", "missing", "not installed; needed only for an NVIDIA GPU", install)
        return
    try:
        cupy = _import_cupy()
        version = str(cupy.__version__)
    except (Exception, SystemExit) as error:
        again = f"pip install --force-reinstall 'cunorm[{_extra()}]'"
        yield CheckResult(
            group, "CuPy", "fault", f"{named}: import fails: {sentence(error)}", again, {"wheels": wheels}
        )
        return
    facts = {"version": version, "wheels": wheels}
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < (14, 2):
        yield CheckResult(group, "CuPy", "fault", f"{version}, expected 14.2 or newer", f"{install} --upgrade", facts)
    else:
        yield CheckResult(group, "CuPy", "ok", f"{version} ({named or 'built from source'})", facts=facts)
    yield from _cuda(group, cupy, "nvidia-cuda-nvrtc" if "cupy-cuda13x" in wheels else "nvidia-cuda-nvrtc-cu12")


def _cuda(group: str, cupy: Any, nvrtc_wheel: str) -> Iterator[CheckResult]:
    try:
        nvrtc = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
        yield CheckResult(group, "NVRTC", "ok", nvrtc, facts={"version": nvrtc})
    except Exception as error:
        yield CheckResult(group, "NVRTC", "missing", sentence(error), f"pip install {nvrtc_wheel}")
    runtime = cupy.cuda.runtime
    kernel, number, failed = _driver_version(), 0, ""
    try:
        number = int(runtime.driverGetVersion())
    except Exception as error:
        failed = f" ({sentence(error)})"
    if number == 0:
        rest = f", but version {kernel} is loaded" if kernel else "; needed only for a GPU"
        text = f"no driver that CuPy can use{failed}{rest}"
        yield CheckResult(group, "driver", "missing", text, "nvidia-smi  (if it fails, install the driver)")
        return
    level = f"{number // 1000}.{number % 1000 // 10}"
    text = f"for CUDA {level}" + (f", version {kernel}" if kernel else "")
    yield CheckResult(group, "driver", "ok", text, facts={"cuda": level, "version": kernel})
    try:
        count = int(runtime.getDeviceCount())
    except Exception as error:
        yield CheckResult(group, "GPUs", "fault", sentence(error), "nvidia-smi")
        return
    if count == 0:
        advice = "unset CUDA_VISIBLE_DEVICES && nvidia-smi"
        yield CheckResult(group, "GPUs", "missing", "the driver shows no GPU to this process", advice)
    for ordinal in range(count):
        properties = runtime.getDeviceProperties(ordinal)
        facts = {
            "name": properties["name"].decode(),
            "compute_capability": [int(properties["major"]), int(properties["minor"])],
            "memory_bytes": int(properties["totalGlobalMem"]),
            "multiprocessors": int(properties["multiProcessorCount"]),
        }
        text = "{name}, compute capability {compute_capability[0]}.{compute_capability[1]}, ".format(**facts)
        text += f"{size(facts['memory_bytes'])}, {facts['multiprocessors']} multiprocessors"
        yield CheckResult(group, f"GPU {ordinal}", "ok", text, facts=facts)


# ---- CPU executor, settings, extras ---------------------------------------------------------------------------------


def _cpu() -> Iterator[CheckResult]:
    group = "CPU executor"
    found: list[cxx.Compiler] = []
    with contextlib.suppress(CompileError):  # cxx.chosen() below reports it
        found = cxx.present()
    try:
        used = cxx.chosen()
    except Exception as error:
        advice = "unset CUNORM_CXX" if settings.cxx() is not None and found else "pip install 'cunorm[cpu]'"
        if isinstance(error, CompileError) and not isinstance(error, NoCompilerError):  # a compiler may be installed
            advice = "cunorm doctor"
        state = "missing" if settings.cxx() is None else "fault"
        yield CheckResult(group, "C++ compiler", state, str(error).partition(";")[0], advice)
        used = None
    for compiler in found:
        facts = {"command": list(compiler.command), "version": compiler.version, "used": compiler == used}
        text = f"{compiler.version}{' (the one in use)' if facts['used'] else ''}"
        yield CheckResult(group, compiler.name, "ok", text, facts=facts)
    try:
        device = devices.known(settings.cpu_device(), "CUNORM_CPU_DEVICE")
    except ValueError as error:
        yield CheckResult(group, "simulated GPU", "fault", str(error), "unset CUNORM_CPU_DEVICE")
    else:
        yield CheckResult(
            group, "simulated GPU", "ok", f"{device.name}; exact, not fast", facts={"device": device.name}
        )


def _raises(check: Callable[[], object]) -> str | None:
    """What a check of a setting says against it, or None."""
    try:
        check()
    except NoCompilerError as error:
        return str(error).partition(";")[0]
    except ValueError as error:
        return str(error)
    except CompileError:  # no process can be started now; `_cpu` reports it
        return None
    return None


def _cpu_build() -> None:
    from cunorm.executors.cpu import kernel

    kernel.check_build(settings.cpu_build())


def _cpu_order() -> None:
    from cunorm.executors.cpu import executor

    executor.order_of(settings.cpu_order())


def _cache_fault() -> str | None:
    found = _own()
    return found.text if found.state == "fault" else None


def _table_fault() -> str | None:
    from cunorm.tiling import choose_tile

    return choose_tile.environment_fault()


def _trace_fault() -> str | None:
    from cunorm.tiling import problem_trace

    return problem_trace.environment_fault()


#: Variable -> the function that returns what is wrong with its value, or None.
FAULTS: dict[str, Callable[[], str | None]] = {
    "CUNORM_CACHE_DIR": _cache_fault,
    "CUNORM_TILING_TABLE": _table_fault,
    "CUNORM_TRACE": _trace_fault,
    "CUNORM_CPU_DEVICE": lambda: _raises(lambda: devices.known(settings.cpu_device(), "CUNORM_CPU_DEVICE")),
    "CUNORM_CXX": lambda: _raises(cxx.chosen),
    "CUNORM_CPU_ORDER": lambda: _raises(_cpu_order),
    "CUNORM_CPU_CORES": lambda: _raises(settings.cpu_cores),
    "CUNORM_CPU_BUILD": lambda: _raises(_cpu_build),
    "CUNORM_SPECIALISE": lambda: _raises(settings.specialise),
}


def _variables() -> Iterator[CheckResult]:
    group = "Settings"
    known = settings.VARIABLES
    names = sorted(name for name in os.environ if name.startswith("CUNORM_"))
    for name in names:
        facts = {"value": os.environ[name]}
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            meant = f"; did you mean {near[0]}?" if near else f"; expected one of {', '.join(known)}"
            yield CheckResult(group, name, "fault", f"not a variable of cunorm{meant}", f"unset {name}", facts)
            continue
        fault = FAULTS[name]() if facts["value"] else None
        if fault is None:
            yield CheckResult(group, name, "ok", facts["value"] or "empty; the default applies", facts=facts)
        else:
            text = fault if fault.startswith(name) else f"{name}: {fault}"
            yield CheckResult(group, name, "fault", text, f"unset {name}", facts)
    if not names:
        yield CheckResult(group, "CUNORM_*", "ok", "no variable is set; the defaults apply")


def _extras(group: str, extra: str, user: str) -> Iterator[CheckResult]:
    missing = "missing", f"not installed; needed by {user}", f"pip install 'cunorm[{extra}]'"
    for module, name in EXTRAS[extra].items():
        found = importlib.util.find_spec(module) is not None
        yield CheckResult(group, name, *(("ok", _version_of(name) or "unknown version") if found else missing))


# ---- the check of each executor -------------------------------------------------------------------------------------


def _differences(xp: Any) -> float:
    """Compile and run a tiny GroupNorm gradient; return its largest error over the largest value of the reference."""
    import numpy as np

    from cunorm import group_norm_backward, reference

    random = np.random.default_rng(0)
    x, dy = (random.standard_normal((2, 6, 5)).astype(np.float32) for _ in range(2))
    gamma = random.standard_normal(6).astype(np.float32)
    _, mean, rstd = reference.group_norm(x, 3)
    mean, rstd = mean.astype(np.float32), rstd.astype(np.float32)
    expected = reference.group_norm_backward(dy, x, mean, rstd, gamma, num_groups=3)
    arrays = [xp.asarray(array) for array in (dy, x, mean, rstd, gamma)]
    found = group_norm_backward(*arrays, num_groups=3)
    host = [np.asarray(array) if xp is np else np.asarray(xp.asnumpy(array)) for array in found]
    return max(float(abs(a - b).max() / abs(b).max()) for a, b in zip(host, expected, strict=True))


def _remedy(text: str) -> str:
    """Return the command that solves an exception of cunorm, taken from its text if the text contains one."""
    if "CUNORM_CACHE_DIR" in text:
        return CACHE
    if (needed := re.search(r"pip install '[^']+'", text)) is not None:
        return needed[0]
    named = re.match(r"CUNORM_[A-Z_]+", text.replace("device:", "CUNORM_CPU_DEVICE:", 1))
    suspects = [named[0]] if named else sorted(name for name in os.environ if name.startswith("CUNORM_"))
    return " && ".join(f"unset {name}" for name in suspects) or "pip install --force-reinstall cunorm"


def _proof(name: str, kind: str, xp: Callable[[], Any], ordinal: int | None = None) -> CheckResult:
    from cunorm.tiling import problem_trace

    facts: dict[str, Any] = {"executor": kind, "works": False}
    try:
        module = xp()
        with problem_trace.paused(), contextlib.nullcontext() if ordinal is None else module.cuda.Device(ordinal):
            error = _differences(module)
    except (Exception, SystemExit) as problem:
        return CheckResult("Check", name, "fault", sentence(problem), _remedy(str(problem)), facts)
    facts["worst_relative_error"] = error
    if not error <= TOLERANCE:
        text = f"group_norm_backward is wrong: relative error {error:.1e}, expected at most {TOLERANCE:.0e}"
        return CheckResult("Check", name, "fault", text, f"{CACHE} && cunorm doctor", facts)
    facts["works"] = True
    text = f"group_norm_backward compiled, ran and agrees with the reference (error {error:.0e})"
    return CheckResult("Check", name, "ok", text, facts=facts)


def _guarded(group: str, look: Callable[[], Iterator[CheckResult]]) -> list[CheckResult]:
    """Return all findings of a group. An exception becomes the last finding."""
    found: list[CheckResult] = []
    try:
        found.extend(look())
    except (Exception, SystemExit) as error:
        found.append(CheckResult(group, "checks", "fault", sentence(error), _remedy(str(error))))
    return found


def examine() -> list[CheckResult]:
    """Run all checks. Raises and prints nothing."""
    looks = {"Packages": _packages, "GPU executor": _cupy, "CPU executor": _cpu}
    looks |= {"Cache folders": cache_folders, "Settings": _variables}
    looks |= {group: functools.partial(_extras, group, *needed) for group, needed in OPTIONAL.items()}
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [finding for group, look in looks.items() for finding in _guarded(group, look)]
        found.append(_proof("CPU executor", "cpu", lambda: importlib.import_module("numpy")))
        for finding in [finding for finding in found if re.fullmatch(r"GPU \d+", finding.name)]:
            found.append(_proof(finding.name, "gpu", _import_cupy, int(finding.name.split()[1])))
    return found


# ---- the command ----------------------------------------------------------------------------------------------------


def _kernels(as_json: bool, tiles: str) -> int:
    from cunorm.gate import gate, kernel_report
    from cunorm.jit import nvrtc

    found = nvrtc.ends()
    versions = [one.version for one in found]
    if not found:
        commands = "\n  ".join(str(kernel_report.missing(versions)).split(" && "))
        print(f"cunorm doctor --kernels needs NVRTC {nvrtc.supported()}; type:\n  {commands}", file=sys.stderr)
        return 1
    results = gate.run(gate.builds(found, tiles=tiles), progress=True)
    facts = kernel_report.document(results, versions, tiles)
    print(json.dumps(facts, indent=1) if as_json else kernel_report.report(results, versions, tiles))
    return 0 if facts["ok"] else 1


def run(asked: argparse.Namespace) -> int:
    """Run the command with its parsed arguments; return the exit code."""
    if asked.kernels:
        return _kernels(asked.json, asked.tiles or "choice")
    found = examine()
    facts = document(found)
    print(json.dumps(facts, indent=1) if asked.json else report(found))
    return 0 if facts["ok"] else 1
