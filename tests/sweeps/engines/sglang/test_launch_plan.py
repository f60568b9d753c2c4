"""Command and environment of a launch."""

from __future__ import annotations

from pathlib import Path

from sweeps.engines.command import (
    PROJECT,
    launch_command,
    launch_environment,
    num_ranks,
    pinned_accept_length,
    recorded_command,
    recorded_environment,
    recorded_removals,
)
from sweeps.engines.sglang.launch_plan import PROBE_FOLDER, missing_variables, plan_launch
from sweeps.engines.sglang.state_plan import plan_states
from sweeps.spec.model import SweepSpec
from sweeps.spec.reading import parse_spec
from sweeps.spec.space import Configuration, Space

SPEC = """
sweep: s
engine:
  kind: sglang
  python: /opt/engine/bin/python
  launcher: [numactl, --membind=0]
  model_path: org/model
  algorithm: {algorithm}
  args: {{tp: 8, trust-remote-code: true, disable-cuda-graph: false, speculative-draft-attention-backend: triton}}
  env: {{PYTHONPATH: /opt/extra, HF_HUB_OFFLINE: "1"}}
nccl_sets:
  ll: {{NCCL_PROTO: LL}}
  ring: {{NCCL_ALGO: Ring}}
drafters: {{d: org/drafter}}
search:
  num_steps: [0, 1, 3]
  eagle_topk: [1, 2]
  nccl: [default, ll, ring]
  args: {{mem-fraction-static: [0.8, 0.9]}}
  env: {{SGLANG_X: ["0", "1"]}}
"""


def spec(algorithm: str = "EAGLE3") -> SweepSpec:
    return parse_spec(SPEC.format(algorithm=algorithm), source="test")


def configuration(num_steps: int, *, eagle_topk: int = 1, nccl: str = "default") -> Configuration:
    return Space(spec()).resolve(
        {
            "num_steps": num_steps,
            "eagle_topk": eagle_topk,
            "nccl": nccl,
            "args.mem-fraction-static": 0.9,
            "env.SGLANG_X": "1",
        }
    )


def option(command: tuple[str, ...], name: str) -> str:
    return command[command.index(name) + 1]


def test_command_has_launcher_interpreter_and_every_argument() -> None:
    command = launch_command(spec(), configuration(3), port=1234)

    assert command[:5] == ("numactl", "--membind=0", "/opt/engine/bin/python", "-m", "sglang.launch_server")
    assert option(command, "--model-path") == "org/model"
    assert option(command, "--port") == "1234"
    assert option(command, "--tp-size") == "8"
    assert option(command, "--mem-fraction-static") == "0.9"
    assert "--trust-remote-code" in command
    assert "--disable-cuda-graph" not in command
    assert option(command, "--speculative-algorithm") == "EAGLE3"
    assert option(command, "--speculative-draft-model-path") == "org/drafter"
    assert option(command, "--speculative-num-steps") == "3"
    assert option(command, "--speculative-eagle-topk") == "1"
    assert option(command, "--speculative-num-draft-tokens") == "4"


def test_no_speculation_has_no_speculative_argument() -> None:
    assert not [word for word in launch_command(spec(), configuration(0)) if "speculative" in word]


def test_swept_names_are_taken_out_of_the_inherited_environment() -> None:
    inherited = {"PATH": "/bin", "NCCL_ALGO": "Tree", "NCCL_DEBUG": "WARN", "PYTHONPATH": "/ray", "HOME": "/home/u"}

    child = plan_launch(spec(), configuration(1, nccl="ll"), folder=Path("/tmp/p"), inherited=inherited)

    assert child.removed == ("NCCL_ALGO", "PYTHONPATH")
    assert child.environment["NCCL_PROTO"] == "LL"
    assert "NCCL_ALGO" not in child.environment
    assert child.environment["NCCL_DEBUG"] == "WARN", "nobody sweeps it: it stays, and shows as extra"
    assert child.environment["PYTHONPATH"] == f"{PROBE_FOLDER}:/opt/extra"
    assert child.environment["SPECSWEEP_PROBE_DIR"] == "/tmp/p"
    assert {"NCCL_PROTO", "SGLANG_X", "HF_HUB_OFFLINE"} <= set(child.environment["SPECSWEEP_PROBE_ENV"].split(","))


