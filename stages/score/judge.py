"""A judge asked over HTTP: rubric out, verdict in; several at once, bounded, retried, counted.

The protocol is that of OpenAI's chat completions, which vLLM, SGLang, llama.cpp and most providers
speak. An answer belongs to the sample that it was asked for, whatever comes first.
"""

import asyncio
import email.utils
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    wait_random_exponential,
)

from stages.contract import StageError
from stages.score.calls import Pace
from stages.score.conversation import prompt_for_people
from stages.score.judge_spec import JudgeSpec, api_key_of, rubric_of
from stages.score.outcomes import Failure, Outcome, normalized
from stages.score.verdict import NoVerdictError, read_verdict

_PLACES = re.compile(r"\{(prompt|response|ground_truth)\}")
# However long an endpoint asks us to wait, a sample's attempts are to end one day.
_LONGEST_WAIT = 60.0
_BACKOFF = wait_random_exponential(multiplier=0.5, max=_LONGEST_WAIT)
_SHOWN = 200
# More than any answer takes, and little enough to add up.
_MOST_TOKENS = 2**32
_SHORTEST_SECRET = 8
_PASSING_STATUSES = (408, 409, 425, 429)


class JudgeUnavailableError(Exception):
    """The endpoint gives no answer now. ``seconds``: when to ask again, where it said so."""

    def __init__(self, message: str, seconds: float | None = None) -> None:
        super().__init__(message)
        self.seconds = seconds


class JudgeRefusedError(Exception):
    """The endpoint won't answer this request, however often it is asked."""


