"""A first session with ``python serve.py``, through OpenAI's own client: chat, thinking, a tool call with its result.

    python serve.py                      # in another terminal: the small embedded model
    python examples/first_session.py     # needs pip install openai; --url names another server

Greedy decoding, so the embedded model says what README shows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import openai

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def get_weather(city: str) -> dict[str, Any]:
    """The tool: a pretended one."""
    return {"temperature": 18, "sky": "cloudy"}


class Session:
    """One conversation, printed as it goes. options: further fields of the requests."""

    def __init__(self, client: openai.OpenAI, **options: Any):
        self.client, self.options = client, options
        self.messages: list[Any] = []

    def say(self, text: str) -> str:
        """A user turn; returns the answer, after any calls were made."""
        print(f"user      {text}")
        self.messages.append({"role": "user", "content": text})
        while True:
            message = self._reply()
            if not message.tool_calls:
                print(f"flint     {message.content}\n")
                return message.content
            for call in message.tool_calls:
                print(f"call      {call.function.name} {call.function.arguments}")
                result = json.dumps(get_weather(**json.loads(call.function.arguments)))
                print(f"result    {result}")
                self.messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    def _reply(self) -> Any:
        reply = self.client.chat.completions.create(
            model="flint-tiny", messages=self.messages, temperature=0, max_tokens=200, **self.options
        )
        message = reply.choices[0].message
        self.messages.append(message)
        if thought := getattr(message, "reasoning", None):
            print(f"thinks    {thought}")
        return message


def main(argv: Sequence[str] | None = None) -> None:
    """Print the session."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    args = parser.parse_args(argv)
    with openai.OpenAI(base_url=args.url, api_key=args.api_key) as client:
        chat = Session(client)
        chat.say("Hello")
        chat.say("My dog is called Bello.")
        chat.say("What is my dog called?")
        Session(client).say("What is 348 + 276?")
        Session(client, reasoning_effort="none").say("What is 38 + 47?")  # the same without a thought
        Session(client, tools=[TOOL]).say("What is the weather in Paris?")


if __name__ == "__main__":
    main()
