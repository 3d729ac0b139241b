"""The cache folder: private to its owner, refused if other users may write to it, available without a home folder."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import platformdirs
import pytest

from cunorm import CacheWarning
from cunorm.cli.doctor import cache_folders
from cunorm.core import cache_folder, settings
from cunorm.core.devices import KNOWN
from cunorm.core.errors import CompileError
from cunorm.jit import nvrtc
from cunorm.jit.nvrtc import Usage
from cunorm.tiling import choose_tile

STRANGER = 54321  # a user that this machine does not have


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path of a folder that CUNORM_CACHE_DIR names. The folder does not exist yet."""
    path = tmp_path / "named"
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(path))
    return path


@pytest.fixture
def default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path of the default folder of a user whose home folder is empty."""
    for name in ("CUNORM_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    cache_folder._temporary.cache_clear()
    return tmp_path / ".cache" / "cunorm"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def made(path: Path, mode: int = 0o700) -> Path:
    path.mkdir(parents=True)
    path.chmod(mode)
    return path


def given_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a path belong to another user. A user other than root patches os.stat and os.lstat to report that."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, -1, follow_symlinks=False)
        return
    for name in ("stat", "lstat") if not path.is_symlink() else ("lstat",):
        real = getattr(os, name)

        def look(where: Any, *more: Any, real: Any = real, **options: Any) -> os.stat_result:
            facts = real(where, *more, **options)
            return os.stat_result([*facts[:4], STRANGER, *facts[5:]]) if str(where) == str(path) else facts

        monkeypatch.setattr(os, name, look)


# ---- a folder that CUNORM_CACHE_DIR names ---------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_new_folders_are_private_to_their_owner(umask: int, named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(named / "a" / "b"))
    before = os.umask(umask)
    try:
        assert cache_folder.folder("cpu") == named / "a" / "b" / "cpu"
    finally:
        os.umask(before)
    for path in (named, named / "a", named / "a" / "b", named / "a" / "b" / "cpu"):
        assert mode(path) == 0o700


@pytest.mark.parametrize("given", [0o777, 0o775, 0o757, 0o702])
def test_a_named_folder_that_other_users_may_write_to(given: int, named: Path) -> None:
    """The error contains a command. After this command the folder is used."""
    made(named, given)
    with pytest.raises(
        CompileError, match=rf"^CUNORM_CACHE_DIR: {named} may be written by other users \(mode 0"
    ) as caught:
        cache_folder.folder("cpu")
    assert mode(named) == given
    assert [*named.iterdir()] == []
    command = str(caught.value).partition("type: ")[2]
    assert command == f"chmod go-w {named}"
    subprocess.run(command, shell=True, check=True)
    assert cache_folder.folder("cpu") == named / "cpu"


@pytest.mark.parametrize("given", [0o700, 0o755, 0o500])
def test_a_named_folder_that_only_its_owner_may_write_to(given: int, named: Path) -> None:
    made(named / "cpu")
    named.chmod(given)
    assert cache_folder.folder("cpu") == named / "cpu"
    assert mode(named) == given


def test_a_named_folder_of_another_user(named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(named)
    given_away(named, monkeypatch)
    with pytest.raises(
        CompileError, match=r"^CUNORM_CACHE_DIR: .*named belongs to .*, not to .*; type: export CUNORM_"
    ):
        cache_folder.folder("cpu")


def test_a_folder_like_tmp_is_used_unless_another_user_owns_the_folder_inside(
    named: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other users may write to it, but cannot replace files in it (sticky bit). The folder inside must be safe."""
    made(named, 0o1777)
    assert mode(cache_folder.folder("cpu")) == 0o700
    given_away(named / "cpu", monkeypatch)
    with pytest.raises(CompileError, match=r'named/cpu belongs to .*; type: export CUNORM_CACHE_DIR="\$\(mktemp -d'):
        cache_folder.folder("cpu")