def test_simulated_acceptance_is_never_inherited() -> None:
    inherited = {"SGLANG_SIMULATE_ACC_LEN": "3", "SGLANG_SIMULATE_ACC_METHOD": "multinomial"}
    child = plan_launch(spec(), configuration(1), folder=Path("/tmp/p"), inherited=inherited)
    assert child.removed == ("SGLANG_SIMULATE_ACC_LEN", "SGLANG_SIMULATE_ACC_METHOD")
    assert not set(inherited) & set(child.environment)


def test_plugin_whitelist_keeps_the_probe() -> None:
    child = plan_launch(spec(), configuration(0), folder=Path("/tmp/p"), inherited={"SGLANG_PLUGINS": "other"})

    assert child.environment["SGLANG_PLUGINS"] == "other,specsweep_probe"


def test_launch_environment_is_what_serves_without_the_probe() -> None:
    assert launch_environment(spec(), configuration(1, nccl="ring")) == {
        "PYTHONPATH": "/opt/extra",
        "HF_HUB_OFFLINE": "1",
        "NCCL_ALGO": "Ring",
        "SGLANG_X": "1",
    }


def test_a_plan_agrees_with_itself() -> None:
    fixed = plan_launch(spec(), configuration(1), folder=Path("/tmp/p"), inherited={}, port=1234)

    assert fixed.command == (*launch_command(spec(), configuration(1), port=1234), "--skip-server-warmup")
    assert fixed.requested == launch_environment(spec(), configuration(1))
    assert fixed.num_ranks == fixed.arguments["tp-size"] == 8


def test_a_server_that_holds_states_starts_with_the_largest_and_without_their_nccl_sets() -> None:
    one = configuration(1, nccl="ll")
    states = plan_states(spec().engine, one, (one, configuration(3)))

    plan = plan_launch(spec(), one, folder=Path("/tmp/p"), inherited={}, states=states)

    assert option(plan.command, "--speculative-num-steps") == "3"
    assert option(plan.command, "--speculative-num-draft-tokens") == "4"
    assert "NCCL_PROTO" not in plan.environment


def test_a_server_of_several_ranks_writes_nccl_logs_unless_told_otherwise() -> None:
    plan = plan_launch(spec(), configuration(0), folder=Path("/tmp/p"), inherited={})
    told = plan_launch(spec(), configuration(0), folder=Path("/tmp/p"), inherited={"NCCL_DEBUG": "WARN"})

    assert plan.environment["NCCL_DEBUG_FILE"] == "/tmp/p/nccl.%h.%p.log"
    assert "NCCL_DEBUG_FILE" not in told.environment


def test_ranks_are_counted_from_the_arguments() -> None:
    assert num_ranks(spec(), configuration(0)) == 8


def test_path_of_this_project_is_made_absolute_and_a_model_name_is_not() -> None:
    text = SPEC.format(algorithm="EAGLE3").replace("org/model", "sweeps/specs")
    local = parse_spec(text, source="test")

    assert option(launch_command(local, configuration(0)), "--model-path") == str(PROJECT / "sweeps/specs")


def test_a_recorded_command_runs_on_another_machine() -> None:
    text = SPEC.format(algorithm="EAGLE3").replace("org/model", "sweeps/specs").replace("org/drafter", "sweeps/engines")
    text = text.replace("/opt/engine/bin/python", f"{PROJECT}/venv/bin/python").replace(
        "/opt/extra", "sweeps:/opt/extra"
    )
    local = parse_spec(text, source="test")

    assert str(PROJECT) in " ".join(launch_command(local, configuration(1)))
    command = recorded_command(local, configuration(1))
    assert command[:3] == ("numactl", "--membind=0", "venv/bin/python")
    assert option(command, "--model-path") == "sweeps/specs"
    assert option(command, "--speculative-draft-model-path") == "sweeps/engines"
    assert recorded_environment(local, configuration(1))["PYTHONPATH"] == "sweeps:/opt/extra"


