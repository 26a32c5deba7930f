"""`import stepahead` is cheap: it loads nothing heavy until a name is used."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "transformers", "triton", "numpy", "zmq", "msgspec")


def loaded_after(code: str) -> set[str]:
    """Which heavy modules a fresh interpreter has after running `code`."""
    script = f"import sys\n{code}\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_after("import stepahead") == set()


def test_what_the_engine_core_imports_has_no_torch() -> None:
    code = (
        "import stepahead.engine_core.process, stepahead.engine_core.engine, stepahead.executor.multiproc\n"
        "import stepahead.worker.process, stepahead.config, stepahead.worker.model_config"
    )
    assert not {"torch", "transformers", "triton"} & loaded_after(code)


def test_sampling_params_need_no_torch() -> None:
    assert not {"torch", "transformers"} & loaded_after("from stepahead import SamplingParams; SamplingParams(n=2)")


def test_every_public_name_can_be_imported() -> None:
    code = "import stepahead\nfor name in stepahead.__all__: getattr(stepahead, name)\nassert 'LLM' in dir(stepahead)"
    assert "msgspec" in loaded_after(code), "the names are not the real ones"
