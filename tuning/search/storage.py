"""Where studies are kept: in memory, in a journal file, in a database that several hosts share."""

from __future__ import annotations

import contextlib
import os
import re
import time
import urllib.parse
import uuid
from pathlib import Path

import optuna
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from cunorm.core import cache_folder

#: What Optuna raises of a storage: of a database that has gone away, say.
StorageError = optuna.exceptions.OptunaError
PAUSES = (0.2, 0.5, 1.0)  # between attempts to open a database, in seconds
HEAD = b'{"op_code"'  # of a journal
SHORTEST_SECRET = 3  # that is looked for in what others say: a shorter one would be found in any text
GRACE_SECONDS = 10  # after which the lock of a journal counts as left behind


def storage_of(url: str | None) -> BaseStorage | None:
    """What Optuna keeps studies in: None, in memory; a database's URL; else a journal file.

    Raises
    ------
    ValueError
        If it cannot be opened, or is something else.
    """
    if url is None:
        return None
    path = Path(url.removeprefix("journal:"))
    try:
        if "://" in url:
            made: BaseStorage = _database(url)
        else:
            if not url or not path.parent.is_dir():
                raise ValueError(f"no folder {path.parent}" if url else "expected a file or a URL")
            lock = JournalFileOpenLock(str(path), grace_period=GRACE_SECONDS)
            _mend(path, lock)
            made = JournalStorage(JournalFileBackend(str(path), lock_obj=lock))
        made.get_all_studies()
    except Exception as error:  # whatever a driver of a database comes up with
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"--storage: {shown(url)!r}: no storage of studies: {without_secrets(said, url)}") from None
    return made


def shown(url: str) -> str:
    """What of a storage's URL may be printed: not the user and password before ``@``, and not the query."""
    scheme, separator, rest = url.partition("://")
    if not separator:  # a file; or a URL whose beginning was forgotten
        return re.sub(r":[^:]*@", ":***@", url)
    _, at, place = rest.rpartition("@")
    place, question, _ = place.partition("?")
    return f"{scheme}://{'***@' if at else ''}{place}{'?***' if question else ''}"


def without_secrets(text: str, url: str) -> str:
    """What somebody says of a storage, without what `shown` leaves out of its URL.

    Parameters
    ----------
    text : str
    url : str
        What ``--storage`` was given.
    """
    text = text.replace(url, shown(url))
    rest = url.partition("://")[2] or url
    user, _, place = rest.rpartition("@")
    query = place.partition("?")[2]
    secrets = {user, user.partition(":")[2], query, *(value for _, value in urllib.parse.parse_qsl(query))}
    for secret in sorted(secrets | set(map(urllib.parse.unquote, secrets)), key=len, reverse=True):
        if len(secret) >= SHORTEST_SECRET:
            text = text.replace(secret, "***")
    return text


def _database(url: str) -> BaseStorage:
    """Open a database; somebody else may be making its tables at this moment."""
    for pause in PAUSES:
        with contextlib.suppress(Exception):
            return optuna.storages.get_storage(url)
        time.sleep(pause)
    return optuna.storages.get_storage(url)


def _mend(path: Path, lock: JournalFileOpenLock) -> None:
    """Take a last line away that a killed process did not finish: nobody could read on behind it."""
    if not path.exists():
        return
    if not path.is_file():
        raise ValueError("no regular file")
    with path.open("rb") as file:
        head = file.read(len(HEAD))
    if not HEAD.startswith(head):
        raise ValueError("another kind of file")
    lock.acquire()
    try:
        with path.open("rb+") as file:
            data = file.read()
            if data and not data.endswith(b"\n"):
                file.truncate(data.rfind(b"\n") + 1)
    finally:
        lock.release()


def journal(folder: Path, table: Path, resume: bool) -> Path:
    """The journal of a run that names no storage: a new one, or with ``resume`` the last one of that table.

    Older journals of the table whose run is over are deleted when a new one is made.
    """
    cache_folder.make(folder)
    stem = re.sub(r"\W+", "_", str(table.resolve())).strip("_")[-80:]
    old = sorted(folder.glob(f"{stem}-*.journal"), key=lambda path: path.stat().st_mtime)
    if resume and old:
        return old[-1]
    for path in old:
        pid = path.stem.rpartition("-")[2]
        if not Path(f"/proc/{pid}").exists():
            path.unlink(missing_ok=True)
    return folder / f"{stem}-{uuid.uuid4().hex[:8]}-{os.getpid()}.journal"
