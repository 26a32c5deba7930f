"""The command line. What is slow to import is imported late, so that --help is quick."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import types
import typing
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from .. import __version__
from ..config import DEVICES, DTYPES, HELP, LOAD_FORMATS, LOG_LEVELS, POLICIES, EngineConfig
from ..errors import EngineDeadError, StepaheadError
from ..worker import standard_streams
from ..worker.logs import log_to_stderr
from .generation_report import GenerationReport
from .outputs import RequestMetrics
from .sampling_params import RequestOutputKind, SamplingParams
from .tokenizer import render_chat

if TYPE_CHECKING:
    from .async_llm import AsyncLLM
    from .cli_requests import CommandRequest
    from .request_processing import Prompt

_ENGINE_FAILED = 1
_USER_ERROR = 2
_INTERRUPTED = 128 + signal.SIGINT
_TERMINATED = 128 + signal.SIGTERM
_BROKEN_PIPE = 128 + signal.SIGPIPE

_CHOICES = {
    "dtype": DTYPES,
    "load_format": LOAD_FORMATS,
    "device": DEVICES,
    "scheduling_policy": POLICIES,
    "log_level": LOG_LEVELS,
}
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "min_tokens", "ignore_eos",
)  # fmt: skip
_NOT_OPTIONS = {"model", "seed"}  # --model has its own text; --seed is the request's
_NOT_TRACE_OPTIONS = {"model", "async_scheduling"}  # a trace has both
_MODEL_HELP = "a local folder, or a Hugging Face hub id"
_SIMPLE_TYPES: dict[str, type] = {"float": float, "int": int, "int | None": int, "bool": bool}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 when the engine failed, 2 for an error of the user's, 130, 141 or 143 after SIGINT, a
    closed pipe, SIGTERM."""
    standard_streams.open_missing()
    arguments = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except StepaheadError as error:
        print(f"stepahead: error: {error}", file=sys.stderr)
        return _ENGINE_FAILED if isinstance(error, EngineDeadError) else _USER_ERROR
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # the interpreter flushes stdout once more when it ends: give it somewhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    return 0


def check(argv: Sequence[str]) -> argparse.Namespace:
    """A command line, as far as it can be judged before anything is started. Raises: SystemExit, StepaheadError."""
    arguments = _parser().parse_args(argv)
    if arguments.run is _generate:
        _questions(arguments)
    return arguments


def _terminate(signum: int, frame: types.FrameType | None) -> None:
    sys.exit(_TERMINATED)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="stepahead", description="An LLM inference engine that plans one step ahead.")
    parser.add_argument("--version", action="version", version=f"stepahead {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    generate = commands.add_parser(
        "generate",
        help="generate text for prompts",
        description="Generates text. One prompt is streamed to stdout as it comes.",
    )
    generate.set_defaults(run=_generate)
    generate.add_argument("--model", required=True, help=_MODEL_HELP)
    generate.add_argument("--prompt", action="append", help="may be given several times")
    generate.add_argument(
        "--prompt-token-ids", action="append", metavar="IDS", help="a prompt as 1,2,3 or [1, 2, 3]; several times too"
    )
    generate.add_argument(
        "--priority", action="append", type=int, metavar="INT",
        help="with --scheduling-policy priority, a lower number goes first: one for all, or given once a prompt",
    )  # fmt: skip
    generate.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template")
    generate.add_argument("--json", action="store_true", help="print a JSON object a prompt, then one about the run")
    sampling = generate.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=128, help="default: 128")
    sampling.add_argument("--stop", action="append", help="a string that ends the text; may be given several times")
    for field in fields(SamplingParams):
        if field.name in _SAMPLING:
            _add_option(sampling, field.name, _SIMPLE_TYPES[str(field.type)], field.default)
    _add_engine_options(generate, _NOT_OPTIONS)
    keygen = commands.add_parser(
        "keygen",
        help="make a key for workers on other machines",
        description="Writes a secret key for the links of an engine and its external workers (--key-file of both).",
    )
    keygen.set_defaults(run=_keygen)
    keygen.add_argument("file", type=Path, metavar="FILE", help="is not overwritten")
    trace = commands.add_parser(
        "trace",
        help="record and draw what every process does, with and without overlap",
        description="Runs the same work with synchronous and with async scheduling; writes trace.json (for "
        "ui.perfetto.dev), timeline.png and timeline.svg.",
    )
    trace.set_defaults(run=_trace)
    trace.add_argument("--model", required=True, help=_MODEL_HELP)
    trace.add_argument("--requests", type=int, default=8, metavar="INT", help="running at once; default: 8")
    trace.add_argument("--max-tokens", type=int, default=64, metavar="INT", help="of each request; default: 64")
    trace.add_argument("--out", type=Path, default=Path("trace"), metavar="DIR", help="default: trace")
    _add_engine_options(trace, _NOT_TRACE_OPTIONS)
    return parser