@pytest.mark.parametrize("where", ["named", "named/cpu"])
def test_a_symbolic_link_of_another_user(where: str, named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder like /tmp every user can create a link."""
    target, link = made(named.parent / "target"), named.parent / where
    if where == "named/cpu":
        made(named, 0o1777)
    link.symlink_to(target)
    assert cache_folder.folder("cpu") == named / "cpu"
    given_away(link, monkeypatch)
    with pytest.raises(CompileError, match=f"{link} belongs to"):
        cache_folder.folder("cpu")


def test_other_users_write_permission_is_removed_inside_the_cache(named: Path) -> None:
    """Only cunorm uses the folders inside the cache folder, so it may change their modes."""
    made(named)
    made(named / "cpu", 0o775)
    assert mode(cache_folder.folder("cpu")) == 0o755


@pytest.mark.parametrize(
    "name", ["with space", "-rf", "a'b\"c", "$(touch x)", "`x`;&|", "new\nline", "[a]*?", "ü", "%s{}", "\udcff"]
)
def test_shell_metacharacters(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path may contain them, and the command in an error message quotes them."""
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(tmp_path / name))
    assert cache_folder.folder("cpu") == tmp_path / name / "cpu"
    (tmp_path / name).chmod(0o777)
    with pytest.raises(CompileError) as caught:
        cache_folder.folder("cpu")
    assert shlex.split(str(caught.value).partition("type: ")[2])[-1] == str(tmp_path / name)


def test_a_tilde_that_the_shell_did_not_expand(named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(named))
    monkeypatch.setenv("CUNORM_CACHE_DIR", "~/builds")
    assert cache_folder.folder("cpu") == named / "builds" / "cpu"


def test_a_tilde_in_the_other_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    for name, path in (("CUNORM_TILING_TABLE", settings.tiling_table), ("CUNORM_TRACE", settings.trace)):
        monkeypatch.setenv(name, "~/run")
        assert path() == Path("/home/somebody/run")
        monkeypatch.delenv(name)
        assert path() is None


def test_a_relative_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUNORM_CACHE_DIR", "here")
    assert cache_folder.folder("cpu") == tmp_path / "here" / "cpu"


# ---- the default folder ---------------------------------------------------------------------------------------------


def test_other_users_write_permission_is_removed_from_the_default_folder(default: Path) -> None:
    """The default folder belongs to this user, so a mode left by an old umask is corrected without an error."""
    made(default, 0o777)
    assert cache_folder.folder("cpu") == default / "cpu"
    assert mode(default) == 0o755


