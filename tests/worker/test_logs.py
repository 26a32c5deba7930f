"""What strangers cause to be logged is bounded."""

from __future__ import annotations

import logging

import pytest

from stepahead.worker.logs import Complaints


def test_a_stranger_gets_no_line_more_for_saying_something_new(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints(logging.getLogger("stepahead.test"))
    for number in range(1000):
        complaints.log(f"refused somebody, pid {number}", "refused")
        complaints.log("dropped a message")
    assert caplog.messages == ["refused somebody, pid 0", "dropped a message"]
