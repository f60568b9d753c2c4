"""A server process that cannot outlive its owner, and the reaping of what an earlier one left."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweeps.engines.base import EngineError
from sweeps.engines.process import lease
from sweeps.engines.process.lease import Identity, Lease, LeaseError

_SCRATCH_NAME = re.compile(re.escape(lease.SCRATCH_PREFIX) + r"(\d{1,10})-(\d{1,18})-(?:(\d{1,18})-)?\w+")
_START_S = 60.0
_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Reaped:
    """What `reap_leases` found of earlier servers, by pid."""

    killed: tuple[int, ...]
    survivors: tuple[int, ...]
    """Did not die of SIGKILL in time: their lease stays."""


class ServerProcess:
    """One server under its guard. Not thread-safe; without its owner (or a reference to it) the server ends."""

    def __init__(self, guard: subprocess.Popen[bytes], lease_path: Path, lease_id: str) -> None:
        self._guard = guard
        self._lease_path = lease_path
        self._lease_id = lease_id
        self._unread = b""
        self._returncode: int | None = None
        self._gone = False
        self._lease: Lease | None = None
        self.pid = 0
        self.guard_pid = 0

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log_path: Path,
        lease_dir: Path,
        grace_s: float,
        scratch: Path | None = None,
    ) -> ServerProcess:
        """Run `command` with exactly `env` (and the lease's mark); its output is appended to `log_path`.

        Args:
            lease_dir: on a file system of this node; made if it is absent.
            grace_s: from the polite signal to SIGKILL, whoever asks for the end.
            scratch: folder that is removed once no process of the server is left, whatever became of the owner.

        Raises EngineError (`engine_unavailable`) if the command cannot be run.
        """
        lease_dir.mkdir(parents=True, exist_ok=True)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        lease_id = uuid.uuid4().hex
        lease_path = lease_dir / f"{lease_id}.json"
        with log_path.open("ab") as log:
            guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(lease.__file__).resolve())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        server = cls(guard, lease_path, lease_id)
        # SPT_NOENV: setproctitle would overwrite the environment block that bears the mark
        marked = {"SPT_NOENV": "1", **env, lease.MARK: lease_id}
        request = {
            "command": [str(part) for part in command],
            "env": marked,
            "log_path": str(log_path),
            "lease_path": str(lease_path),
            "lease_id": lease_id,
            "grace_s": grace_s,
            "owner_pid": os.getpid(),
            "scratch": None if scratch is None else str(scratch.absolute()),
        }
        server._request(request)
        return server

    def _request(self, request: dict[str, Any]) -> None:
        assert self._guard.stdin is not None
        self._guard.stdin.write(json.dumps(request).encode() + b"\n")
        self._guard.stdin.flush()
        self._guard.wait()  # only the first half of its double fork
        deadline = time.monotonic() + _START_S
        error = f"its guard did not answer within {_START_S:.0f} s"
        while not self._gone and time.monotonic() < deadline:
            for news in self._news(deadline - time.monotonic()):
                if "server_pid" in news:
                    self.pid = news["server_pid"]
                    guard = Identity(*news["guard"])
                    self.guard_pid = guard.pid
                    self._lease = Lease(
                        self._lease_id, os.uname().nodename, lease.this_boot(), guard, lease.identify(self.pid)
                    )
                    return
                error = news.get("error", error)
        self._close()
        raise EngineError(
            f"server not started: {error} (command: {request['command'][0]})", stage="load", kind="engine_unavailable"
        )

    def returncode(self) -> int | None:
        """None while the server runs; negative for a signal, also if the guard died and took it along."""
        list(self._news(0.0))
        return self._returncode

    def stop(self, timeout_s: float) -> None:
        """End the server with all of its descendants and wait at most `timeout_s`; `survivors` lists what is left.

        Idempotent. Polite first; SIGKILL after the grace that `start` was given.
        """
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        deadline = time.monotonic() + timeout_s
        while not self._gone and time.monotonic() < deadline:
            list(self._news(deadline - time.monotonic()))
        if self._gone and self._lease_path.exists():  # the guard was killed before its work was done
            _reap(self._lease_path, max(deadline - time.monotonic(), 1.0), guard_ended=True)
        if self._gone:
            self._close()

    def survivors(self) -> list[int]:
        """Pids of the server's live processes, wherever they went; the server's own included."""
        return [] if self._lease is None else sorted(identity.pid for identity in lease.members(self._current_lease()))

    def _current_lease(self) -> Lease:
        assert self._lease is not None
        try:
            return Lease.read(self._lease_path)
        except (FileNotFoundError, LeaseError):
            return self._lease

    def _news(self, timeout_s: float) -> list[dict[str, Any]]:
        """What the guard has told since the last call; waits up to `timeout_s` for the first word."""
        pipe = self._guard.stdout
        assert pipe is not None
        if self._gone or pipe.closed or not select.select([pipe], [], [], max(timeout_s, 0.0))[0]:
            return []
        data = os.read(pipe.fileno(), 65536)
        *lines, self._unread = (self._unread + data).split(b"\n")
        news = [json.loads(line) for line in lines]
        for item in news:
            self._returncode = item.get("returncode", self._returncode)
        if not data:  # end of file: the guard is no more, and the server neither
            self._gone = True
            if self._returncode is None:
                self._returncode = -int(signal.SIGKILL)
        return news

    def _close(self) -> None:
        for pipe in (self._guard.stdin, self._guard.stdout):
            if pipe is not None:
                pipe.close()


def reap_leases(lease_dir: Path, *, timeout_s: float = 30.0) -> Reaped:
    """Kill what servers of this node left whose guard is gone; wait for the guards whose owner is gone.

    Leases with a live owner are another's, and so are those of other hosts and of other pid namespaces of this boot.
    Those of an earlier boot are removed. What is no lease of this user is not acted on.
    """
    killed: list[int] = []
    survivors: list[int] = []
    for path in sorted(lease_dir.glob("*.json")):
        reaped = _reap(path, timeout_s, guard_ended=False)
        killed += reaped.killed
        survivors += reaped.survivors
    return Reaped(killed=tuple(killed), survivors=tuple(survivors))


def scratch_folder(parent: Path) -> Path:
    """A new folder for one server of this process; its name says whose it is: pid, start time, pid namespace."""
    me = lease.identify(os.getpid())
    assert me is not None
    name = f"{lease.SCRATCH_PREFIX}{me.pid}-{me.started}-{_pid_namespace()}-"
    return Path(tempfile.mkdtemp(prefix=name, dir=parent))


def reap_scratch(parent: Path, lease_dir: Path) -> None:
    """Remove folders whose process died before a guard had its lease on them.

    Folders of another pid namespace stay until the next boot: whether their process lives cannot be seen from here.
    """
    leased = {left.scratch for left in map(_read_lease, lease_dir.glob("*.json")) if left is not None}
    for folder in parent.iterdir() if parent.is_dir() else ():
        found = _SCRATCH_NAME.fullmatch(folder.name)
        if found is None or str(folder.absolute()) in leased:
            continue
        pid, started, namespace = found.groups()
        elsewhere = namespace is not None and int(namespace) != _pid_namespace() and not _is_of_an_earlier_boot(folder)
        if not elsewhere and not _lives(Identity(int(pid), int(started))):
            shutil.rmtree(folder, ignore_errors=True)


def _pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def _is_of_an_earlier_boot(folder: Path) -> bool:
    booted_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return folder.lstat().st_ctime < booted_s - 1.0


def _read_lease(path: Path) -> Lease | None:
    """None if its guard has just finished, or if the file is no lease of this user."""
    try:
        return Lease.read(path)
    except (FileNotFoundError, LeaseError):
        return None


def _reap(path: Path, timeout_s: float, *, guard_ended: bool) -> Reaped:
    nothing = Reaped(killed=(), survivors=())
    left = _read_lease(path)
    if left is None or left.host != os.uname().nodename:
        return nothing
    if not left.is_of_this_boot:
        left.end(path)
        return nothing
    if left.boot != lease.this_boot():  # another container of this host: its pids mean nothing here
        return nothing
    deadline = time.monotonic() + timeout_s
    if not guard_ended and _lives(left.guard):
        if left.owner is not None and _lives(left.owner):
            return nothing
        while _lives(left.guard):  # at work on what its owner left
            if time.monotonic() > deadline:
                return Reaped(killed=(), survivors=tuple(sorted(each.pid for each in lease.members(left))))
            time.sleep(_POLL_S)
        return _reap(path, max(deadline - time.monotonic(), 1.0), guard_ended=True)
    killed: set[Identity] = set()
    while (alive := lease.members(left)) and time.monotonic() < deadline:
        lease.send(alive, signal.SIGKILL)
        killed |= alive
        time.sleep(_POLL_S)
    if not alive:
        left.end(path)
    return Reaped(
        killed=tuple(sorted(identity.pid for identity in killed - alive)),
        survivors=tuple(sorted(identity.pid for identity in alive)),
    )


def _lives(identity: Identity) -> bool:
    return lease.identify(identity.pid) == identity
