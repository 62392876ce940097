"""Plays episodes of a served environment with OpenEnv's own client; prints a line of JSON each.

Usage: python openenv_client.py URL TURNS_OF_EACH_EPISODE (JSON)
"""

from __future__ import annotations

import json
import sys

from openenv.core import GenericEnvClient


def main(url: str, episodes: list[list[str]]) -> None:
    """Episode N is row N of the file."""
    with GenericEnvClient(base_url=url).sync() as env:
        for index, turns in enumerate(episodes):
            first = env.reset(index=index)
            texts = [first.observation["text"]]
            for turn in turns:
                result = env.step({"text": turn})
                texts.append(result.observation["text"])
            line = {
                "texts": texts, "messages": first.observation["messages"],
                "reward": result.reward, "done": result.done,
                "metadata": result.metadata or result.observation.get("metadata"),
                "steps": env.state()["step_count"],
            }  # fmt: skip
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
