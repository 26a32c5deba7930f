"""A model's name becomes a folder, or an error that says why not."""

from __future__ import annotations

from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors

from stepahead.errors import ConfigError
from stepahead.frontend.hub import resolve_folder


def test_a_local_folder_is_taken_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    assert resolve_folder(str(tmp_path)) == str(tmp_path)
    assert resolve_folder("model") == str(tmp_path / "model")


@pytest.mark.parametrize("name", ["/no/such/folder", "./here", "a/b/c", "what is this?", "~/no-such-folder-here"])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(ConfigError, match="does not exist") as caught:
        resolve_folder(name)
    assert name in str(caught.value)


def test_a_file_is_no_folder(tmp_path):
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ConfigError, match="is a file"):
        resolve_folder(str(file))


def test_a_hub_id_is_fetched_without_what_is_not_needed(monkeypatch):
    asked = {}

    def snapshot(name, **options):
        asked.update(options, name=name)
        return "/cache/folder"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_folder("org/model", "main") == "/cache/folder"
    assert (asked["name"], asked["revision"]) == ("org/model", "main")
    assert "*.safetensors" in asked["allow_patterns"]
    assert not any("bin" in pattern for pattern in asked["allow_patterns"])
    resolve_folder("org/model", tokenizer_only=True)
    assert "*.safetensors" not in asked["allow_patterns"]


def test_being_offline_is_one_clear_line(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda name, original=huggingface_hub.snapshot_download, **options: original(
            name, cache_dir=str(tmp_path), **options
        ),
    )
    with pytest.raises(ConfigError, match=r"'no-org/no-model'.*not in the local cache") as caught:
        resolve_folder("no-org/no-model")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (errors.RepositoryNotFoundError, "no such public repository"),
        (errors.GatedRepoError, "grant access"),
        (errors.RevisionNotFoundError, "no such revision"),
    ],
)
def test_what_the_hub_answers_is_told(monkeypatch, error, words):
    response = SimpleNamespace(status_code=404, headers={}, request=None)

    def refuse(name, **options):
        raise error("answer", response=response)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ConfigError, match=words):
        resolve_folder("org/model", "v1")


def test_an_unexpected_failure_is_told_with_its_kind(monkeypatch):
    def refuse(name, **options):
        raise OSError("disk\nfull")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ConfigError, match="OSError: disk full"):
        resolve_folder("org/model")
