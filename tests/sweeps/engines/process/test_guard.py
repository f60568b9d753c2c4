"""Real processes: whatever ends owner, guard or server, nothing of the server is left and nobody else is touched."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sweeps.engines.base import EngineError
from sweeps.engines.process import lease
from sweeps.engines.process.guard import Reaped, ServerProcess, reap_leases, reap_scratch, scratch_folder

ROOT = Path(__file__).parents[4]
PREPARE = "import os, signal, socket, subprocess, sys, time\n"
SLEEP = PREPARE + "print('up', flush=True)\ntime.sleep(600)"
STUBBORN = PREPARE + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(600)"
DAEMON = (
    PREPARE
    + """
port = socket.create_server(('127.0.0.1', 0))
told, tell = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print('daemon', os.getpid(), port.getsockname()[1], flush=True)
        os.write(tell, b'.')
        time.sleep(600)
    os._exit(0)
os.wait()
os.read(told, 1)  # a daemon that is killed before it speaks would be waited for in vain
print('up', flush=True)
port.close()
time.sleep(600)
"""
)


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"waited 20 s for: {what}"
        time.sleep(0.02)


class Bench:
    def __init__(self, folder: Path) -> None:
        self.log = folder / "server.log"
        self.leases = folder / "leases"
        self.scratch = folder / "server-1"

    def start(self, script: str, *, grace_s: float = 5.0, env: dict[str, str] | None = None) -> ServerProcess:
        self.scratch.mkdir(exist_ok=True)
        (self.scratch / "commands-0").touch()
        return ServerProcess.start(
            [sys.executable, "-I", "-S", "-c", script],
            env=env or {},
            log_path=self.log,
            lease_dir=self.leases,
            grace_s=grace_s,
            scratch=self.scratch,
        )

    def up(self) -> None:
        until(lambda: "up\n" in self.text(), "the server's first words")

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def daemon(self) -> tuple[int, int]:
        until(lambda: any(line.startswith("daemon") for line in self.text().splitlines()), "the daemon's first words")
        pid, port = next(line for line in self.text().splitlines() if line.startswith("daemon")).split()[1:]
        return int(pid), int(port)

    def no_lease(self) -> bool:
        """Nor the server's own files: they go before the lease does."""
        return not list(self.leases.glob("*")) and not self.scratch.exists()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    folder = tmp_path / "with blank (and bracket)"
    folder.mkdir()
    yield Bench(folder)
    for path in (folder / "leases").glob("*.json"):
        left = lease.Lease.read(path)
        lease.send(lease.members(left) | {left.guard}, signal.SIGKILL)


def alive(pid: int) -> bool:
    return lease.identify(pid) is not None


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_stop_ends_a_polite_server_and_is_idempotent(bench: Bench) -> None:
    server = bench.start(SLEEP)
    bench.up()
    assert server.returncode() is None
    assert server.survivors() == [server.pid]
    server.stop(20)
    server.stop(20)
    assert server.returncode() == -signal.SIGTERM
    assert server.survivors() == []
    until(lambda: not alive(server.guard_pid), "the guard's end")
    assert bench.no_lease()


def test_a_server_that_ignores_sigterm_is_killed_after_the_grace(bench: Bench) -> None:
    server = bench.start(STUBBORN, grace_s=0.3)
    bench.up()
    server.stop(20)
    assert server.returncode() == -signal.SIGKILL
    assert not alive(server.pid)


def test_a_daemonised_grandchild_and_its_port_go_too(bench: Bench) -> None:
    server = bench.start(DAEMON, grace_s=0.5)
    bench.up()
    pid, port = bench.daemon()
    assert set(server.survivors()) == {server.pid, pid}
    assert not port_is_free(port)
    server.stop(20)
    assert not alive(pid)
    assert port_is_free(port)
    assert bench.no_lease()


