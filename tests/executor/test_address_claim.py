"""Who may bind an ipc:// address: one at a time, whoever else comes and goes."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from stepahead.errors import ConfigError
from stepahead.executor.address_claim import AddressClaim

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def address(tmp_path: Path) -> str:
    tmp_path.chmod(0o700)
    return f"ipc://{tmp_path}/plans"


def test_a_claim_is_exclusive_and_leaves_nothing(address: str, tmp_path: Path) -> None:
    first = AddressClaim(address)
    (tmp_path / "plans").touch()
    first.sockets.append(str(tmp_path / "plans"))
    with pytest.raises(ConfigError, match="is in use by another engine"):
        AddressClaim(address)
    assert sorted(os.listdir(tmp_path)) == ["plans", "plans.lock"]
    first.release()
    assert os.listdir(tmp_path) == []
    AddressClaim(address).release()


def test_a_folder_that_is_gone_already_is_no_error(address: str, tmp_path: Path) -> None:
    claim = AddressClaim(address)
    claim.sockets.append(str(tmp_path / "plans"))
    os.unlink(tmp_path / "plans.lock")
    tmp_path.rmdir()
    claim.release()
    tmp_path.mkdir(0o700)
    AddressClaim(address).release()
    assert os.listdir(tmp_path) == []


def test_a_folder_where_nothing_may_be_made_is_said(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "plans.lock").symlink_to("/dev/null")
    with pytest.raises(ConfigError, match=r"cannot be claimed: .*symbolic link"):
        AddressClaim(f"ipc://{tmp_path}/plans")


def test_who_has_opened_a_file_that_its_holder_then_removes_has_not_got_it(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = AddressClaim(address)
    later: list[AddressClaim] = []
    lock = fcntl.flock

    def lock_late(file: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        first.release()
        later.append(AddressClaim(address))
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    with pytest.raises(ConfigError, match="is in use by another engine"):
        AddressClaim(address)
    later[0].release()


@pytest.mark.parametrize("name", ["plans-replies", "plans-health"])
def test_an_address_that_may_be_another_engines_second_socket_is_refused(tmp_path: Path, name: str) -> None:
    tmp_path.chmod(0o700)
    with pytest.raises(ConfigError, match=f"{name}' must not end in"):
        AddressClaim(f"ipc://{tmp_path}/{name}")
