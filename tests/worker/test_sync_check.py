"""Waits for the device are found on a machine whose device is the CPU."""

from __future__ import annotations

import inspect
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import waiting_worker
from hash_model import write_hash_model
from step_driver import StepDriver
from stepahead import LLM, SamplingParams
from stepahead.errors import ConfigError, EngineDeadError, StepaheadError
from stepahead.worker.device_cpu import CpuDevice
from stepahead.worker.model_runner import ModelRunner
from stepahead.worker.sync_check import VARIABLE, CudaSyncCheck, sync_check

CPU = torch.device("cpu")
X, MASK, INDEX = torch.arange(4.0), torch.tensor([True, False, True, True]), torch.tensor([1, 2])

WAITS: dict[str, Callable[[], object]] = {
    "item": lambda: X[0].item(),
    "float": lambda: float(X[0]),
    "int": lambda: int(X[0]),
    "truth": lambda: MASK.any() and 1,
    "size": lambda: torch.zeros(INDEX[0]),
    "slice": lambda: X[: INDEX[0]],
    "tolist": lambda: X.tolist(),
    "cpu": lambda: X.cpu(),
    "to the host": lambda: X.to("cpu"),
    "to the host by name": lambda: X.to(device="cpu", dtype=torch.float64),
    "mask": lambda: X[MASK],
    "assignment to a mask": lambda: X.clone().__setitem__(MASK, 0.0),
    "mask of bytes": lambda: X[MASK.to(torch.uint8)],
    "nonzero": lambda: MASK.nonzero(),
    "where": lambda: torch.where(MASK),
    "argwhere": lambda: torch.argwhere(MASK),
    "masked_select": lambda: X.masked_select(MASK),
    "unique": lambda: torch.unique(INDEX),
    "equal": lambda: torch.equal(X, X),
    "allclose": lambda: torch.allclose(X, X),
    "bincount": lambda: torch.bincount(INDEX),
    "one_hot": lambda: torch.nn.functional.one_hot(INDEX),
    "repeat_interleave": lambda: torch.repeat_interleave(X[:2], INDEX),
    "upload of a list": lambda: torch.tensor([1, 2], device=CPU),
    "new_tensor": lambda: X.new_tensor([1.0]),
}
NO_WAITS: dict[str, Callable[[], object]] = {
    "arithmetic": lambda: (X * 2 + 1).sum(),
    "indexing": lambda: X[INDEX] + X[1:3] + X[None, 2],
    "masked_fill": lambda: X.masked_fill(MASK, 0.0),
    "where of three": lambda: torch.where(MASK, X, 0.0),
    "repeat_interleave of a known size": lambda: torch.repeat_interleave(X[:2], INDEX, output_size=3),
    "index_put": lambda: X.clone().index_put_((INDEX,), X[:2]),
    "to a type": lambda: X.to(torch.float64),
    "to the model's device": lambda: X.to(X.device),
    "linear": lambda: torch.nn.functional.linear(X, X.expand(3, 4), X[:3]),
    "sort": lambda: X.sort(descending=True, stable=True),
    "a host tensor": lambda: torch.tensor([1, 2]),
    "what a kernel's CPU version reads": lambda: X.numpy().max(),
}


@pytest.fixture(params=[False, True], ids=["plain", "inference_mode"])
def _without_autograd(request: pytest.FixtureRequest) -> Iterator[None]:
    """Launched work runs in inference mode, where torch shows other operations to a watcher."""
    with torch.inference_mode(request.param):
        yield


@pytest.mark.parametrize("name", WAITS)
@pytest.mark.usefixtures("_without_autograd")
def test_a_wait_is_an_error_that_names_its_place(name: str) -> None:
    line = inspect.getsourcelines(WAITS[name])[1]
    place = re.escape(f"makes the host wait for the device in the step path, at {__file__}:{line} in <lambda>")
    with sync_check("error", CPU).watching(), pytest.raises(StepaheadError, match=place):
        WAITS[name]()


@pytest.mark.parametrize("name", NO_WAITS)
@pytest.mark.usefixtures("_without_autograd")
def test_what_does_not_wait_passes_and_computes_the_same(name: str) -> None:
    expected = NO_WAITS[name]()
    with sync_check("error", CPU).watching():
        result = NO_WAITS[name]()
    torch.testing.assert_close(result, expected)


def test_outside_the_step_path_nothing_is_reported() -> None:
    with sync_check("error", CPU).watching():
        pass
    assert X[1].item() == 1


def test_warn_tells_each_place_once_with_its_stack(caplog: pytest.LogCaptureFixture) -> None:
    check = sync_check("warn", CPU)
    for _ in range(3):
        with check.watching():
            assert WAITS["item"]() == 0
            WAITS["nonzero"]()
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "reading a tensor's value makes the host wait" in caplog.records[0].message
    assert "test_warn_tells_each_place_once_with_its_stack" in caplog.records[0].message
    assert "site-packages/torch" not in caplog.records[0].message


@pytest.mark.parametrize("value", ["off", ""])
def test_off_leaves_the_runner_as_it_is(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, value)
    driver = StepDriver()
    assert type(driver.runner) is ModelRunner
    driver.close()


def test_a_misspelt_action_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "eror")
    device = CpuDevice()
    with pytest.raises(ConfigError, match=r"STEPAHEAD_SYNC_CHECK='eror': must be one of off, warn, error"):
        StepDriver(device=device)
    device.close()


@pytest.mark.parametrize("executor", ["Uniproc", "Multiproc"])
def test_a_planted_item_in_the_step_path_reaches_the_client_with_file_and_line(executor: str, tmp_path: Path) -> None:
    lines, first = inspect.getsourcelines(waiting_worker)
    planted = first + next(i for i, line in enumerate(lines) if "planted" in line) + (first == 0)
    place = re.escape(f"at {waiting_worker.__file__}:{planted} in forward")
    settings = {"executor": f"waiting_worker:{executor}", "skip_tokenizer_init": True, "device": "cpu"}
    with (
        LLM(write_hash_model(tmp_path, tokenizer=False), **settings) as llm,
        pytest.raises(EngineDeadError, match=place),
    ):
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4), use_tqdm=False)


# ---- CUDA's own check, with torch's part played -------------------------------------------------


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the sync debug mode was set to, in order."""
    seen: list[object] = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: seen[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", seen.append)
    return seen


def test_cudas_error_gets_the_place_it_came_from(modes: list[object]) -> None:
    def wait() -> None:
        raise RuntimeError("called a synchronizing CUDA operation")

    check = CudaSyncCheck(raises=True)
    line = inspect.getsourcelines(wait)[1] + 1
    with (
        pytest.raises(StepaheadError, match=re.escape(f"{__file__}:{line} in wait")),
        check.watching(),
        check.watching(),
    ):
        wait()
    assert modes == [0, "error", "error", "error", 0]


def test_other_errors_pass_cudas_check_unchanged(modes: list[object]) -> None:
    with pytest.raises(RuntimeError, match="out of memory"), CudaSyncCheck(raises=True).watching():
        raise RuntimeError("out of memory")
    assert modes[-1] == 0


def test_cudas_warning_is_told_once_a_place_and_other_warnings_still_come(
    modes: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    check = CudaSyncCheck(raises=False)
    for _ in range(2):
        with check.watching():
            warnings.warn("called a synchronizing CUDA operation (Triggered internally at …)", stacklevel=1)
    with check.watching():
        warnings.warn("something else", stacklevel=1)
    assert len([r for r in caplog.records if f"at {__file__}" in r.message]) == 1
    assert len([r for r in caplog.records if "something else" in r.message]) == 1
    assert modes[-1] == 0
