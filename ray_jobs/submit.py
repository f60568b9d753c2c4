"""Submit a sweep to a Ray cluster: `specsweep submit SPEC --results /shared/DIR|s3://BUCKET/PREFIX [--address URL]`.

The same as `ray job submit`, but it uploads only what a sweep needs, says what that is, and ends with the exit code of
the job. Interrupting it leaves the job running.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ray.job_submission import JobSubmissionClient

from ray_jobs.upload import LIMIT_BYTES, Upload, plan_upload
from sweeps import SpecsweepError, __version__
from sweeps.foreign_text import print_error
from sweeps.results.store import is_url
from sweeps.spec.document import SpecError
from sweeps.spec.reading import find_spec, read_spec

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
"""Ray's dashboard on this machine."""


class SubmitError(SpecsweepError):
    """The cluster cannot be reached, or it refused the job."""


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m ray_jobs.submit") -> int:
    """Submit, follow the log, and return the exit code of the job (0 if `--no-wait`); 2 if nothing was submitted."""
    arguments, rest = _parser(prog).parse_known_args(argv)
    try:
        upload = _checked(arguments)
        return _submit(arguments, upload, rest)
    except SpecsweepError as error:
        print_error(error)
        return 2


def _checked(arguments: argparse.Namespace) -> Upload:
    if not is_url(arguments.results) and not Path(arguments.results).is_absolute():
        raise SpecError(
            f"--results: wanted an absolute path that every node has, or a URL, got {arguments.results}: a job's "
            "working directory is removed after the job"
        )
    upload = plan_upload(arguments.spec)
    size = upload.size_bytes
    print(
        f"uploads {len(upload.files)} files, {size / 2**20:.1f} MiB of Ray's {LIMIT_BYTES >> 20} MiB: the packages "
        f"sweeps and ray_jobs, {upload.spec}, and what the spec names beside it; no weights, recordings or results"
    )
    if size >= LIMIT_BYTES:
        largest = max(upload.files, key=lambda name: upload.files[name].stat().st_size)
        raise SpecError(f"the upload is {size / 2**20:.0f} MiB, Ray takes {LIMIT_BYTES >> 20} MiB; largest: {largest}")
    return upload


def _submit(arguments: argparse.Namespace, upload: Upload, rest: Sequence[str]) -> int:
    address = arguments.address or os.environ.get("RAY_API_SERVER_ADDRESS") or DEFAULT_ADDRESS
    spec = read_spec(find_spec(arguments.spec))
    words = ["python", "-m", "ray_jobs.run_sweep", upload.spec, "--results", arguments.results, *rest]
    client = _client(address)
    with tempfile.TemporaryDirectory(prefix="specsweep-job-") as folder:
        upload.write(Path(folder))
        try:
            job_id = client.submit_job(
                entrypoint=shlex.join(words),
                runtime_env={"working_dir": folder},
                metadata={"sweep": spec.sweep, "results": arguments.results, "specsweep": __version__},
            )
        except RuntimeError as error:
            raise SubmitError(f"{address} refused the job: {_first_line(error)}") from error
    print(f"job {job_id} on {address}: {shlex.join(words)}")
    if arguments.no_wait:
        return 0
    return _follow(client, job_id, address)


def _client(address: str) -> JobSubmissionClient:
    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError) as error:
        raise SubmitError(f"no Ray head answers at {address}: {_first_line(error)}") from error


def _follow(client: JobSubmissionClient, job_id: str, address: str) -> int:
    """Print the job's log to its end. Returns the job's exit code; 1 if the job ended without one."""

    async def print_log() -> None:
        async for lines in client.tail_job_logs(job_id):
            print(lines, end="", flush=True)

    try:
        asyncio.run(print_log())
    except KeyboardInterrupt:
        print(f"\njob {job_id} goes on; stop it with: ray job stop --address {address} {job_id}", file=sys.stderr)
        return 130
    details = client.get_job_info(job_id)
    print(f"job {job_id}: {details.status.value}")
    if details.driver_exit_code is not None:
        return int(details.driver_exit_code)
    if details.message:
        print(_first_line(details.message), file=sys.stderr)
    return 0 if details.status.value == "SUCCEEDED" else 1


def _first_line(error: object) -> str:
    """Ray's messages carry tracebacks; their first line says what happened."""
    return str(error).strip().partition("\n")[0]


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, description="submit a sweep to a Ray cluster; further options go to `specsweep run` on the cluster"
    )
    parser.add_argument("spec", type=Path, metavar="SPEC", help="a spec file, or the name of a shipped one")
    parser.add_argument(
        "--results", required=True, metavar="DIR|URL", help="results folder: absolute, the same on every node; or a URL"
    )
    parser.add_argument(
        "--address", help=f"URL of the dashboard; default: RAY_API_SERVER_ADDRESS, else {DEFAULT_ADDRESS}"
    )
    parser.add_argument("--no-wait", action="store_true", help="do not follow the job's log")
    return parser


if __name__ == "__main__":
    sys.exit(main())