def test_a_server_that_exits_by_itself_tells_its_code_and_its_daemon_goes(bench: Bench) -> None:
    server = bench.start(DAEMON.removesuffix("time.sleep(600)\n") + "sys.exit(3)")
    until(lambda: server.returncode() is not None, "the end of the server")
    assert server.returncode() == 3
    server.stop(20)
    assert not alive(bench.daemon()[0])
    assert bench.no_lease()


def test_the_server_gets_exactly_its_environment_and_the_mark(bench: Bench) -> None:
    server = bench.start(PREPARE + "print(dict(os.environ))\nprint('up', flush=True)", env={"NCCL_PROTO": "LL"})
    bench.up()
    server.stop(20)
    seen = eval(bench.text().splitlines()[0])
    seen.pop("LC_CTYPE", None)  # python's own locale coercion, in the server's interpreter
    assert seen == {"NCCL_PROTO": "LL", "SPT_NOENV": "1", lease.MARK: seen[lease.MARK]}


def test_a_command_that_does_not_exist_is_an_engine_error(bench: Bench) -> None:
    with pytest.raises(EngineError, match=r"No such file.*no-such-python") as raised:
        ServerProcess.start(["/no-such-python"], env={}, log_path=bench.log, lease_dir=bench.leases, grace_s=1.0)
    assert raised.value.kind == "engine_unavailable"
    assert bench.no_lease()


OWNER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from sweeps.engines.process.guard import ServerProcess
folder = Path(sys.argv[2])
scratch = folder / 'server-1'
scratch.mkdir()
server = ServerProcess.start([sys.executable, '-I', '-S', '-c', sys.argv[3]], env={}, log_path=folder / 'server.log',
                             lease_dir=folder / 'leases', grace_s=0.3, scratch=scratch)