def test_a_default_folder_of_another_user(default: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one warning, and the process uses a private folder."""
    made(default)
    given_away(default, monkeypatch)
    with pytest.warns(CacheWarning, match=rf"the cache folder {default} belongs to .* set CUNORM_CACHE_DIR") as caught:
        found = [cache_folder.folder(name) for name in ("cpu", "nvrtc", "cpu")]
    assert len(caught) == 1
    assert found[0].parent == found[1].parent != default
    assert mode(found[0].parent) == 0o700
    assert [*default.iterdir()] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away to a child process")
def test_a_private_folder_is_deleted_at_the_end_of_the_process(default: Path) -> None:
    """A forked child does not delete it."""
    made(default)
    os.chown(default, STRANGER, -1)
    script = (
        "import os, sys, warnings; warnings.simplefilter('ignore'); from cunorm.core import cache_folder\n"
        "path = cache_folder.folder('cpu')\n"
        "if os.fork() == 0: sys.exit()\n"
        "os.wait(); print(path, path.is_dir(), flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    path, there = done.stdout.split()
    assert there == "True"
    assert not Path(path).exists()


def no_home(*_: Any, **__: Any) -> str:
    raise RuntimeError("could not determine the home directory")


@pytest.mark.parametrize("answer", [no_home, lambda *_, **__: "~/.cache/cunorm", lambda *_, **__: "cunorm"])
def test_without_a_home_folder(answer: Any, default: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is a folder of the user in the folder for temporary files. Nothing is created in the current folder."""
    monkeypatch.setattr(platformdirs, "user_cache_dir", answer)
    monkeypatch.chdir(made(default.parent / "current"))
    path = default.parent.parent / f"cunorm-{os.getuid()}"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache_folder.folder("cpu") == path / "cpu"
    assert mode(path) == 0o700
    assert [*Path.cwd().iterdir()] == []


def test_without_a_home_folder_if_another_user_has_taken_the_name(
    default: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platformdirs, "user_cache_dir", no_home)
    default.parent.mkdir()
    path = default.parent.parent / f"cunorm-{os.getuid()}"
    path.symlink_to(made(default.parent / "elsewhere"))
    given_away(path, monkeypatch)
    with pytest.warns(CacheWarning, match="belongs to"):
        assert cache_folder.folder("cpu").is_relative_to(default.parent.parent)
    assert [*(default.parent / "elsewhere").iterdir()] == []


def test_the_installed_platformdirs_detects_a_missing_home_folder() -> None:
    """Older versions return a folder ``~`` in the current folder. pyproject.toml excludes them."""
    script = (
        "import os; os.environ.pop('HOME', None); os.environ.pop('XDG_CACHE_HOME', None); os.getuid = lambda: 54321\n"
        "from cunorm.core import settings; print(settings.cache_dir().is_absolute(), settings.cache_dir().name)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "CUNORM_CACHE_DIR"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "cunorm-54321"]


# ---- folders that cannot be created ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x" * 300, "/".join(["y" * 200] * 30), "loop/x", "file", "file/x", "dangling"])
def test_a_folder_that_cannot_be_made(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cunorm.executors.cpu import executor

    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "x")
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(tmp_path / name))
    with pytest.raises(CompileError, match=r"cannot write the cache folder .* \(.*\); set CUNORM_CACHE_DIR"):
        executor.compile(f'extern "C" __global__ void never(long long n) {{ n = {len(name)}; }}', "never")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["dangling", "file", "loop"]


def test_a_cache_folder_without_permission_to_create_it(named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cunorm.executors.cpu import executor

    def denied(self: Path, *_: Any) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", denied)
    with pytest.raises(CompileError, match=r"cannot write the cache folder .* \(Permission denied\); set CUNORM_CACHE"):
        executor.compile('extern "C" __global__ void never(double x) { }', "never")


# ---- other files in the cache folder --------------------------------------------------------------------------------


def test_nvrtc_reports_that_other_users_may_write_to_are_ignored(named: Path) -> None:
    usage = Usage("kernel", 1, 0, 0, 0, 0, 1, 1)
    file = nvrtc._file("text", "sm_90", nvrtc.Nvrtc("12.8.93", "x"))
    assert file is not None
    nvrtc._write(file, [usage])
    assert nvrtc._read(file) == [usage]
    file.chmod(0o666)
    assert nvrtc._read(file) is None
    named.chmod(0o777)
    with pytest.raises(CompileError, match="CUNORM_CACHE_DIR"):
        nvrtc._file("text", "sm_90", nvrtc.Nvrtc("12.8.93", "x"))


def test_the_folder_of_tiling_tables_is_private_to_its_owner(named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(named))
    from cunorm.tiling import table

    before = os.umask(0)
    try:
        table.update(choose_tile.user_table(KNOWN["H200"]), KNOWN["H200"], {}, [])
    finally:
        os.umask(before)
    assert mode(named) == mode(named / "tiling") == 0o700
    assert settings.cache_dir() == named


# ---- the doctor -----------------------------------------------------------------------------------------------------


def test_the_doctor_reports_a_folder_that_other_users_may_write_to(named: Path) -> None:
    made(named, 0o777)
    finding = next(iter(cache_folders()))
    assert (finding.state, finding.name) == ("fault", "cunorm")
    assert "may be written by other users (mode 0777)" in finding.text
    assert finding.advice == f"chmod go-w {named}"


def test_the_doctor_reports_a_default_folder_of_another_user(default: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(default)
    given_away(default, monkeypatch)
    finding = next(iter(cache_folders()))
    assert finding.state == "fault"
    assert str(default) in finding.text
