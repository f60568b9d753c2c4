"""A server that speaks SGLang's endpoints and the cycle probe's protocol, and misbehaves on demand.

It is started through the real engine: `engine.launcher` names this file, so that it stands in for the interpreter that
would run the server and gets the server's whole command behind it. Standard library only; nothing here is measured.

Faults are named in the variable STUB_FAULT, several with commas, arguments after a colon:
    crash_at_load, gpu_oom, host_oom, no_algorithm, bad_argument   the ways to die before the port opens
    hang_at_init, hang_at:STAGE, slow_ready:SECONDS     stands still (load, draft_init, capture); or only looks so
    dead_verify                                         /health says 200, a generation never ends
    crash_in_block:N, hang_in_block:N                   dies or stands still inside the N-th generation after the first
    unauthorised                                        answers 401
    ignore_sigterm, daemon                              clings to life; leaves a daemon that holds a port
    override:NAME=VALUE, inject:NAME=VALUE              what the ranks see is not what was asked for
    unread:NAME, protocol:NAME                          NCCL does not read a variable; chooses a protocol of its own
    draft_tokens, draft_inert, wrong_output             runs, but not as asked
    no_handshake, half_cycles                           the probe is absent; its answer is torn
    no_states, states_fit:N                             the server has no states; the memory holds the first N of them
    lie:NAME                                            answers what cannot be true (`stub_lies` lists them)
    talks_at_load                                       never ends loading, and says so all the time
    niceness:N                                          its ranks run at this niceness
    busy:SECONDS                                        says 400 to a flush and 429 to a generation for so long
    set_fails:NAME, set_hangs:NAME                      the communicator of an NCCL set does not come up; it hangs
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(sys.argv[0]).parent))  # the stub runs with -I, and from a string in one test
if __package__:
    from tests.stub_lies import CYCLES, LIES, TOKENS, Stream
else:  # run by its path, as the server
    from stub_lies import CYCLES, LIES, TOKENS, Stream  # type: ignore[import-not-found,no-redef]

VERSION = "0.5.21"
CYCLE_COLUMNS = (
    "started_ms", "draft_ms", "verify_ms", "verify_forward_ms", "extend_ms", "gap_ms", "cycle_ms", "batch_size",
    "num_steps", "tokens",
)  # fmt: skip
FAULTS = (
    "crash_at_load", "gpu_oom", "host_oom", "no_algorithm", "bad_argument", "hang_at_init", "hang_at", "slow_ready",
    "dead_verify", "crash_in_block", "hang_in_block", "unauthorised", "ignore_sigterm", "daemon", "override", "inject",
    "unread", "protocol", "draft_tokens", "draft_inert", "wrong_output", "no_handshake", "half_cycles",
    "no_zero_state", "no_states", "set_fails", "set_hangs", "states_fit", "lie", "busy", "talks_at_load", "niceness",
)  # fmt: skip


def say(text: str, rank: str = " TP0") -> None:
    sys.stdout.write(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}{rank}] {text}\n")
    sys.stdout.flush()


def die(exception: str) -> None:
    say(f"Scheduler hit an exception: Traceback (most recent call last):\n  File 'stub', line 1\n{exception}\n")
    os._exit(1)


class Faults:
    def __init__(self, text: str) -> None:
        entries = [entry.partition(":") for entry in text.split(",") if entry and entry != "none"]
        self._arguments = {name: argument for name, _, argument in entries}
        unknown = set(self._arguments) - set(FAULTS)
        if unknown:
            sys.exit(f"STUB_FAULT: unknown {sorted(unknown)}; there are {', '.join(FAULTS)}")
        self.lie = self.argument("lie")
        if self.lie and self.lie not in LIES:
            sys.exit(f"STUB_FAULT: no lie {self.lie!r}; there are {', '.join(sorted(LIES))}")

    @property
    def is_busy(self) -> bool:
        """Once a first generation has proven the server."""
        return "busy" in self and Handler.requests_served > 0 and time.monotonic() < self.busy_until_s()

    def busy_until_s(self) -> float:
        self.first_busy_s = getattr(self, "first_busy_s", time.monotonic())
        return self.first_busy_s + float(self.argument("busy"))

    def __contains__(self, name: str) -> bool:
        return name in self._arguments

    def argument(self, name: str, default: str = "") -> str:
        return self._arguments.get(name) or default


class Server:
    """What the launcher process and its ranks know."""

    def __init__(self, arguments: argparse.Namespace, faults: Faults) -> None:
        self.arguments, self.faults = arguments, faults
        self.num_steps: int = arguments.speculative_num_steps or 0
        planned = Path(os.environ["SPECSWEEP_PROBE_DIR"]) / "states.json"
        has_plan = planned.exists() and "no_states" not in faults
        self.plan: dict[str, Any] | None = json.loads(planned.read_text(encoding="utf-8")) if has_plan else None
        self.state: str | None = None
        self.ran: dict[int, set[str]] = {rank: set() for rank in range(arguments.tp_size)}
        if self.plan is not None:
            self.pin(self.plan["first"])
        self.cycles: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(arguments.tp_size)}
        self.recording = True
        self.last_row: dict[str, Any] | None = None
        self.generations = 0
        self.cycle_s = float(os.environ.get("STUB_CYCLE_MS", "1.0")) / 1000
        self.timer_kind = os.environ.get("STUB_TIMER", "host")
        self.lock = threading.Lock()

    def pin(self, name: str) -> None:
        """Run in this state from now on."""
        assert self.plan is not None
        self.state = name
        self.num_steps = next(each["num_steps"] for each in self.plan["states"] if each["name"] == name)

    def state_errors(self) -> dict[str, str | None]:
        """Each planned state, and why the server does not hold it."""
        errors: dict[str, str | None] = {}
        failing, limit = self.faults.argument("set_fails"), self.faults.argument("states_fit")
        for number, each in enumerate(self.plan["states"] if self.plan is not None else ()):
            error = "RuntimeError: NCCL error: invalid usage" if failing and each["communicator"] == failing else None
            error = "memory: 1.0 GiB are free, wanted 2.5 GiB" if limit and number >= int(limit) else error
            errors[each["name"]] = error
        return errors

    def info(self) -> dict[str, Any]:
        fields = dict(vars(self.arguments))
        if "draft_tokens" in self.faults and fields["speculative_num_draft_tokens"]:
            fields["speculative_num_draft_tokens"] += 1
        fields.update(version=VERSION, attention_backend="stub", disable_custom_all_reduce=True)
        fields.setdefault("max_running_requests", 48)
        fields["internal_states"] = [{"effective_max_running_requests_per_dp": 32}]
        return fields

    def tokens(self, prompt: str, count: int) -> list[int]:
        """Greedy: a function of the prompt alone."""
        salt = "x" if "wrong_output" in self.faults else ""
        draw = random.Random(prompt + salt)
        drawn = [draw.randrange(100, 30000) for _ in range(count)]
        return TOKENS[self.faults.lie](drawn) if self.faults.lie in TOKENS else drawn

    def lengthen_last_cycle(self) -> None:
        """A cycle lasts until the next one starts, with whatever the host does in between."""
        row = self.last_row
        if row is not None:
            now_ms = time.monotonic() * 1000
            row["gap_ms"] += now_ms - row["started_ms"] - row["cycle_ms"]
            row["cycle_ms"] = now_ms - row["started_ms"]

    def run_cycle(self, left: int) -> int:
        """One cycle of at most `left` tokens; returns how many came."""
        steps = self.num_steps
        scale = 1 + 0.2 * steps
        with self.lock:
            self.generations += 1
            accepted = 0 if "draft_inert" in self.faults else (self.generations * 7) % (steps + 1)
            if self.faults.lie == "hardly_accepts":
                accepted = int(self.generations % 100 == 0)
        if (pinned := os.environ.get("SGLANG_SIMULATE_ACC_LEN")) is not None:
            accepted = min(round(float(pinned)) - 1, steps)
        came = 1 + accepted
        self.lengthen_last_cycle()
        started_ms = time.monotonic() * 1000
        time.sleep(self.cycle_s * scale)
        cycle_ms = time.monotonic() * 1000 - started_ms
        phases = {"draft_ms": 0.15, "verify_ms": 0.7, "verify_forward_ms": 0.6, "extend_ms": 0.1}
        row: dict[str, Any] = {name: share * cycle_ms if steps else None for name, share in phases.items()}
        row["gap_ms"] = 0.05 * cycle_ms
        if not steps:
            row["verify_forward_ms"] = 0.95 * cycle_ms
        row.update(started_ms=started_ms, cycle_ms=cycle_ms, batch_size=1, num_steps=steps, tokens=came)
        if self.recording:
            for cycles in self.cycles.values():
                cycles.append(row)
            self.last_row = row
            if self.state is not None:
                for ran in self.ran.values():
                    ran.add(self.state)
        return min(left, came)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_state: Server
    requests_served = 0

    def log_message(self, format: str, *args: Any) -> None:
        say(f'INFO:     127.0.0.1:1 - "{format % args}"', rank="")

    def do_GET(self) -> None:
        if self.path in ("/health", "/health_generate"):
            self._send({})
        elif self.path in ("/server_info", "/get_server_info"):
            lie = self.server_state.faults.lie
            if lie == "info_is_html":
                self._send_raw(b"<html><body>It works!</body></html>")
            else:
                self._send([1, 2, 3] if lie == "info_is_a_list" else self.server_state.info())
        else:
            self._send({"error": "not found"}, status=404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        state = self.server_state
        if self.path == "/start_profile":
            write_trace(Path(body["output_dir"]))
        if state.faults.is_busy:
            self._send({"error": "requests are running"}, status=429 if self.path == "/generate" else 400)
            return
        if self.path != "/generate":
            self._send({})
            return
        if "unauthorised" in state.faults:
            self._send({"error": "Unauthorized"}, status=401)
            return
        if "dead_verify" in state.faults:
            time.sleep(3600)
        Handler.requests_served += 1
        self._generate(body, fatal=next(filter(self._is_the_one, ("crash_in_block", "hang_in_block")), None))

    def _is_the_one(self, fault: str) -> bool:
        faults = self.server_state.faults
        return fault in faults and Handler.requests_served == 1 + int(faults.argument(fault, "1"))

    def _generate(self, body: dict[str, Any], *, fatal: str | None) -> None:
        state = self.server_state
        prompt = json.dumps(body.get("input_ids", body.get("text")))
        wanted = int(body["sampling_params"]["max_new_tokens"])
        lie = state.faults.lie if Handler.requests_served > 1 else ""  # the first proves the server
        self.stream = Stream(lie)
        wanted = wanted // 2 if lie == "answers_half" else wanted
        tokens = state.tokens(prompt, wanted)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        state.last_row = None
        if lie == "comes_empty":
            self._write(b"")
            return
        done = 1  # prefill gives the first
        self._chunk(tokens[:done], prompt, finished=wanted == done)
        while done < wanted:
            if fatal == "hang_in_block" and done > wanted // 2:
                time.sleep(3600)
            if fatal == "crash_in_block" and done > wanted // 2:
                die("RuntimeError: CUDA error: an illegal memory access was encountered")
            done += state.run_cycle(wanted - done)
            if lie == "last_chunk_late" and done == wanted:
                time.sleep(0.5)
            self._chunk(tokens[:done], prompt, finished=done == wanted)
        self._write(b"data: [DONE]\n\n")
        self._write(b"")

    def _chunk(self, tokens: list[int], prompt: str, *, finished: bool) -> None:
        meta = {
            "id": f"{id(self.stream):x}-{Handler.requests_served}",
            "cached_tokens": 0,
            "prompt_tokens": prompt.count(",") + 1,
            "completion_tokens": len(tokens),
            "finish_reason": {"type": "length"} if finished else None,
        }
        for line in self.stream.say({"output_ids": tokens, "text": "", "meta_info": meta}, finished=finished):
            self._write(line)

    def _write(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _send(self, content: Any, status: int = 200) -> None:
        self._send_raw(json.dumps(content).encode(), status)

    def _send_raw(self, data: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def rank_environment(faults: Faults) -> dict[str, str]:
    """What getenv would say in a rank: the engine's own additions and the faults' in it."""
    asked = set(os.environ.get("SPECSWEEP_PROBE_ENV", "").split(","))
    seen = {name: value for name, value in os.environ.items() if name.startswith("NCCL_") or name in asked}
    seen.setdefault("NCCL_CUMEM_ENABLE", "0")
    if faults.lie == "simulates_acceptance":
        seen["SGLANG_SIMULATE_ACC_LEN"] = "3"
    for fault in ("override", "inject"):
        name, _, value = faults.argument(fault).partition("=")
        if name and (fault == "inject" or name in seen):
            seen[name] = value
    return seen


def start_probe(state: Server) -> None:
    folder = Path(os.environ["SPECSWEEP_PROBE_DIR"])
    for rank in state.cycles:
        os.mkfifo(folder / f"commands-{rank}")
        threading.Thread(target=answer_commands, args=(state, folder, rank), daemon=True).start()
        if "no_handshake" in state.faults:
            continue
        content = {
            "pid": os.getpid() + rank,
            "rank": rank,
            "world_size": len(state.cycles),
            "sglang": VERSION,
            "torch": "0",
            "python": "3",
            "device": "stub",
            "timer_kind": state.timer_kind,
            "wrapped": [],
            "missing": [],
            "warning": None,
            **state_accounts(state),
            "environment": rank_environment(state.faults),
            "niceness": int(state.faults.argument("niceness", "0")),
            "nccl": None,
            "written_s": time.monotonic(),
        }
        if state.faults.lie == "handshake_without_states":
            del content["states"]
        text = json.dumps(content)
        torn = state.faults.lie == "handshake_torn"
        write(folder / f"handshake-{os.getpid() + rank}.json", text[: len(text) // 2] if torn else text)


def state_accounts(state: Server) -> dict[str, Any]:
    """What a rank says of its states and communicators."""
    if state.plan is None:
        return {"states": {}, "communicators": {}}
    failing = state.faults.argument("set_fails")
    environment = rank_environment(state.faults)
    return {
        "states": {
            name: {"seconds": 0.5, "memory_mib": 100.0, "error": error} for name, error in state.state_errors().items()
        },
        "communicators": {
            name: {
                "seconds": 0.2,
                "memory_mib": 500.0,
                "error": "RuntimeError: NCCL error: invalid usage" if name == failing else None,
                "environment": {**environment, **variables},
            }
            for name, variables in state.plan["communicators"].items()
        },
    }


def write_state_logs(state: Server) -> None:
    """One file per communicator and rank, as the probe has NCCL write them."""
    folder = Path(os.environ["SPECSWEEP_PROBE_DIR"])
    for name, variables in (state.plan or {"communicators": {}})["communicators"].items():
        for rank in state.cycles:
            pid = os.getpid() + rank
            lines = [f"{variable} set by environment to {value}" for variable, value in variables.items()]
            protocol = str(variables.get("NCCL_PROTO", "LL")).upper()
            lines += ["NCCL version 2.27.5+cuda12.9", f"AllReduce: 14336 Bytes -> Algo RING proto {protocol}"]
            text = "".join(f"stub:{pid}:{pid} [{rank}] NCCL INFO {line}\n" for line in lines)
            (folder / f"nccl-state.{name}.{pid}.log").write_text(text, encoding="utf-8")


def write_nccl_logs(state: Server) -> None:
    """One file per rank, as NCCL would write for NCCL_DEBUG_FILE; the choice of a protocol by rank 0 alone."""
    pattern = os.environ.get("NCCL_DEBUG_FILE")
    if not pattern:
        return
    seen = rank_environment(state.faults)
    for rank in state.cycles:
        pid = os.getpid() + rank
        lines = [
            f"{name} set by environment to {value}"
            for name, value in sorted(seen.items())
            if name != state.faults.argument("unread")
        ]
        lines += ["NCCL version 2.27.5+cuda12.9", "Channel 00/0 : 0[0] -> 1[1] via P2P/IPC"]
        if rank == 0:
            protocol = state.faults.argument("protocol", seen.get("NCCL_PROTO", "LL")).upper()
            lines.append(f"AllReduce: 14336 Bytes -> Algo RING proto {protocol} channel{{Lo..Hi}}={{0..0}}")
        path = Path(pattern.replace("%h", "stub").replace("%p", str(pid)))
        path.write_text("".join(f"stub:{pid}:{pid} [{rank}] NCCL INFO {line}\n" for line in lines), encoding="utf-8")


def write_trace(folder: Path) -> None:
    """The profiler's window, ready before its cycles have run."""
    folder.mkdir(parents=True, exist_ok=True)
    for trace in (Path(__file__).parent / "assets" / "traces").glob("*.trace.json"):
        write(folder / trace.name, trace.read_text(encoding="utf-8"))


