"""Triton kernels run on the GPU where there is one, else on CPU tensors under Triton's interpreter."""

import importlib.util
import os
import sys

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()

if not HAS_CUDA:
    # Read once, when triton is imported: by the first launch of a kernel.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where a test of a Triton kernel puts its tensors."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if not HAS_CUDA and "triton" in sys.modules:
        from triton import knobs

        assert knobs.runtime.interpret, "triton was imported before its interpreter was asked for"
    return torch.device("cuda" if HAS_CUDA else "cpu")


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)
