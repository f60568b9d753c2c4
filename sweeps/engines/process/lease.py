"""A lease on a server's processes, and the guard that holds it.

The guard is a small process of its own between owner and server: whatever ends the owner (SIGKILL too), the guard ends
the server with every descendant, daemonised ones included. Whatever ends the guard, its lease file tells the next start
what may be left. A process is its pid and start time, a child, or a bearer of the lease's mark: never a name.

This file is also the guard's program, run by its path under an isolated interpreter: standard library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

MARK = "SPECSWEEP_LEASE"
"""Environment variable that every process of the server inherits; its value is the lease's id."""

_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
_POLL_S = 0.05
_ORPHAN_GRACE_S = 2.0  # for what outlives a stopped server, such as the resource tracker that frees its shared memory
_FIRST_RECORD_S, _LAST_RECORD_S = 0.5, 30.0
SCRATCH_PREFIX = "server-"
"""Begins the name of every server's own folder, which lies beside the folder of the leases."""


class LeaseError(ValueError):
    """A file that is no lease of this user: another owner, a link, or not what a guard writes."""


class Identity(NamedTuple):
    """One process of this boot: pids are used again, pid and start time are not."""

    pid: int
    started: int
    """Clock ticks after boot."""


@dataclass(frozen=True, slots=True)
class Lease:
    """What must not outlive an owner, as it stands in the lease file."""

    lease_id: str
    host: str
    boot: str
    """Boot id and pid namespace: elsewhere the pids mean nothing."""
    guard: Identity
    server: Identity | None = None
    recorded: tuple[Identity, ...] = ()
    """Descendants seen so far: finds those that erased their environment and lost their parent."""
    scratch: str | None = None
    """Folder of the server's own files; goes with the last of its processes."""
    owner: Identity | None = None

    def write(self, path: Path) -> None:
        temporary = path.with_suffix(".tmp")
        fields = {name: getattr(self, name) for name in self.__slots__}
        temporary.write_text(json.dumps(fields), encoding="utf-8")
        temporary.rename(path)

    @classmethod
    def read(cls, path: Path) -> Lease:
        """Raises FileNotFoundError, and LeaseError for a file that is not this user's own lease."""
        try:
            fields = json.loads(_own_text(path))
            return cls(
                lease_id=_text(fields["lease_id"]),
                host=_text(fields["host"]),
                boot=_text(fields["boot"]),
                guard=_identity(fields["guard"]),
                server=None if fields["server"] is None else _identity(fields["server"]),
                recorded=tuple(map(_identity, fields["recorded"])),
                scratch=None if fields.get("scratch") is None else _text(fields["scratch"]),
                owner=None if fields.get("owner") is None else _identity(fields["owner"]),
            )
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise LeaseError(f"{path}: not a lease of this user: {error}") from error

    @property
    def is_of_this_boot(self) -> bool:
        return self.boot.split(" ")[0] == this_boot().split(" ")[0]

    def end(self, path: Path) -> None:
        """Nothing of the server is left: remove its folder, then the lease file.

        A folder that does not lie beside the folder of `path`, under a server's name, is not touched.
        """
        if self.scratch:
            folder = Path(self.scratch)
            if folder.parent == path.absolute().parent.parent and folder.name.startswith(SCRATCH_PREFIX):
                shutil.rmtree(folder, ignore_errors=True)
        path.unlink(missing_ok=True)


def _own_text(path: Path) -> str:
    """A regular file of this user, not reached through a link in its last part."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(error.strerror) from error
    about = os.fstat(descriptor)
    if about.st_uid != os.geteuid() or not stat.S_ISREG(about.st_mode):
        os.close(descriptor)
        raise ValueError(f"a file of user {about.st_uid}" if stat.S_ISREG(about.st_mode) else "not a plain file")
    with os.fdopen(descriptor, encoding="utf-8") as file:
        return file.read()


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"wanted text, got {type(value).__name__}")
    return value


def _identity(value: object) -> Identity:
    match value:
        case [int(pid), int(started)]:
            return Identity(pid, started)
        case _:
            raise TypeError("wanted a pid and a start time")


def this_boot() -> str:
    """Boot id and pid namespace."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot_id} {Path('/proc/self/ns/pid').readlink()}"


def process_table() -> dict[Identity, int]:
    """Every live process (no zombies) and its parent's pid."""
    table = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (row := _stat(int(entry.name))) is not None:
            table[row[0]] = row[1]
    return table


def identify(pid: int) -> Identity | None:
    """None if no live process has this pid."""
    row = _stat(pid)
    return None if row is None else row[0]


def _stat(pid: int) -> tuple[Identity, int] | None:
    try:
        row = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = row.rpartition(b")")[2].split()  # the process name before it may hold blanks and brackets
    return None if fields[0] in b"ZX" else (Identity(pid, int(fields[19])), int(fields[1]))


def descendants(root: int, table: dict[Identity, int]) -> set[Identity]:
    """Children of pid `root` in `table`, their children, and so on."""
    children: dict[int, list[Identity]] = {}
    for identity, parent in table.items():
        children.setdefault(parent, []).append(identity)
    found: set[Identity] = set()
    todo = [root]
    while todo:
        for child in children.get(todo.pop(), []):
            found.add(child)
            todo.append(child.pid)
    return found


def members(lease: Lease) -> set[Identity]:
    """The live processes of a lease without its guard: descendants, recorded ones, bearers of the mark."""
    table = process_table()
    mark = f"{MARK}={lease.lease_id}".encode()
    known = {identity for identity in (lease.server, *lease.recorded) if identity in table}
    known |= {identity for identity in table if _bears(identity.pid, mark)}
    if lease.guard in table:
        known |= descendants(lease.guard.pid, table)
    for identity in tuple(known):
        known |= descendants(identity.pid, table)
    return known - {lease.guard}


