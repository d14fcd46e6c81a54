"""Search by words over a corpus in memory: BM25, and the tool that answers with the best documents.

tools:
  - class_name: hybridflow.tools.bm25.LocalSearchTool
    config: {corpus: facts.jsonl, topk: 3}
"""

from __future__ import annotations

import heapq
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridflow.errors import ConfigError
from hybridflow.processes.local import in_thread
from hybridflow.tools.base_tool import BaseTool
from hybridflow.tools.schemas import OpenAIFunctionToolSchema, ToolResponse, schema_with

WORD = re.compile(r"\w+")


class Bm25:
    """Index of documents by BM25 (Robertson and Zaragoza 2009, with the idf of Lucene, which is positive).

    score(d, q) = Σ_w ln(1 + (N − n_w + 1/2) / (n_w + 1/2)) · f_w (k1 + 1) / (f_w + norm_d)
    norm_d = k1 (1 − b + b |d| / mean |d|)
    """

    def __init__(self, documents: Sequence[str], k1: float = 1.5, b: float = 0.75) -> None:
        counts = [Counter(WORD.findall(document.lower())) for document in documents]
        lengths = [count.total() for count in counts]
        mean = max(1.0, sum(lengths) / max(1, len(lengths)))
        self._weights: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for number, (count, length) in enumerate(zip(counts, lengths)):
            norm = k1 * (1 - b + b * length / mean)
            for word, times in count.items():
                self._weights[word].append((number, times * (k1 + 1) / (times + norm)))
        self._num_documents = len(documents)

    def search(self, query: str, topk: int) -> list[tuple[int, float]]:
        """Return (number, score) of at most `topk` documents that share a word with the query, best first.

        Of equal scores the earlier document comes first.
        """
        scores: Counter[int] = Counter()
        for word in WORD.findall(query.lower()):
            found = self._weights.get(word, [])
            idf = math.log(1 + (self._num_documents - len(found) + 0.5) / (len(found) + 0.5))
            for number, weight in found:
                scores[number] += idf * weight  # type: ignore[assignment]
        return heapq.nsmallest(topk, scores.items(), key=lambda item: (-item[1], item[0]))


class LocalSearchTool(BaseTool):
    """Search over `documents` (a list of texts) or `corpus` (a file: a JSON object or text on each line).

    A JSON object has its text under `contents`, whose first line is the title, as in search-r1, or under
    `text`, with an optional `title`.
    """

    in_process = True
    default_schema = schema_with(
        "search",
        "Searches the documents.",
        query={"type": "string", "description": "The words to look for."},
    )

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema)
        self.topk = int(config.get("topk", 3))
        self.documents = [str(each) for each in config.get("documents", [])]
        if config.get("corpus"):
            self.documents += _read_corpus(Path(config["corpus"]).expanduser())
        if not self.documents:
            raise ConfigError("LocalSearchTool has no documents: set `corpus` or `documents` in its config")
        self.index = Bm25(self.documents)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        queries = queries_of(parameters)
        found = [await in_thread(self.index.search, query, self.topk) for query in queries]
        texts = [passages([self.documents[number] for number, _ in each]) for each in found]
        total = sum(len(each) for each in found)
        return ToolResponse(text="\n---\n".join(texts)), 0.0, {"total_results": total}


def queries_of(parameters: dict[str, Any]) -> list[str]:
    """Return the queries of a call, under `query` or, as verl's search tool has it, `query_list`.

    Raises ValueError, with a sentence for the model.
    """
    asked = parameters.get("query_list") or parameters.get("query")
    queries = [asked] if isinstance(asked, str) else asked
    if not (isinstance(queries, list) and queries and all(isinstance(query, str) for query in queries)):
        raise ValueError("query_list has to be a list of texts that is not empty")
    return queries


def passages(documents: Sequence[str]) -> str:
    """Return documents as the model reads them; the first line of each is its title (search-r1's form)."""
    texts = []
    for number, document in enumerate(documents, start=1):
        title, _, text = document.partition("\n")
        texts.append(f"Doc {number} (Title: {title})\n{text}\n")
    return "\n".join(texts).strip() or "No search results found."


def _read_corpus(path: Path) -> list[str]:
    if not path.is_file():
        raise ConfigError(f"corpus: no file {path} (looked in {Path.cwd()})")
    documents = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line) if path.suffix in (".jsonl", ".json") else line
        except ValueError as error:
            raise ConfigError(f"corpus: line {number} of {path} is no JSON: {error}") from error
        if isinstance(row, dict):
            title = row.get("title")
            text = row.get("contents", row.get("text"))
            row = f"{title}\n{text}" if title and text is not None else text
        if not isinstance(row, str):
            raise ConfigError(f"corpus: line {number} of {path} has no `contents` and no `text`")
        documents.append(row)
    return documents
