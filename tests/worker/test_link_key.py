"""A key is its owner's alone, and without one nothing is bound where strangers could connect."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from stepahead.config import parse_settings
from stepahead.errors import ConfigError
from stepahead.frontend.cli import main
from stepahead.worker.link_key import read_key_file


def test_keygen_makes_a_new_private_key_and_overwrites_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / name) for name in ("one", "two")]
    assert [main(["keygen", path]) for path in paths] == [0, 0]
    keys = [read_key_file(path) for path in paths]
    assert keys[0].secret != keys[1].secret
    assert all(stat.S_IMODE(Path(path).stat().st_mode) == 0o600 for path in paths)
    assert keys[0].secret.decode() not in repr(keys[0])
    before = Path(paths[0]).read_bytes()
    assert main(["keygen", paths[0]]) == 2
    assert "exists already" in capsys.readouterr().err
    assert Path(paths[0]).read_bytes() == before


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        (None, 0o600, "No such file.*stepahead keygen"),
        ("x" * 40, 0o640, "open to others .mode 0640.: chmod 600"),
        ("", 0o600, "holds no key"),
        ("x" * 39, 0o600, "holds no key"),
        ("\x00" * 40, 0o600, "holds no key"),
        ("one\ntwo\n", 0o600, "holds no key"),
    ],
)
def test_a_file_that_is_no_private_key_is_refused_before_anything_starts(
    tmp_path: Path, text: str | None, mode: int, message: str
) -> None:
    path = tmp_path / "key"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=message):
        parse_settings("m", {"key_file": str(path)})


@pytest.mark.parametrize(
    "address", ["tcp://*:0", "tcp://0.0.0.0:5", "tcp://10.0.0.1:5", "tcp://head:5", "tcp://[::]:5"]
)
def test_what_other_machines_can_reach_needs_a_key(address: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can be reached from other machines and needs a key_file"):
        parse_settings("m", {"executor_address": address})
    main(["keygen", str(tmp_path / "key")])
    parse_settings("m", {"executor_address": address, "key_file": str(tmp_path / "key")})


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "tcp://localhost:5", "tcp://[::1]:0", "ipc:///tmp/x/plans"])
def test_what_stays_on_this_machine_needs_none(address: str) -> None:
    assert parse_settings("m", {"executor_address": address}).executor_address == address


@pytest.mark.parametrize("address", ["", "tcp://", "tcp://:5", "tcp://127.0.0.1", "tcp://127.0.0.1:99999", "udp://h:5"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="must be tcp://HOST:PORT or ipc://FILE"):
        parse_settings("m", {"executor_address": address})
