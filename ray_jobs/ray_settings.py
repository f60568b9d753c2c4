"""Settings of Ray and Tune that a driver needs in its own environment before it imports Ray."""

from __future__ import annotations

import logging
import os
import secrets

import optuna

RAY_SETTINGS = {
    "RAY_AIR_NEW_OUTPUT": "0",  # Tune's own tables: the progress lines replace them
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # actors stay where relative paths mean the same as in the driver
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's 15 would make the measured server yield to whatever else the host runs
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # the bridge tells the actors first, then Tune
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # no result.json, progress.csv or event files beside our tables
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",  # Tune's snapshots are never read: a sweep resumes from its results folder
    "TUNE_MAX_PENDING_TRIALS_PG": "1000",  # a trial that waits for its node holds up no other
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
}
"""Set in this process before Ray is imported, if the user has not set them; never passed to a server."""
LOCAL_SETTINGS = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
"""For a cluster of this process alone, which listens on all interfaces: a token that dies with the process.

Ray writes no token file if it finds a token in the environment. No server gets it (`sglang.launch_plan`).
"""


def settle_environment() -> None:
    """Set what the user has not set, and quieten what the progress lines replace. Call before importing Ray.

    A cluster of this process alone gets its own token, whatever the user has set for other clusters.
    """
    for name, value in RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    if not os.environ.get("RAY_ADDRESS"):
        os.environ.update(LOCAL_SETTINGS)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    # Tune's snapshots are never read: that one cannot be written on a full disk is said by what is written beside it.
    logging.getLogger("ray.tune.execution.experiment_state").setLevel(logging.CRITICAL)
