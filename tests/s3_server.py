"""A real S3 server on this machine (moto's), which can go away and come back with what it holds."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.ray_jobs.waiting import free_port

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
"""Moto takes any."""


@dataclass
class S3Server:
    """Serves on 127.0.0.1. What it holds lives in this process and outlives a stop."""

    port: int = field(default_factory=free_port)
    _server: Any = None

    def start(self) -> None:
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    def url(self, bucket: str, prefix: str) -> str:
        """Of a folder in a bucket, which is made on the first write."""
        where = f"endpoint_override=127.0.0.1:{self.port}&scheme=http&region=us-east-1&allow_bucket_creation=true"
        return f"s3://{bucket}/{prefix}?{where}"


@contextmanager
def serving() -> Iterator[S3Server]:
    server = S3Server()
    server.start()
    try:
        yield server
    finally:
        server.stop()