def test_what_a_spec_does_not_name_is_no_path_of_this_machine() -> None:
    text = SPEC.format(algorithm="EAGLE3").replace("  python: /opt/engine/bin/python\n", "")
    text = text.replace("kind: sglang", "kind: simulated\n  machine: 8xh200").replace("  model_path: org/model\n", "")
    command = recorded_command(parse_spec(text, source="test"), configuration(1))

    assert command[2:7] == ("python", "-m", "sglang.launch_server", "--model-path", "MODEL")
    assert not [word for word in command if word.startswith("/")]


def test_variables_of_a_worker_process_are_no_removals_of_the_sweep() -> None:
    assert recorded_removals(("NCCL_ALGO", "OMP_NUM_THREADS", "PYTHONPATH")) == ("NCCL_ALGO",)


PINNED_ENV = 'env: {PYTHONPATH: /opt/extra, SGLANG_SIMULATE_ACC_LEN: "2.5", SGLANG_SIMULATE_ACC_METHOD: match-expected}'


def test_a_pinned_sweep_simulates_acceptance_as_its_spec_says() -> None:
    text = SPEC.format(algorithm="EAGLE3").replace('env: {PYTHONPATH: /opt/extra, HF_HUB_OFFLINE: "1"}', PINNED_ENV)
    own = parse_spec(text + "acceptance: pinned\n", source="test")
    inherited = {"SGLANG_SIMULATE_ACC_LEN": "7", "SGLANG_SIMULATE_ACC_METHOD": "multinomial"}
    for configuration in Space(own).configurations()[:3]:
        child = plan_launch(own, configuration, folder=Path("/probe"), inherited=inherited)
        assert child.environment["SGLANG_SIMULATE_ACC_LEN"] == "2.5"
        assert set(inherited) <= set(child.removed), "what this process has of them never reaches a server"
        assert set(inherited) <= set(recorded_environment(own, configuration))
        lengths = {0: None, 1: 2.0, 3: 2.5}
        assert pinned_accept_length(own, configuration) == lengths[configuration.num_steps]


def test_no_server_gets_what_opens_the_cluster() -> None:
    """A token of Ray lets its holder run code on every node; the server and what it loads need none."""
    inherited = {"RAY_AUTH_TOKEN": "marker", "RAY_AUTH_TOKEN_PATH": "/marker", "RAY_AUTH_MODE": "token", "A": "b"}
    plan = plan_launch(spec(), configuration(1), folder=Path("/f"), inherited=inherited)
    assert not [name for name, value in plan.environment.items() if "marker" in value]
    assert plan.environment["A"] == "b"
    assert recorded_removals(plan.removed) == ()


def test_inherited_and_written_secrets_reach_the_server_and_no_record() -> None:
    text = SPEC.format(algorithm="EAGLE3").replace(
        "  env: {PYTHON",
        "  inherit: [HF_TOKEN, PLAIN]\n  env: {MY_PASSWORD: marker-written, WANDB_API_KEY: '${WANDB_API_KEY}', PYTHON",
    )
    asked = parse_spec(text, source="test")
    assert missing_variables(asked, {"PLAIN": "x"}) == ["HF_TOKEN", "WANDB_API_KEY"]
    own = {"HF_TOKEN": "marker-inherited", "PLAIN": "marker-plain", "WANDB_API_KEY": "marker-key"}
    plan = plan_launch(asked, configuration(1), folder=Path("/f"), inherited=own)
    wanted = {**own, "MY_PASSWORD": "marker-written"}
    assert {name: plan.environment[name] for name in wanted} == wanted
    records = (
        recorded_environment(asked, configuration(1)),
        recorded_command(asked, configuration(1)),
        plan.record(own),
    )
    assert "marker" not in str(records)
    assert records[0]["HF_TOKEN"] == "${HF_TOKEN}"
    assert records[0]["PLAIN"] == "${PLAIN}"