print(server.guard_pid, server.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_killed_owner(bench: Bench, number: signal.Signals) -> None:
    command = [sys.executable, "-c", OWNER, str(ROOT), str(bench.log.parent), DAEMON]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    try:
        guard_pid, server_pid = map(int, owner.stdout.readline().split())
        bench.up()
    finally:
        owner.send_signal(number)
        owner.wait()
        owner.stdout.close()
    until(bench.no_lease, "the guard's work")
    until(lambda: not alive(guard_pid), "the guard's end")
    assert not alive(server_pid)
    assert not alive(bench.daemon()[0])


UNDER_RAY = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
os.environ.update(RAY_AUTH_MODE='disabled', RAY_USAGE_STATS_ENABLED='0')
import ray
from pathlib import Path
from sweeps.engines.process.guard import ServerProcess
ray.init(address='local', num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level='error')

@ray.remote
class Actor:
    def start(self, folder, script):
        (folder / 'server-1').mkdir()
        self.server = ServerProcess.start([sys.executable, '-I', '-S', '-c', script], env={},
                                          log_path=folder / 'server.log', lease_dir=folder / 'leases', grace_s=0.3,
                                          scratch=folder / 'server-1')
        return os.getppid(), self.server.guard_pid, self.server.pid

actor = Actor.remote()
print(*ray.get(actor.start.remote(Path(sys.argv[2]), sys.argv[3])), flush=True)
while True:
    time.sleep(0.2)
    try:
        os.waitpid(-1, os.WNOHANG)  # as a node's init: to Ray's workers a zombie raylet lives
    except ChildProcessError:
        pass
"""


def test_nothing_outlives_a_killed_raylet(bench: Bench) -> None:
    """An actor is its raylet's child, and the guard is nobody's: it sees its owner die and does its work."""
    command = [sys.executable, "-c", UNDER_RAY, str(ROOT), str(bench.log.parent), DAEMON]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert driver.stdout is not None
    try:
        raylet_pid, guard_pid, server_pid = map(int, driver.stdout.readline().split())
        bench.up()
        os.kill(raylet_pid, signal.SIGKILL)
        until(bench.no_lease, "the guard's work")
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()
    until(lambda: not alive(guard_pid), "the guard's end")
    assert not alive(server_pid)
    assert not alive(bench.daemon()[0])


def test_a_new_start_waits_for_a_guard_that_is_still_at_work(bench: Bench) -> None:
    """Else a new server would find the GPUs of the last one in use."""
    command = [sys.executable, "-c", OWNER.replace("grace_s=0.3", "grace_s=1.5"), str(ROOT), str(bench.log.parent)]
    owner = subprocess.Popen([*command, STUBBORN], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    try:
        guard_pid, server_pid = map(int, owner.stdout.readline().split())
        bench.up()
        assert reap_leases(bench.leases) == Reaped(killed=(), survivors=()), "its owner lives"
        assert alive(server_pid)
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    assert reap_leases(bench.leases, timeout_s=0.2) == Reaped(killed=(), survivors=(server_pid,))
    assert alive(guard_pid)
    assert reap_leases(bench.leases) == Reaped(killed=(), survivors=())
    assert not alive(server_pid)
    assert bench.no_lease()


def test_a_stop_that_its_owner_does_not_live_to_see_is_finished(bench: Bench) -> None:
    """As Tune does: it kills an actor whose server takes longer to stop than Tune waits."""
    stopping = OWNER.replace("grace_s=0.3", "grace_s=1.5").replace(
        "time.sleep(600)", "input()\nprint('stopping', flush=True)\nserver.stop(60)\nprint('done', flush=True)"
    )
    command = [sys.executable, "-c", stopping, str(ROOT), str(bench.log.parent), STUBBORN]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdin is not None
    try:
        guard_pid, server_pid = map(int, owner.stdout.readline().split())
        bench.up()
        owner.stdin.write("\n")
        owner.stdin.flush()
        assert owner.stdout.readline() == "stopping\n"
        time.sleep(0.3)
    finally:
        owner.kill()
        rest = owner.communicate()[0]
    assert rest == "", "killed before its stop had ended"
    until(bench.no_lease, "the guard's work")
    until(lambda: not alive(guard_pid), "the guard's end")
    assert not alive(server_pid)


def test_a_fork_of_the_owner_that_keeps_the_lifeline_open_does_not_save_the_server(bench: Bench) -> None:
    forking = OWNER.replace("time.sleep(600)", "import os\nif pid := os.fork(): print(pid, flush=True)\ntime.sleep(60)")
    command = [sys.executable, "-c", forking, str(ROOT), str(bench.log.parent), SLEEP]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    try:
        server_pid = int(owner.stdout.readline().split()[1])
        fork_pid = int(owner.stdout.readline())
        bench.up()
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    until(lambda: not alive(server_pid), "the server's end")
    assert alive(fork_pid)
    os.kill(fork_pid, signal.SIGKILL)
    until(bench.no_lease, "the guard's work")


def test_a_guard_that_is_asked_to_end_takes_its_server_along(bench: Bench) -> None:
    server = bench.start(SLEEP)
    bench.up()
    os.kill(server.guard_pid, signal.SIGTERM)
    until(lambda: server.returncode() is not None, "the server's end")
    assert server.returncode() == -signal.SIGTERM
    server.stop(20)
    assert bench.no_lease()


def test_what_a_killed_guard_left_is_reaped_and_bystanders_live(bench: Bench) -> None:
    twin = subprocess.Popen([sys.executable, "-I", "-S", "-c", SLEEP], stdout=subprocess.DEVNULL)
    server, neighbour = bench.start(DAEMON), bench.start(SLEEP)
    bench.up()
    until(lambda: "daemon" in bench.text(), "the daemon")
    pid, _ = bench.daemon()
    os.kill(server.guard_pid, signal.SIGKILL)
    until(lambda: not alive(server.pid), "the server, which dies with its guard")
    assert alive(pid)
    reaped = reap_leases(bench.leases)
    assert reaped.killed == (pid,)
    assert reaped.survivors == ()
    assert not alive(pid)
    assert alive(neighbour.pid)
    assert twin.poll() is None
    assert server.returncode() == -signal.SIGKILL
    server.stop(1)
    neighbour.stop(20)
    assert twin.poll() is None
    twin.kill()
    twin.wait()
    assert bench.no_lease()


def test_the_owner_itself_clears_up_after_a_killed_guard(bench: Bench) -> None:
    server = bench.start(DAEMON)
    bench.up()
    os.kill(server.guard_pid, signal.SIGKILL)
    server.stop(20)
    assert server.survivors() == []
    assert not alive(bench.daemon()[0])
    assert bench.no_lease()


def test_a_recorded_process_without_mark_and_parent_is_found(bench: Bench) -> None:
    """As schedulers that overwrote their environment block: only the lease file knows them."""
    text = "import os, time; print('daemon', os.getpid(), 0, flush=True); time.sleep(600)"
    become = f"os.execve(sys.executable, [sys.executable, '-I', '-S', '-c', {text!r}], {{}})"
    server = bench.start(DAEMON.replace("print('daemon', os.getpid(), port.getsockname()[1], flush=True)", become))
    until(lambda: "daemon" in bench.text(), "the daemon")
    pid, _ = bench.daemon()
    until(lambda: any(str(pid) in path.read_text() for path in bench.leases.glob("*.json")), "the record of the daemon")
    os.kill(server.guard_pid, signal.SIGKILL)
    until(lambda: not alive(server.pid), "the server")
    assert reap_leases(bench.leases).killed == (pid,)
    server.stop(1)


def test_a_reused_pid_is_a_bystander(bench: Bench) -> None:
    me = lease.identify(os.getpid())
    assert me is not None
    stranger = lease.Identity(me.pid, me.started - 1)
    bench.leases.mkdir()
    left = lease.Lease("0" * 32, os.uname().nodename, lease.this_boot(), stranger, stranger, (stranger,))
    left.write(bench.leases / "old.json")
    assert reap_leases(bench.leases).killed == ()
    assert bench.no_lease()


def test_folders_of_dead_processes_go_and_those_of_live_ones_or_under_a_lease_stay(tmp_path: Path) -> None:
    me = lease.identify(os.getpid())
    assert me is not None
    own, leased = scratch_folder(tmp_path), tmp_path / f"server-{me.pid}-{me.started - 1}-leased"
    dead = tmp_path / f"server-{me.pid}-{me.started - 1}-dead"
    for folder in (leased, dead):
        folder.mkdir()
        (folder / "commands-0").touch()
    (tmp_path / "leases").mkdir()
    held = lease.Lease("0" * 32, os.uname().nodename, lease.this_boot(), me, scratch=str(leased))
    held.write(tmp_path / "leases" / "held.json")
    reap_scratch(tmp_path, tmp_path / "leases")
    assert sorted(path.name for path in tmp_path.glob("server-*")) == sorted([own.name, leased.name])


@pytest.mark.parametrize(("host", "stays"), [("another-host", True), (os.uname().nodename, False)])
def test_leases_of_other_hosts_stay_and_of_earlier_boots_go(bench: Bench, host: str, *, stays: bool) -> None:
    bench.leases.mkdir()
    nobody = lease.Identity(os.getpid(), 0)
    lease.Lease("0" * 32, host, "earlier boot", nobody, nobody).write(bench.leases / "old.json")
    assert reap_leases(bench.leases).killed == ()
    assert (bench.leases / "old.json").exists() is stays


def test_containers_of_one_host_leave_each_other_alone(bench: Bench) -> None:
    """Same host name and boot, another pid namespace: the pids of a lease mean nothing here; its server may live."""
    bench.leases.mkdir()
    bench.scratch.mkdir()
    boot_id = lease.this_boot().split(" ")[0]
    nobody = lease.Identity(os.getpid(), 0)
    left = lease.Lease("0" * 32, os.uname().nodename, f"{boot_id} pid:[1]", nobody, nobody, scratch=str(bench.scratch))
    left.write(bench.leases / "other.json")
    elsewhere = bench.log.parent / f"server-{os.getpid()}-0-1-abc"
    elsewhere.mkdir()
    assert reap_leases(bench.leases) == Reaped(killed=(), survivors=())
    reap_scratch(bench.log.parent, bench.leases)
    assert (bench.leases / "other.json").exists()
    assert bench.scratch.exists()
    assert elsewhere.exists()


@pytest.mark.parametrize("name", ["precious", "server-1/precious", "server-1/..", "../server-1", "."])
def test_a_lease_removes_no_folder_but_a_scratch_folder_beside_it(bench: Bench, name: str) -> None:
    precious = bench.log.parent / "precious"
    for folder in (bench.leases, precious, bench.scratch / "precious"):
        folder.mkdir(parents=True)
        (folder / "thesis.txt").touch()
    nobody = lease.Identity(os.getpid(), 0)
    forged = lease.Lease("0" * 32, os.uname().nodename, "earlier boot", nobody, scratch=f"{bench.log.parent}/{name}")
    forged.write(bench.leases / "forged.json")
    reap_leases(bench.leases)
    assert not (bench.leases / "forged.json").exists()
    assert all((folder / "thesis.txt").exists() for folder in (precious, bench.scratch / "precious"))


def test_a_lease_behind_a_link_and_one_that_is_no_file_are_not_acted_on(bench: Bench) -> None:
    bench.leases.mkdir()
    nobody = lease.Identity(os.getpid(), 0)
    outside = bench.log.parent / "outside.json"
    lease.Lease("0" * 32, os.uname().nodename, "earlier boot", nobody).write(outside)
    (bench.leases / "link.json").symlink_to(outside)
    (bench.leases / "folder.json").mkdir()
    os.mkfifo(bench.leases / "pipe.json")
    assert reap_leases(bench.leases) == Reaped(killed=(), survivors=())
    assert sorted(path.name for path in bench.leases.iterdir()) == ["folder.json", "link.json", "pipe.json"]
    bench.leases.rename(bench.log.parent / "read")


_LEASE = {
    "lease_id": "0" * 32,
    "host": os.uname().nodename,
    "boot": "b",
    "guard": [1, 1],
    "server": None,
    "recorded": [],
}
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner, max_size=3)
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.binary()
    | st.fixed_dictionaries({}, optional=dict.fromkeys((*_LEASE, "scratch", "owner"), _JSON)).map(
        lambda fields: json.dumps({**_LEASE, **fields, "host": "another"}).encode()
    )
)
def test_no_content_of_a_lease_stops_a_launch(bench: Bench, content: bytes) -> None:
    bench.leases.mkdir(exist_ok=True)
    (bench.leases / "some.json").write_bytes(content)
    assert reap_leases(bench.leases) == Reaped(killed=(), survivors=())
    reap_scratch(bench.log.parent, bench.leases)
    (bench.leases / "some.json").unlink()


@pytest.mark.parametrize("name", ["server-a-b-c", "server-1", "server-99999999999999999999-1-x", "server--1-1-x"])
def test_folders_of_other_names_stay(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    reap_scratch(tmp_path, tmp_path / "leases")
    assert (tmp_path / name).exists()


@pytest.mark.parametrize("attempt", range(5))
def test_a_command_that_ends_at_once_tells_its_code(bench: Bench, attempt: int) -> None:
    command = ["/bin/sh", "-c", f"exit {attempt}"]
    server = ServerProcess.start(command, env={}, log_path=bench.log, lease_dir=bench.leases, grace_s=1.0)
    until(lambda: server.returncode() is not None, "the end of the server")
    assert server.returncode() == attempt
    server.stop(20)


def test_a_nul_in_the_command_is_an_engine_error_and_leaves_no_lease(bench: Bench) -> None:
    with pytest.raises(EngineError, match="null byte") as raised:
        ServerProcess.start(["/bin/tr\0ue"], env={}, log_path=bench.log, lease_dir=bench.leases, grace_s=1.0)
    assert raised.value.kind == "engine_unavailable"
    assert bench.no_lease()
