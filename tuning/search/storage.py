"""Storages of studies: memory, a journal file, or a database that several hosts share."""

from __future__ import annotations

import contextlib
import json
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

#: Optuna's errors about a storage, for example a lost connection to a database.
StorageError = optuna.exceptions.OptunaError
PAUSES = (0.2, 0.5, 1.0)  # pauses between attempts to open a database, in seconds
HEAD = b'{"op_code"'  # first bytes of a journal
DAMAGED = "damaged, a line is not a record of an Optuna journal"
SHORTEST_SECRET = 3  # minimum length of a secret that is removed from messages: a shorter one matches in any text
GRACE_SECONDS = 10  # age after which the lock of a journal counts as abandoned


def storage_of(url: str | None, *, resumed: bool = False) -> BaseStorage | None:
    """Open the storage of studies that a URL names.

    Parameters
    ----------
    url : str or None
        The URL of a database, or the path of a journal file with or without the prefix ``journal:``. None: in memory.
    resumed : bool
        Whether --resume has selected it, not --storage; for messages.

    Returns
    -------
    BaseStorage or None
        None: in memory.

    Raises
    ------
    ValueError
        If the storage cannot be opened, or the file is not a journal.
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
            made = _journal_in(path)
        made.get_all_studies()
    except Exception as error:  # database drivers raise exceptions of many types
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        sentence = f"{shown(url)!r}: cannot be opened: {without_secrets(said, url)}"
        if resumed:
            raise ValueError(f"--resume: the journal {sentence}; leave out --resume to start anew") from None
        raise ValueError(f"--storage: {sentence}{'; name another file' if said == DAMAGED else ''}") from None
    return made


def shown(url: str) -> str:
    """A storage's URL for messages: without the user and password before ``@``, and without the query."""
    scheme, separator, rest = url.partition("://")
    if not separator:  # a file, or a URL without its scheme
        return re.sub(r":[^:]*@", ":***@", url)
    _, at, place = rest.rpartition("@")
    place, question, _ = place.partition("?")
    return f"{scheme}://{'***@' if at else ''}{place}{'?***' if question else ''}"


def without_secrets(text: str, url: str) -> str:
    """A message about a storage, without the parts of the storage's URL that `shown` omits.

    Parameters
    ----------
    text : str
    url : str
        The value of ``--storage``.
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
    """Open a database. Several attempts are made, because another process may be creating the database's tables."""
    for pause in PAUSES:
        with contextlib.suppress(Exception):
            return optuna.storages.get_storage(url)
        time.sleep(pause)
    return optuna.storages.get_storage(url)


def _journal_in(path: Path) -> BaseStorage:
    """Open a journal file, or begin a new one. ValueError if it is damaged."""
    lock = JournalFileOpenLock(str(path), grace_period=GRACE_SECONDS)
    _mend(path, lock)
    try:
        return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))
    except OSError:
        raise
    except Exception:  # for a line that is not JSON, for another record than Optuna's, for one without a field
        raise ValueError(DAMAGED) from None


def _mend(path: Path, lock: JournalFileOpenLock) -> None:
    """Remove an incomplete last line that a killed process left. Lines after it could not be read.

    Optuna reads a whole last line that is not JSON as one that is still being written, and fails at the next line. So
    it is checked here (ValueError), while no process writes.
    """
    if not path.exists():
        return
    if not path.is_file():
        raise ValueError("not a regular file")
    with path.open("rb") as file:
        head = file.read(len(HEAD))
    if not HEAD.startswith(head):
        raise ValueError("not an Optuna journal")
    lock.acquire()
    try:
        with path.open("rb+") as file:
            data = file.read()
            if data and not data.endswith(b"\n"):
                data = data[: data.rfind(b"\n") + 1]
                file.truncate(len(data))
        if data:
            _check_record(data[data.rfind(b"\n", 0, -1) + 1 :])
    finally:
        lock.release()


def _check_record(line: bytes) -> None:
    """Check that a line of a journal is JSON (ValueError)."""
    try:
        json.loads(line)
    except ValueError:
        raise ValueError(DAMAGED) from None


def journal(folder: Path, table: Path, resume: bool) -> Path:
    """The path of the journal of a run without --storage: a new one, or with ``resume`` the last one of the table.

    If the journal is a new one, the table's older journals are deleted unless their process still runs.
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