def _add_engine_options(parser: argparse.ArgumentParser, left_out: set[str]) -> None:
    group = parser.add_argument_group("engine")
    hints = typing.get_type_hints(EngineConfig)
    for setting in msgspec.structs.fields(EngineConfig):
        if setting.name not in left_out:
            _add_option(group, setting.name, _plain_type(hints[setting.name]), setting.default, HELP[setting.name])


def _plain_type(hint: Any) -> type:
    """`int` of `int | None`."""
    plain = [part for part in typing.get_args(hint) if part is not type(None)]
    return plain[0] if plain else hint


def _add_option(group: Any, name: str, kind: type, default: Any, meaning: str = "") -> None:
    """An option that appears in the parsed arguments only when it was given."""
    flag = f"--{name.replace('_', '-')}"
    known = f"default: {'decided by itself' if default is None else default}"
    text = f"{meaning} ({known})" if meaning else known
    if kind is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        return
    choices = _CHOICES.get(name)
    metavar = None if choices else kind.__name__.upper()
    group.add_argument(flag, type=kind, choices=choices, default=argparse.SUPPRESS, metavar=metavar, help=text)


def _given(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}


def _keygen(arguments: argparse.Namespace) -> None:
    from ..worker.link_key import write_key_file

    write_key_file(arguments.file)
    print(f"{arguments.file}: a new key, for this user alone; copy it to the workers' machines", file=sys.stderr)


def _trace(arguments: argparse.Namespace) -> None:
    from .trace_command import run_trace

    settings = _given(arguments, [name for name in EngineConfig.__struct_fields__ if name not in _NOT_TRACE_OPTIONS])
    run_trace(arguments.model, settings, arguments.requests, arguments.max_tokens, arguments.out)


def _generate(arguments: argparse.Namespace) -> None:
    settings = _given(arguments, [name for name in EngineConfig.__struct_fields__ if name not in _NOT_OPTIONS])
    if "log_level" in settings:
        log_to_stderr("front end", settings["log_level"])
    asked, params = _questions(arguments)
    from .async_llm import AsyncLLM

    engine = AsyncLLM(arguments.model, **settings)
    try:
        report = GenerationReport(engine.engine_info)
        if not arguments.json:
            print(report.mode_line(), file=sys.stderr, flush=True)
        asyncio.run(_answer(engine, asked, arguments, params, report))
    finally:
        engine.close()
    if arguments.json:
        print(json.dumps(report.as_dict()))
    else:
        print(report.end_line(), file=sys.stderr)


def _questions(arguments: argparse.Namespace) -> tuple[Sequence[CommandRequest], SamplingParams]:
    """Raises: InvalidRequestError."""
    from .cli_requests import requests_of

    asked = requests_of(arguments)
    stream = not arguments.json and len(asked) == 1
    params = SamplingParams(
        max_tokens=arguments.max_tokens,
        stop=arguments.stop,
        output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
        **_given(arguments, _SAMPLING),
    )
    return asked, params


async def _answer(
    engine: AsyncLLM,
    asked: Sequence[CommandRequest],
    arguments: argparse.Namespace,
    params: SamplingParams,
    report: GenerationReport,
) -> None:
    """All prompts at once; their texts in the order of the prompts."""
    show = sys.stdout.write if params.output_kind is RequestOutputKind.DELTA else None
    report.start()
    requests = [asyncio.create_task(_complete(engine, one, arguments.chat, params, show)) for one in asked]
    try:
        for one, request in zip(asked, requests, strict=True):
            answer = await request
            report.add(answer.num_prompt, len(answer.token_ids), answer.metrics)
            if arguments.json:
                shown = {name: getattr(answer, name) for name in ("text", "token_ids", "finish_reason")}
                print(json.dumps({"prompt": one.prompt, **shown}), flush=True)
            elif show is None:
                print(f"> {one.prompt}\n{answer.shown}\n", flush=True)
            else:
                print()
    finally:
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
    report.finish(await engine.stats())


@dataclass
class _Answer:
    num_prompt: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    metrics: RequestMetrics
    shown: str = ""


async def _complete(
    engine: AsyncLLM, asked: CommandRequest, chat: bool, params: SamplingParams, show: Callable[[str], Any] | None
) -> _Answer:
    """show: gets the text, or the token ids of an engine without a tokenizer, as it comes."""
    prompt: Prompt = asked.prompt
    if chat:
        prompt = render_chat(engine.get_tokenizer(), [{"role": "user", "content": asked.prompt}])
    answer = _Answer(0, "", [], None, RequestMetrics(0.0))
    texts = engine.has_tokenizer
    stream = engine.generate(prompt, params, priority=asked.priority, add_special_tokens=not chat)
    async with aclosing(stream) as outputs:
        async for output in outputs:
            sequence = output.outputs[0]
            news = sequence.text if texts else "".join(f"{token_id} " for token_id in sequence.token_ids)
            if show is not None:
                show(news)
                sys.stdout.flush()
            answer.text += sequence.text
            answer.shown += news
            answer.token_ids += sequence.token_ids
            answer.finish_reason = sequence.finish_reason
            answer.num_prompt, answer.metrics = len(output.prompt_token_ids), output.metrics
    return answer
