"""The clients of Search-R1, verl, verl-tool, slime, SkyRL-gym and our own against our server.

    python experiments/retrieval/clients.py --data DIR --out FILE
    python experiments/retrieval/clients.py --data DIR --sources DIR --out FILE

DIR of --data holds `corpus.jsonl` and the questions; that of --sources the clients' files as
OWNER/REPOSITORY/PATH (else they are downloaded). Each file is the one of its pinned commit, by
SHA-256, and runs unchanged: the functions that its project calls are called, from as many threads
or tasks and with as many queries as its published recipe has. An answer is right if the text that
the client makes of it is what it makes of the passages that the index gives when it is asked
directly. Among the queries are a blank one, one of 20,000 characters, and some that are not ASCII.

default     the server as it starts.
full        a queue of eight queries: what a client makes of a refusal, with either `--busy-status`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import importlib.util
import io
import json
import logging
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import as_json, provenance
from bench.retrieval_load import make_queries
from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.data_io.pinned_download import Origin, download
from sg_rlhf.retrieval.index import build
from sg_rlhf.retrieval.limits import Limits
from sg_rlhf.retrieval.search import Hit, open_index
from sg_rlhf.tasks.search.retriever.client import RetrieverClient
from sg_rlhf.tasks.search.retriever.retriever_process import serve
from sg_rlhf.tasks.search.settings import SearchSettings

TOPK = 3
ODD = ["", "x" * 20_000, "Who wrote 北京? 🎬", "Łódź\u202e naïve", 'a "quoted" \\ query']

#: Queries of one call, and what it gave for each; the text of each query's passages.
Ask = Callable[[Sequence[str]], list[str]]
Text = Callable[[list[Hit]], str]


@dataclass(frozen=True)
class Client:
    """A project's client.

    Attributes:
        open: imports it from the folder of its sources, for a server's address.
        batch: queries of one call.
        at_once: calls at once.
        requests: what a call sends.
        queries: of one rollout step, by the recipe named in `recipe`.
    """

    name: str
    files: tuple[Origin, ...]
    open: Callable[[Path, str], tuple[Ask, Text]]
    batch: int
    at_once: int
    queries: int
    requests: str
    recipe: str


def documents(hits: list[Hit]) -> list[dict[str, Any]]:
    """Passages as the contract has them with scores."""
    return [{"document": hit.document, "score": hit.score} for hit in hits]


def module_of(path: Path) -> Any:
    """A file as a module of its own."""
    spec = importlib.util.spec_from_file_location(f"peer_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def open_search_r1(folder: Path, url: str) -> tuple[Ask, Text]:
    """The driver's step of all environments; what it imports of verl, a search does not use."""
    for name in ("verl", "verl.utils", "verl.utils.tracking"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["verl"].DataProto = sys.modules["verl.utils.tracking"].Tracking = object  # type: ignore[attr-defined]
    sys.path.insert(0, str(folder))
    module = importlib.import_module("search_r1.llm_agent.generation")
    manager = object.__new__(module.LLMGenerationManager)
    manager.config = module.GenerationConfig(2, 2048, 4096, 500, 500, 8, search_url=url, topk=TOPK)

    def ask(queries: Sequence[str]) -> list[str]:
        predictions = [f"<search>{query}</search>" for query in queries]
        observations: list[str] = manager.execute_predictions(
            predictions, "<pad>", [True] * len(queries)
        )[0]
        return observations

    return ask, lambda hits: information(manager._passages2string(documents(hits)))


def information(text: str) -> str:
    """An observation of Search-R1's and verl-tool's."""
    return f"\n\n<information>{text.strip()}</information>\n\n"


def open_verl(folder: Path, url: str) -> tuple[Ask, Text]:
    module = module_of(folder / "verl/tools/utils/search_r1_like_utils.py")

    def ask(queries: Sequence[str]) -> list[str]:
        text, _ = module.perform_single_search_batch(url, list(queries), topk=TOPK, timeout=30)
        return [text]

    def text(hits: list[Hit]) -> str:
        found = {"result": module._passages2string(documents(hits))}
        return json.dumps(found, ensure_ascii=False)

    return ask, text


def open_verl_tool(folder: Path, url: str) -> tuple[Ask, Text]:
    sys.path.insert(0, str(folder))
    module = importlib.import_module("verl_tool.servers.tools.search_retrieval")
    tool = module.SearchRetrievalTool(retriever_url=url, topk=TOPK)

    def ask(queries: Sequence[str]) -> list[str]:
        [query] = queries
        return [tool.conduct_action(id(queries), f"<search>{query}</search>", {})[0]]

    return ask, lambda hits: information(tool._passages2string(documents(hits)))


def open_slime(folder: Path, url: str) -> tuple[Ask, Text]:
    module = module_of(folder / "examples/search-r1/local_search_server.py")

    def ask(queries: Sequence[str]) -> list[str]:
        return asyncio.run(searches(lambda query: module.local_search(url, query, TOPK), queries))

    return ask, lambda hits: json.dumps(
        [{"document": {"contents": hit.document["contents"]}} for hit in hits]
    )


def open_skyrl(folder: Path, url: str) -> tuple[Ask, Text]:
    sys.path.insert(0, str(folder / "skyrl-gym"))
    module = importlib.import_module("skyrl_gym.tools.search")
    tools = module.SearchToolGroup(search_url=url, topk=TOPK, log_requests=False)

    def ask(queries: Sequence[str]) -> list[str]:
        [query] = queries
        return [tools.execute_tool("search", query)]

    return ask, lambda hits: json.dumps({"result": module._passages2string(documents(hits))})


def open_ours(folder: Path, url: str) -> tuple[Ask, Text]:
    def ask(queries: Sequence[str]) -> list[str]:
        async def all_of_them() -> list[str]:
            client = RetrieverClient(SearchSettings(url=url, topk=TOPK))
            try:
                return await searches(client.search, queries)
            finally:
                await client.aclose()

        return asyncio.run(all_of_them())

    def text(hits: list[Hit]) -> str:
        from sg_rlhf.tasks.search.protocol import Passage

        return json.dumps(
            [
                Passage.from_contents(hit.document["id"], hit.document["contents"], hit.score)
                for hit in hits
            ],
            default=vars_of,
        )

    return ask, text


async def searches(search: Callable[[str], Any], queries: Sequence[str]) -> list[str]:
    """As many dialogues as queries, each asking once."""

    async def one(query: str) -> str:
        return json.dumps(await search(query), default=vars_of)

    return list(await asyncio.gather(*(one(query) for query in queries)))


def vars_of(value: Any) -> Any:
    """A passage of our client as JSON."""
    return {name: getattr(value, name) for name in ("id", "title", "text", "score")}


def pinned(repository: str, commit: str, **files: str) -> tuple[Origin, ...]:
    """Files of a commit, `PATH=SHA-256`."""
    return tuple(Origin(repository, commit, path, sha256) for path, sha256 in files.items())


CLIENTS = (
    Client(
        "Search-R1",
        pinned(
            "PeterGriffinJin/Search-R1", "a14dc3a4ffc6fe88c1e95038d9738e21ba3f7a06",
            **{
                "search_r1/llm_agent/generation.py":
                    "ab88b308db9d0b72fdbdd9a00f282ca28c20d3a63229a38959ce258daa1c063d",
                "search_r1/llm_agent/tensor_helper.py":
                    "b000f3b61c5a2be13dfcf64e1ce9091ce89dda99ed3b331fb24ab1f43b4dce69",
            },
        ),
        open_search_r1, 2560, 1, 2560, "2,560 queries",
        "train_grpo.sh: 512 prompts, 5 responses, one request",
    ),
    Client(
        "verl",
        pinned(
            "volcengine/verl", "b178a3cd56f58b2d502255daba591e92833930a7",
            **{
                "verl/tools/utils/search_r1_like_utils.py":
                    "105bc31a274852ab43f118d306b859251687f3e55a77f864041689c91d591374",
            },
        ),
        open_verl, 1, 120, 2560, "1 query, 120 at once",
        "search_tool_config.yaml: 120 workers; 512 prompts, 5 responses",
    ),
    Client(
        "verl-tool",
        pinned(
            "TIGER-AI-Lab/verl-tool", "980962b4b8af660eb96421df9ecf603a2f790570",
            **{
                "verl_tool/servers/tools/search_retrieval.py":
                    "cf4f61203ce25dd68a51eacf84ef51d50928ef7712b6f3e2bb038146aaeaaccd",
                "verl_tool/servers/tools/base.py":
                    "156c15f49a09955204d66fcdffd234e93662d52eeaabdb66b17af48bb742d58d",
            },
        ),
        open_verl_tool, 1, 8, 8192, "1 query, 8 at once",
        "train_3b.sh: 8 workers; 512 prompts, 16 responses",
    ),
    Client(
        "slime",
        pinned(
            "THUDM/slime", "624b824a898ab0ec1fcb4d373004c7f3852bf515",
            **{
                "examples/search-r1/local_search_server.py":
                    "58de2c752a0d63aa4eddff099116b77803946e7e1212815e0eaa61db747427b1",
            },
        ),
        open_slime, 256, 1, 256, "1 query, 256 at once",
        "run_qwen2.5_3B.sh: 32 prompts, 8 responses, 256 at once",
    ),
    Client(
        "SkyRL-gym",
        pinned(
            "NovaSky-AI/SkyRL", "a9564572eb8e91076be43c1bd5e4615e3de17265",
            **{
                "skyrl-gym/skyrl_gym/tools/search.py":
                    "f44c8ca78f8ca20e6289278aa04a3c1d0359783d48ed35e5de145e93abf50a95",
                "skyrl-gym/skyrl_gym/tools/core.py":
                    "9a225260195c4b1034658cc3a5166abc6110ae9e3774d02aab73263e8b07272c",
            },
        ),
        open_skyrl, 1, 16, 2560, "1 `query`, 16 at once",
        "run_search.sh: 16 workers; 512 prompts, 5 responses",
    ),
    Client("ours", (), open_ours, 2560, 1, 2560, "up to 64 queries, 8 at once",
        "512 prompts, 5 responses, all dialogues at once"),
)  # fmt: skip
#: Those that show what a refusal does to them; Search-R1 sends more than such a queue takes.
REFUSED = ("verl", "slime", "SkyRL-gym", "ours")


def sources_of(client: Client, given: Path | None, work: Path) -> Path:
    """A folder with the client's files and no others, each checked."""
    folder = work / client.name
    for origin in client.files:
        path = folder / origin.path
        if given is None:
            download(origin, path.parent, path.name)
        else:
            origin.check(given / origin.repository / origin.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes((given / origin.repository / origin.path).read_bytes())
    return folder


def measure(
    client: Client, ask: Ask, text: Text, queries: list[str], hits: dict[str, list[Hit]]
) -> dict[str, Any]:
    """All queries through a client."""
    calls = [queries[i : i + client.batch] for i in range(0, len(queries), client.batch)]
    failures: dict[str, int] = {}
    right = 0

    def one(call: list[str]) -> tuple[list[str], str]:
        try:
            return ask(call), ""
        except Exception as error:
            return [], f"{type(error).__name__}: {error}"[:160]

    start = time.perf_counter()
    with ThreadPoolExecutor(client.at_once) as pool:
        answers = list(pool.map(one, calls))
    seconds = time.perf_counter() - start
    for call, (found, problem) in zip(calls, answers, strict=True):
        expected = [text(hits[query]) for query in call]
        right += sum(a == b for a, b in zip(found, expected, strict=False))
        if problem:
            failures[problem] = failures.get(problem, 0) + len(call)
    return {
        "batch": client.batch,
        "at_once": client.at_once,
        "queries": len(queries),
        "right": right,
        "failures": failures,
        "seconds": round(seconds, 2),
    }


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without what clients log and print of each failure."""
    logging.disable(logging.CRITICAL)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
    logging.disable(logging.NOTSET)


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--sources", type=Path, metavar="DIR", help="the clients' files")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    script = "experiments/retrieval/clients.py"
    result = provenance(script, "aiohttp", "requests", "fastapi", "uvicorn")
    result["command"] = f"python {script} --data DIR --sources DIR --out FILE"
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        build(args.data / "corpus.jsonl", "bm25", work / "index")
        made = [" ".join(query.split()) for query in make_queries(args.data)]
        most = max(client.queries for client in CLIENTS)
        queries = ODD + [made[i % len(made)] + f" {i}" for i in range(most - len(ODD))]
        limit = Limits().max_query_chars
        found = open_index(work / "index").search([query[:limit] for query in queries], TOPK)
        hits = dict(zip(queries, found, strict=True))
        sources = {c.name: sources_of(c, args.sources, work / "sources") for c in CLIENTS}
        full = ("--max-pending", "8", "--max-queries", "8", "--max-batch", "2")
        servers: dict[str, tuple[str, ...]] = {
            "default": (),
            "full, 429": full,
            "full, 503": (*full, "--busy-status", "503"),
        }
        for label, options in servers.items():
            with serve(work / "index", "--cache-size", "0", *options) as url:
                entry = result.setdefault("servers", {}).setdefault(label, {})
                for client in CLIENTS:
                    if options and client.name not in REFUSED:
                        continue
                    some = queries[: client.queries if not options else 512]
                    with quietly():
                        ask, text = client.open(sources[client.name], url)
                        entry[client.name] = measure(client, ask, text, some, hits)
                    print(label, client.name, entry[client.name], flush=True)
                    for name in [n for n in sys.modules if n.split(".")[0] in PEERS]:
                        del sys.modules[name]
    result["clients"] = {
        client.name: {
            "repository": client.files[0].repository if client.files else "",
            "commit": client.files[0].commit if client.files else "",
            "files": [origin.path for origin in client.files],
            "requests": client.requests,
            "recipe": client.recipe,
        }
        for client in CLIENTS
    }
    write_whole(args.out, as_json(result))


#: Packages of the clients, imported anew for each server.
PEERS = ("verl", "search_r1", "verl_tool", "skyrl_gym")


if __name__ == "__main__":
    main()
