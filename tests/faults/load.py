"""Steady greedy requests on the head's host: runs there with the host's own Python, one line of JSON for each answer.

It ends when nobody reads any more, and asks again after errors: clients of a real service do the same.
"""

from __future__ import annotations

import http.client
import json
import sys
import time

PORT, MODEL, LIMIT = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
PROMPTS = sys.argv[4:]


def ask(prompt: str) -> tuple[str, str]:
    """Return the status (`000`: the connection broke, `timeout`: no answer in time) and the text."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=LIMIT)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        data = json.loads(answer.read())
    except TimeoutError:
        return "timeout", ""
    except (OSError, http.client.HTTPException, ValueError):
        return "000", ""
    finally:
        connection.close()
    return str(answer.status), data["choices"][0]["text"] if answer.status == 200 else ""


number = 0
while True:
    prompt = PROMPTS[number % len(PROMPTS)]
    began = time.monotonic()
    status, text = ask(prompt)
    line = {"prompt": prompt, "status": status, "text": text, "seconds": round(time.monotonic() - began, 2)}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
    number += 1
    time.sleep(0.5 if status == "200" else 1.0)
