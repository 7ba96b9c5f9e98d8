"""From prepared requests to an HTTP answer, whole or streamed: what completions and chats have in common."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ramet.errors import RametError
from ramet.frontend.client import Prompt
from ramet.frontend.tokenizer import Tokenizer
from ramet.outputs import CompletionOutput, RequestOutput
from ramet.server.asked import Asked
from ramet.server.errors import as_api_error
from ramet.server.logprobs import LogprobForms
from ramet.server.sse import DONE, EventStream, event, json_response, result_unless_gone
from ramet.server.state import ServerState
from ramet.service.subscription import Made

log = logging.getLogger(__name__)


class Usage:
    """Tokens of a request: each prompt counted once, whatever its n."""

    def __init__(self) -> None:
        self.prompt = self.cached = self.completion = 0

    def add_prompt(self, output: RequestOutput) -> None:
        """Count a finished prompt."""
        self.prompt += len(output.prompt_token_ids)
        self.cached += output.num_cached_tokens

    def as_dict(self) -> dict[str, Any]:
        """Return the form of OpenAI."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Writer(ABC):
    """Writes the answer of one request in the form of its endpoint.

    Parameters
    ----------
    public_id, model : str
    asked : Asked
    tokenizer : Tokenizer
    """

    kind: str  #: ``object`` of a whole answer
    chunk_kind: str  #: and of a part

    def __init__(self, public_id: str, model: str, asked: Asked, tokenizer: Tokenizer) -> None:
        self.asked, self.tokenizer = asked, tokenizer
        self.forms = LogprobForms(tokenizer, asked.tokens_as_ids)
        self.usage = Usage()
        self._head = {"id": public_id, "created": int(time.time()), "model": model}
        self._ended: set[int] = set()  # choices that have had their last part

    @abstractmethod
    def choice(self, index: int, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        """Return a whole choice."""

    @abstractmethod
    def part(self, index: int, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        """Return what is new of a choice."""

    def first_parts(self, number: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Return the parts of choices that come before any token."""
        return []

    def extras(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return what a whole answer has besides its choices."""
        return {}

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the whole answer."""
        choices = []
        for number, output in enumerate(outputs):
            self.usage.add_prompt(output)
            for sample in output.outputs:
                self.usage.completion += len(sample.token_ids)
                choices.append(self.choice(self._index(number, sample.index), output, sample))
        head = {**self._head, "object": self.kind}
        return {**head, "choices": choices, "usage": self.usage.as_dict(), **self.extras(outputs)}

    def beginning(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Return the events that come before any token."""
        parts = [part for number, output in enumerate(outputs) for part in self.first_parts(number, output)]
        return b"".join(map(self._chunk, parts))

    def events(self, number: int, output: RequestOutput) -> bytes:
        """Return the events of an answer's news: one for each choice that has any."""
        found = []
        for sample in output.outputs:
            index = self._index(number, sample.index)
            if index in self._ended or not (sample.token_ids or sample.finish_reason):
                continue
            self.usage.completion += len(sample.token_ids)
            if sample.finish_reason is not None:
                self._ended.add(index)
            elif not sample.text and sample.logprobs is None and not self.asked.return_token_ids:
                continue  # half a character, or the beginning of a stop string
            found.append(self._chunk(self.part(index, output, sample)))
        if output.finished:
            self.usage.add_prompt(output)
        return b"".join(found)

    def last_event(self) -> bytes:
        """Return the event with the usage, if it was asked for."""
        if not self.asked.include_usage:
            return b""
        return event({**self._head, "object": self.chunk_kind, "choices": [], "usage": self.usage.as_dict()})

    def resuming(self, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        """Return what it takes, besides token ids, to go on with a sample."""
        return {"seed": output.seed, "sample_id": self.asked.first_sample_id + sample.index}

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        usage = {"usage": None} if self.asked.include_usage else {}
        return event({**self._head, "object": self.chunk_kind, "choices": [choice], **usage})

    def _index(self, number: int, k: int) -> int:
        return number * self.asked.params.n + k


async def answer(
    request: Request, state: ServerState, public_id: str, prompts: Sequence[Prompt], asked: Asked, writer: Writer
) -> Response:
    """Serve a request.

    Raises
    ------
    ApiError, RametError
        It can't be served; nothing was started then.
    """
    engine_ids = [f"{public_id}-{i}" for i in range(len(prompts))]
    with ExitStack() as place:
        place.enter_context(state.admitted(public_id, engine_ids, len(prompts) * asked.params.n))
        made = [
            await state.llm.prepare(
                prompt,
                asked.params,
                request_id=engine_id,
                first_sample_id=asked.first_sample_id,
                first_k=asked.first_k,
            )
            for prompt, engine_id in zip(prompts, engine_ids, strict=True)
        ]
        if asked.stream:  # it gives the place back when it ends
            return EventStream(_stream(request, state, made, writer), state.config.write_timeout, place.pop_all().close)
        return json_response(await result_unless_gone(request, _whole(state, made, writer)))


async def _whole(state: ServerState, made: Sequence[Made], writer: Writer) -> dict[str, Any]:
    outputs = [output for _, output in made]
    async with aclosing(state.llm.follow(made)) as changes:
        async for number, output in changes:
            outputs[number] = output
    return writer.whole(outputs)


async def _stream(
    request: Request, state: ServerState, made: Sequence[Made], writer: Writer
) -> AsyncGenerator[bytes, None]:
    """The events of a streamed answer. An error in the middle is its last event."""
    try:
        yield writer.beginning([output for _, output in made])
        async with aclosing(state.llm.follow(made)) as changes:
            async for number, output in changes:
                if events := writer.events(number, output):
                    yield events
        yield writer.last_event() + DONE
    except RametError as error:
        request_id = request.scope["state"]["request_id"]
        log.warning("request %s ends with an error: %s", request_id, " ".join(str(error).split())[:400])
        yield event(as_api_error(error, request_id).body()) + DONE