def _bears(pid: int, mark: bytes) -> bool:
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # another user's, or gone
        return False


def send(identities: set[Identity], number: signal.Signals) -> None:
    """Signal those of `identities` that still are who they were."""
    for identity in identities:
        if identify(identity.pid) == identity:
            try:
                os.kill(identity.pid, number)
            except ProcessLookupError:
                continue


class _Guard:
    """The guard's process: starts one server, waits for the end of owner or server, leaves nothing."""

    def __init__(self, request: dict[str, Any]) -> None:
        me = identify(os.getpid())
        assert me is not None
        self.request = request
        self.path = Path(request["lease_path"])
        self.lease = Lease(
            request["lease_id"],
            os.uname().nodename,
            this_boot(),
            me,
            scratch=request["scratch"],
            owner=identify(request["owner_pid"]),
        )
        self.server_pid = 0
        self.returncode: int | None = None
        self.asked = False

    def start(self) -> None:
        self.lease.write(self.path)  # before there is anything to lose
        with Path(self.request["log_path"]).open("ab") as log:
            # Kept, because a Popen that is collected reaps its child: `reap` would never see the return code.
            self.server = subprocess.Popen(
                self.request["command"],
                env=self.request["env"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(_die_with, os.getpid()),
            )
        self.server_pid = self.server.pid
        self.lease = replace(self.lease, server=identify(self.server_pid))
        self.lease.write(self.path)
        _tell(guard=self.lease.guard, server_pid=self.server_pid)

    def watch(self) -> None:
        """Return once the server has ended, the owner is gone, or someone asks for the end."""
        wake, wake_write = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._ask)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        sources = [0, wake, *_owner(self.request["owner_pid"])]
        pause_s = _FIRST_RECORD_S
        next_record_s = time.monotonic() + pause_s
        while True:
            self.reap()
            if self.asked or self.returncode is not None:
                return
            ready, _, _ = select.select(sources, [], [], max(0.0, next_record_s - time.monotonic()))
            if wake in ready:
                os.read(wake, 4096)
            if set(ready) - {wake}:
                return
            if time.monotonic() >= next_record_s:
                self._record()
                pause_s = min(2 * pause_s, _LAST_RECORD_S)
                next_record_s = time.monotonic() + pause_s

    def end(self) -> None:
        """Politely to the server, then to what it left, then SIGKILL to all until nothing is there."""
        deadline = time.monotonic() + self.request["grace_s"]
        if self.returncode is None and self.lease.server:
            send({self.lease.server}, signal.SIGTERM)
            self._wait(deadline, lambda: self.returncode is not None)
        if self.returncode is not None and self._members():
            send(self._members(), signal.SIGTERM)
            self._wait(min(deadline, time.monotonic() + _ORPHAN_GRACE_S), lambda: not self._members())
        while left := self._members():  # one in uninterruptible sleep keeps guard and lease here
            send(left, signal.SIGKILL)
            self._record()
            self._wait(time.monotonic() + 1.0, lambda: not self._members())
        self.reap()
        self.lease.end(self.path)

    def reap(self) -> None:
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self.server_pid:
                    self.returncode = os.waitstatus_to_exitcode(ended[1])
                    self._keep_warnings()
                    _tell(returncode=self.returncode)
        except ChildProcessError:
            return

    def _keep_warnings(self) -> None:
        """NCCL's WARN lines into the server's log: its own files go with the scratch folder."""
        if not self.request["scratch"]:
            return
        try:
            with Path(self.request["log_path"]).open("ab") as log:
                for path in sorted(Path(self.request["scratch"]).glob("nccl*.log")):
                    lines = path.read_bytes().splitlines()
                    log.writelines(line[:1000] + b"\n" for line in lines if b"NCCL WARN" in line)
        except OSError:  # a full disk must not keep the end of the server from being told
            return

    def _members(self) -> set[Identity]:
        return members(self.lease)

    def _record(self) -> None:
        seen = tuple(sorted(self._members()))
        if seen == self.lease.recorded:
            return
        recorded = replace(self.lease, recorded=seen)
        try:
            recorded.write(self.path)
        except OSError:  # a full disk must not end the server; the record before it stays
            return
        self.lease = recorded

    def _wait(self, deadline: float, done: Callable[[], bool]) -> None:
        while not done() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            self.reap()

    def _ask(self, *_: object) -> None:
        self.asked = True


def _die_with(guard_pid: int) -> None:
    """In the server before exec: SIGKILL at the guard's death, and no signal mask from whoever started the owner."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    with suppress(PermissionError):  # Ray starts its workers at 15; without the right to it the ranks report theirs
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != guard_pid:
        os._exit(1)


def _owner(pid: int) -> tuple[int, ...]:
    """A descriptor that turns readable at the owner's death, should a fork of it keep the lifeline open."""
    try:
        return (os.pidfd_open(pid),)
    except OSError:  # the owner is dead already (the lifeline shows it), or Linux before 5.3
        return ()


def _tell(**news: object) -> None:
    try:
        os.write(1, json.dumps(news).encode() + b"\n")
    except BrokenPipeError:  # no owner left to hear it
        return


def main() -> None:
    """Read one request line from stdin, which then is the lifeline: its end asks for the server's."""
    if os.fork():  # a grandchild of the owner: who kills the owner's children does not find it
        os._exit(0)
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1)
    line = sys.stdin.buffer.readline()
    if not line:
        return
    guard = _Guard(json.loads(line))
    try:
        guard.start()
    except (OSError, ValueError) as error:  # ValueError: a NUL in a word of the command or in a variable
        guard.lease.end(guard.path)
        _tell(error=str(error))
        return
    guard.watch()
    guard.end()


if __name__ == "__main__":
    main()
