"""OpenAI's own client, told no more than an address, a key and a CA, in its own environment variables.

It prints what it got as JSON; tests/lab/test_openai.py runs it where a client of the cluster is.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import openai

MODEL = "tiny-llama"
PROMPT = "The capital of France is"
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"warm": {"type": "boolean"}},
            "required": ["warm"],
            "additionalProperties": False,
        },
    },
}


def asked() -> dict[str, Any]:
    """Return what each of the client's ways to ask brought."""
    client = openai.OpenAI()
    found: dict[str, Any] = {"models": [model.id for model in client.models.list()]}
    whole = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0)
    found["whole"] = whole.choices[0].text
    pieces = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0, stream=True)
    found["stream"] = [piece.choices[0].text for piece in pieces]
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=8, temperature=0
    )
    found["chat"] = {"text": chat.choices[0].message.content, "tokens": chat.usage and chat.usage.completion_tokens}
    tool = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Is it warm?"}],
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        max_tokens=64,
        temperature=0,
    )
    found["tools"] = [call.to_dict()["function"] for call in tool.choices[0].message.tool_calls or ()]
    found["errors"] = [
        refusal(openai.OpenAI(api_key="sk-nobody"), MODEL, 8),
        refusal(client, "no-such-model", 8),
        refusal(client, MODEL, 10**6),
    ]
    found["async"] = asyncio.run(asked_at_once())
    return found


def refusal(client: openai.OpenAI, model: str, tokens: int) -> list[Any]:
    """Return the class of the error that a request ends with, its status and whether it says anything."""
    try:
        client.completions.create(model=model, prompt=PROMPT, max_tokens=tokens)
    except openai.APIStatusError as error:
        return [type(error).__name__, error.status_code, bool(error.message)]
    return ["no error", 200, False]


async def asked_at_once() -> list[str]:
    """Return what four requests brought that were under way at once, half of them streams."""
    async with openai.AsyncOpenAI() as client:

        async def whole() -> str:
            done = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0)
            return done.choices[0].text

        async def stream() -> str:
            pieces = await client.completions.create(
                model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0, stream=True
            )
            return "".join([piece.choices[0].text async for piece in pieces])

        return list(await asyncio.gather(whole(), stream(), whole(), stream()))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asked()))