class Judge:
    """Like ``RewardProcess``, for rollout rows; in the worker's own process, as it is our code."""

    def __init__(self, spec: JudgeSpec, workers: int) -> None:
        self._spec = spec
        rate = spec.requests_per_minute
        self._pace = Pace(None if rate is None else rate / 60 / workers)

    def score(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Outcome | None]]:
        """Events as in ``RewardProcess.score``, all of them when the last answer is there.

        Raises:
            StageError: this machine lacks the rubric's file or the key.
        """
        # Here and not in the constructor: what goes wrong here is told as it is, and is no death.
        try:
            self._rubric, self._key = rubric_of(self._spec), api_key_of(self._spec)
        except ValueError as error:
            raise StageError(f"{error}, on every machine that scores") from None
        return iter(list(enumerate(asyncio.run(self._ask_all(rows)))))

    def close(self) -> None:
        """Nothing to end."""

    async def _ask_all(self, rows: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        slots = asyncio.Semaphore(self._spec.concurrency)
        # Our own clock ends a request, as theirs is kept anew for every part of an answer.
        async with httpx.AsyncClient(headers=headers, timeout=None) as client:

            async def ask(row: Mapping[str, Any]) -> Outcome:
                async with slots:
                    return await self._ask(client, row)

            return await asyncio.gather(*(ask(row) for row in rows))

    async def _ask(self, client: httpx.AsyncClient, row: Mapping[str, Any]) -> Outcome:
        if row["ground_truth"] is None and "{ground_truth}" in self._rubric:
            return Outcome()  # it abstains, as rewards do that compare
        used: list[tuple[int, int]] = []
        retrying = AsyncRetrying(
            stop=stop_after_attempt(self._spec.attempts),
            wait=_seconds_to_wait,
            retry=retry_if_exception_type((JudgeUnavailableError, NoVerdictError)),
            reraise=True,
        )
        try:
            value: float = await retrying(self._attempt, client, self._request(row), used)
        except (JudgeUnavailableError, JudgeRefusedError, NoVerdictError) as error:
            return Outcome(failure=self._failure(error), usage=_total(used))
        return Outcome(value, usage=_total(used))

    async def _attempt(
        self, client: httpx.AsyncClient, request: Mapping[str, Any], used: list[tuple[int, int]]
    ) -> float:
        await self._pace.turn()
        answer = await self._post(client, request)
        counted = answer.get("usage")
        if isinstance(counted, dict):
            used.append((_count(counted, "prompt_tokens"), _count(counted, "completion_tokens")))
        return read_verdict(self._spec, _text_of(answer))

    async def _post(
        self, client: httpx.AsyncClient, request: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """The endpoint's answer. Raises JudgeUnavailableError, JudgeRefusedError."""
        seconds = self._spec.timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                reply = await client.post(f"{self._spec.judge}/chat/completions", json=request)
        except TimeoutError:
            raise JudgeUnavailableError(f"no answer within {seconds:g} s") from None
        except httpx.HTTPError as error:
            raise JudgeUnavailableError(f"{type(error).__name__}: {error}") from None
        text = self._without_key(reply.text)
        described = f"the endpoint answered with status {reply.status_code}: {text[:_SHOWN]!r}"
        if reply.status_code in _PASSING_STATUSES or reply.status_code >= 500:
            raise JudgeUnavailableError(described, _retry_after(reply))
        if reply.status_code != 200:
            raise JudgeRefusedError(described)
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise JudgeUnavailableError(f"the answer is no JSON object: {text[:_SHOWN]!r}")
        return answer

    def _without_key(self, text: str) -> str:
        """``text`` without the key, which an endpoint may repeat. Short ones keep no secret."""
        if self._key is None or len(self._key) < _SHORTEST_SECRET:
            return text
        return text.replace(self._key, "***")

    def _request(self, row: Mapping[str, Any]) -> dict[str, Any]:
        parts = {
            "prompt": prompt_for_people(row),
            "response": row["text"],
            "ground_truth": row["ground_truth"] or "",
        }
        # In one pass: a response that holds "{ground_truth}" is not filled in.
        rubric = _PLACES.sub(lambda place: parts[place[1]], self._rubric)
        fields = {
            "model": self._spec.model,
            "messages": [{"role": "user", "content": rubric}],
            "temperature": self._spec.temperature,
            "max_tokens": self._spec.max_tokens,
            **self._spec.options,
        }
        return {name: value for name, value in fields.items() if value is not None}

    def _failure(self, error: Exception) -> Failure:
        message = str(error)
        if not isinstance(error, JudgeRefusedError):
            message = f"{message} (in the last of {self._spec.attempts} attempts)"
        return Failure(type(error).__name__, normalized(self._without_key(message)))


def _text_of(answer: Mapping[str, Any]) -> str:
    """What the judge wrote. Raises NoVerdictError where that is nothing, or was cut.

    Of "score: 10" that is cut after the 1, a verdict could be read, and a wrong one.
    """
    try:
        choice = answer["choices"][0]
        text, reason = choice["message"]["content"], choice.get("finish_reason")
    except (AttributeError, KeyError, IndexError, TypeError):
        shown = json.dumps(answer)[:_SHOWN]
        raise NoVerdictError(f"the endpoint's answer holds no message: {shown}") from None
    text = text if isinstance(text, str) else ""
    if reason == "length":
        raise NoVerdictError(
            f"the answer was cut at its token limit (max_tokens), and begins: {text[:_SHOWN]!r}"
        )
    return text


def _seconds_to_wait(state: RetryCallState) -> float:
    """What the endpoint asks for, within a bound; else more and more; an unread answer: none."""
    error = state.outcome.exception() if state.outcome is not None else None
    if not isinstance(error, JudgeUnavailableError):
        return 0.0
    return _BACKOFF(state) if error.seconds is None else min(error.seconds, _LONGEST_WAIT)


def _retry_after(reply: httpx.Response) -> float | None:
    """Seconds of the header Retry-After, which holds a number or a date (RFC 9110, 10.2.3)."""
    text = reply.headers.get("Retry-After", "")
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return None


def _count(usage: Mapping[str, Any], name: str) -> int:
    value = usage.get(name)
    return value if isinstance(value, int) and 0 < value < _MOST_TOKENS else 0


def _total(used: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    if not used:
        return None
    return sum(tokens for tokens, _ in used), sum(tokens for _, tokens in used)
