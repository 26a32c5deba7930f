"""A child process' main that runs the code it is sent."""

from __future__ import annotations


def run(message: bytes) -> int:
    exec(message.decode(), {})
    return 0
