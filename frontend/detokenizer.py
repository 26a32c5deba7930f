"""Token ids to text, one token at a time.

Two roads. Nearly every tokenizer decodes token by token: byte-level BPE, and SentencePiece-like ones with
byte fallback; there a token's *piece* (text, or bytes that are not whole characters) is computed once and
looked up ever after. For any other decoder, a short window of tokens is decoded again for each new one.

Either way the text is what the tokens add in the middle of a text: the space that SentencePiece decoders
drop at the very beginning of one is kept, since the prompt's text stands before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

Piece = str | bytes

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PER_TOKEN_DECODERS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
_REPLACEMENT = "\ufffd"
_ANCHOR = "a"
_MAX_HELD_TOKENS = 16  # no character is spelled with more: an end that does not decode by then never will
_CONTEXT_TOKENS = 6


class Detokenizer(Protocol):
    """The text of one sequence."""

    def push(self, token_id: int) -> str:
        """The text that is certain now, possibly empty. Never half a character."""

    def flush(self) -> str:
        """What was held back: the sequence has ended in the middle of a character."""


class DetokenizerFactory:
    """Makes detokenizers for one tokenizer, and keeps its pieces."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._pieces: tuple[Pieces, Pieces] | None = None
        if backend is not None and (kind := _decoder_kind(backend)) is not None:
            special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
            self._pieces = Pieces(backend, kind, frozenset()), Pieces(backend, kind, special)

    def make(self, prompt: Sequence[int], skip_special_tokens: bool) -> Detokenizer:
        if self._pieces is not None:
            return PieceDetokenizer(self._pieces[skip_special_tokens])
        return WindowDetokenizer(self._tokenizer, prompt, skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """One token alone, as logprobs show it; bytes that are not whole characters show as U+FFFD."""
        if self._pieces is not None:
            piece = self._pieces[0][token_id]
            return piece if isinstance(piece, str) else piece.decode("utf-8", "replace")
        return self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)


class Pieces(dict[int, Piece]):
    """A token's text in the middle of a text; bytes when it holds parts of characters. Filled on demand.

    skipped: ids that have no text (special tokens, when those are to be skipped).
    """

    def __init__(self, backend: Any, kind: str, skipped: Any) -> None:
        super().__init__()
        self._backend = backend
        self._decoder = backend.decoder
        self._kind = kind
        self._skipped = skipped
        self.one_mark_per_byte = kind == "fallback"

    def __missing__(self, token_id: int) -> Piece:
        piece = self[token_id] = self._compute(token_id)
        return piece

    def _compute(self, token_id: int) -> Piece:
        token = None if token_id in self._skipped else self._backend.id_to_token(token_id)
        if token is None:
            return ""
        if self._kind == "bytes":
            data = _bytes_of(token)
        elif self._kind == "fallback" and (match := _BYTE_TOKEN.fullmatch(token)):
            data = bytes([int(match[1], 16)])
        else:
            return self._decoder.decode([_ANCHOR, token])[len(_ANCHOR) :]
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data


class PieceDetokenizer:
    __slots__ = ("_held", "_pieces")

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._held = b""

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if isinstance(piece, str):
            if not self._held or not piece:
                return piece
            return self.flush() + piece
        text, self._held = _decode_prefix(self._held + piece, self._pieces.one_mark_per_byte)
        return text

    def flush(self) -> str:
        marks = len(self._held) if self._pieces.one_mark_per_byte else min(len(self._held), 1)
        self._held = b""
        return _REPLACEMENT * marks


class WindowDetokenizer:
    """Decodes the tokens since the last certain text again, with a few before them as context."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(prompt[-_CONTEXT_TOKENS:])
        self._start = 0
        self._certain = len(self._ids)

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        new = self._new_text()
        if not new or (new.endswith(_REPLACEMENT) and len(self._ids) - self._certain < _MAX_HELD_TOKENS):
            return ""
        return self._emit(new)

    def flush(self) -> str:
        return self._emit(self._new_text())

    def _new_text(self) -> str:
        before = self._decode(self._ids[self._start : self._certain])
        return self._decode(self._ids[self._start :])[len(before) :]

    def _emit(self, text: str) -> str:
        self._start, self._certain = self._certain, len(self._ids)
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False)


def _decoder_kind(backend: Any) -> str | None:
    """ "bytes": tokens spell UTF-8 bytes. "fallback": text, and byte tokens <0xHH>. "text". None: anything else."""
    if backend.decoder is None:
        return None
    decoder = json.loads(backend.decoder.__getstate__())
    parts = decoder.get("decoders", [decoder])
    types = {part["type"] for part in parts}
    if types == {"ByteLevel"} and len(parts) == 1:
        return "bytes"
    strips_end = any(part["type"] == "Strip" and part["stop"] for part in parts)
    if strips_end or not types <= _PER_TOKEN_DECODERS:
        return None
    return "fallback" if "ByteFallback" in types else "text"


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes printable Latin-1 bytes as themselves and the others as U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _bytes_of(token: str) -> bytes:
    try:
        return bytes([_BYTES[char] for char in token])
    except KeyError:  # an added token, written as plain text
        return token.encode()


def _decode_prefix(data: bytes, one_mark_per_byte: bool) -> tuple[str, bytes]:
    """The text of `data` up to an unfinished character at its end, and that character's bytes.

    What can be no character becomes U+FFFD: one for each byte with byte fallback, else one for each run of
    bytes that could have begun a character (as UTF-8 decoders do).
    """
    parts = []
    while True:
        try:
            parts.append(data.decode())
            return "".join(parts), b""
        except UnicodeDecodeError as error:
            parts.append(data[: error.start].decode())
            if error.reason == "unexpected end of data":
                return "".join(parts), data[error.start :]
            parts.append(_REPLACEMENT * (error.end - error.start if one_mark_per_byte else 1))
            data = data[error.end :]
