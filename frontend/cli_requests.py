"""What the options of `stepahead generate` ask for, checked before an engine is started."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

from ..errors import InvalidRequestError
from .request_processing import check_text

_TOKEN_IDS = "must be token ids, as 1,2,3 or [1, 2, 3]"


@dataclass
class CommandRequest:
    """prompt: as it was given. priority: 0 for all where the policy is fcfs."""

    prompt: str | list[int]
    priority: int


def requests_of(arguments: argparse.Namespace) -> list[CommandRequest]:
    """In the order given, texts first. Raises: InvalidRequestError."""
    texts: list[str] = arguments.prompt or []
    ids = [_parse_ids(text) for text in arguments.prompt_token_ids or []]
    if not texts and not ids:
        raise InvalidRequestError("there is nothing to answer: give --prompt, or --prompt-token-ids")
    _check_texts(texts, arguments.chat, getattr(arguments, "skip_tokenizer_init", False))
    if ids and arguments.chat:
        raise InvalidRequestError("--chat puts text into a template: it cannot go with --prompt-token-ids")
    prompts: list[str | list[int]] = [*texts, *ids]
    priorities = _priorities(arguments, len(prompts))
    return [CommandRequest(prompt, priority) for prompt, priority in zip(prompts, priorities, strict=True)]


def _check_texts(texts: list[str], chat: bool, no_tokenizer: bool) -> None:
    if texts and no_tokenizer:
        raise InvalidRequestError("--prompt needs a tokenizer: with --skip-tokenizer-init give --prompt-token-ids")
    for text in texts:
        check_text("--prompt", text)
        if not text and not chat:
            raise InvalidRequestError("--prompt is empty: it must hold at least one token")


def _priorities(arguments: argparse.Namespace, total: int) -> list[int]:
    given: list[int] = arguments.priority or []
    if not given:
        return [0] * total
    if getattr(arguments, "scheduling_policy", None) != "priority":
        raise InvalidRequestError(f"--priority {given[0]} means nothing without --scheduling-policy priority")
    if len(given) not in (1, total):
        raise InvalidRequestError(
            f"--priority was given {len(given)} times for {total} prompts: once, or once a prompt"
        )
    return given * total if len(given) == 1 else given


def _parse_ids(text: str) -> list[int]:
    try:
        ids = json.loads(text if text.lstrip().startswith("[") else f"[{text}]")
    except ValueError:
        raise InvalidRequestError(f"--prompt-token-ids {text!r}: {_TOKEN_IDS}") from None
    if not ids:
        raise InvalidRequestError("--prompt-token-ids is empty: it must hold at least one token id")
    if any(type(token_id) is not int or token_id < 0 for token_id in ids):
        raise InvalidRequestError(f"--prompt-token-ids {text!r}: {_TOKEN_IDS}")
    return ids