def answer_commands(state: Server, folder: Path, rank: int) -> None:
    with os.fdopen(os.open(folder / f"commands-{rank}", os.O_RDWR), encoding="utf-8") as lines:
        for line in lines:
            command = json.loads(line)
            text = json.dumps(answer(state, rank, command))
            if "half_cycles" in state.faults and command["do"] == "take":
                text = text[: len(text) // 2]
            if state.faults.lie == "probe_answers_a_list" and command["do"] == "take":
                text = "[1, 2]"
            write(folder / f"answer-{rank}-{command['id']}.json", text)


def answer(state: Server, rank: int, command: dict[str, Any]) -> dict[str, Any]:
    do = command["do"]
    if do == "take":
        rows, state.cycles[rank] = state.cycles[rank], []
        columns = {name: [row[name] for row in rows] for name in CYCLE_COLUMNS}
        if state.faults.lie in CYCLES and Handler.requests_served > 1:
            columns = CYCLES[state.faults.lie](rank, columns)
        ran, state.ran[rank] = sorted(state.ran[rank]), set()
        return {"timer_kind": state.timer_kind, "dropped": 0, "states": ran, "cycles": columns}
    if do == "forget":
        state.cycles[rank], state.ran[rank] = [], set()
    elif do == "record":
        state.recording = bool(command["on"])
    elif do == "pin":
        held = [name for name, error in state.state_errors().items() if error is None]
        if command["state"] not in held:
            return {"error": f"no state {command['state']!r}; there are {', '.join(held) or 'none'}"}
        state.pin(command["state"])
    else:
        return {"error": f"unknown command {do!r}"}
    return {}


def write(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.rename(path)


def leave_daemon() -> None:
    """A grandchild in its own session that ignores SIGTERM and listens; returns once it has said so."""
    held = socket.create_server(("127.0.0.1", 0))
    said, say_so = os.pipe()
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            say(f"daemon {os.getpid()} {held.getsockname()[1]}")
            os.write(say_so, b"!")
            time.sleep(3600)
        os._exit(0)
    os.wait()
    os.close(say_so)
    os.read(said, 1)
    held.close()


def parse(command: list[str]) -> argparse.Namespace:
    """The server's arguments; what the stub does not know is kept as text."""
    words = command[command.index("sglang.launch_server") + 1 :]
    known: dict[str, Any] = {
        "model_path": "stub", "tp_size": 1, "speculative_algorithm": None, "speculative_num_steps": None,
        "speculative_eagle_topk": None, "speculative_num_draft_tokens": None, "speculative_draft_model_path": None,
    }  # fmt: skip
    position = 0
    while position < len(words):
        name = words[position].removeprefix("--").replace("-", "_")
        position += 1
        value: Any = True
        if position < len(words) and not words[position].startswith("--"):
            value = words[position]
            position += 1
            value = int(value) if value.isdigit() else value
        known[name] = value
    return argparse.Namespace(**known)


def boot(state: Server) -> None:
    """From the first line to the port, with the log lines of a real start."""
    faults, arguments = state.faults, state.arguments

    def stand_still(stage: str) -> None:
        if faults.argument("hang_at") == stage:
            time.sleep(3600)

    if "bad_argument" in faults:
        sys.stderr.write("launch_server.py: error: unrecognized arguments: --no-such-flag\n")
        os._exit(2)
    fields = ", ".join(f"{name}={value!r}" for name, value in vars(arguments).items())
    say(f"server_args=ServerArgs({fields})", rank="")
    say("Init torch distributed begin.")
    if "hang_at_init" in faults:
        time.sleep(3600)
    if "no_algorithm" in faults:
        warning = "h:1:1 [0] NCCL WARN No algorithm/protocol available for function AllGather\n"
        if pattern := os.environ.get("NCCL_DEBUG_FILE"):  # NCCL then writes nothing to stdout
            Path(pattern.replace("%h", "stub").replace("%p", str(os.getpid()))).write_text(warning, encoding="utf-8")
        else:
            sys.stdout.write(warning)
        die("RuntimeError: NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details)")
    say("Init torch distributed ends. elapsed=0.01 s, mem usage=0.00 GB")
    write_nccl_logs(state)
    say("Load weight begin. avail mem=139.11 GB")
    stand_still("load")
    while "talks_at_load" in faults:
        say("Loading safetensors checkpoint shards")
        time.sleep(0.05)
    if "crash_at_load" in faults:
        die("RuntimeError: CUDA error: unspecified launch failure")
    if "host_oom" in faults:
        os.kill(os.getpid(), signal.SIGKILL)
    say("Load weight end. elapsed=0.01 s, type=Stub, avail mem=121.18 GB, mem usage=17.92 GB.")
    if faults.argument("hang_at") == "draft_init":
        say("Load weight begin. avail mem=121.18 GB")
        stand_still("draft_init")
    say("Capture target verify CUDA graph begin. backend=full, bs=[1]")
    stand_still("capture")
    if (hanging := faults.argument("set_hangs")) and hanging in (state.plan or {"communicators": {}})["communicators"]:
        words = {"communicator": hanging, "rank": 0, "error": "hung: it did not come up within 60 s"}
        sys.stdout.write(f"specsweep-state-failure {json.dumps(words)}\n")
        die("rank 0 ended")
    write_state_logs(state)
    planned = [each["num_steps"] for each in (state.plan or {"states": []})["states"]]
    if "no_zero_state" in faults and arguments.speculative_num_steps and 0 in planned:
        die("ValueError: no runtime state for 0 steps")
    if "gpu_oom" in faults:
        die("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.50 GiB. GPU 0 has 0.40 GiB free")
    say("Capture target verify CUDA graph end. elapsed=0.02 s, mem usage=0.43 GB")
    time.sleep(float(faults.argument("slow_ready", "0")))


def main() -> None:
    faults = Faults(os.environ.get("STUB_FAULT", ""))
    arguments = parse(sys.argv[1:])
    state = Server(arguments, faults)
    if "ignore_sigterm" in faults:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "daemon" in faults:
        leave_daemon()
    boot(state)
    start_probe(state)
    Handler.server_state = state
    httpd = ThreadingHTTPServer(("127.0.0.1", int(arguments.port)), Handler)
    httpd.daemon_threads = True
    say(f"INFO:     Uvicorn running on http://127.0.0.1:{arguments.port} (Press CTRL+C to quit)", rank="")
    say("The server is fired up and ready to roll!", rank="")
    httpd.serve_forever()


if __name__ == "__main__":
    main()
