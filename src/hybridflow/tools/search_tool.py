"""verl's search tool: an HTTP retrieval service in the form of search-r1."""

from __future__ import annotations

import json
from typing import Any

from hybridflow.errors import ConfigError
from hybridflow.tools.base_tool import BaseTool
from hybridflow.tools.bm25 import passages, queries_of
from hybridflow.tools.http_post import OpenRequests, post
from hybridflow.tools.schemas import OpenAIFunctionToolSchema, ToolResponse, schema_with


class SearchTool(BaseTool):
    """Asks `retrieval_service_url` for the `topk` best documents of each query of a call.

    Request: {"queries": […], "topk": 3, "return_scores": true}. Answer: {"result": [[{"document":
    {"contents": "title\\ntext"}, "score": …}, …], …]}, a list for each query. At most `num_workers` and
    `rate_limit` requests (120 each) are open at once, and each try has `timeout` seconds (30).
    """

    in_process = True
    default_schema = schema_with(
        "search",
        "Searches for relevant information based on queries.",
        query_list={
            "type": "array",
            "items": {"type": "string"},
            "description": "The queries; each gets its own results.",
        },
    )

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema)
        if not config.get("retrieval_service_url"):
            raise ConfigError("SearchTool: set retrieval_service_url in its config")
        self.url: str = config["retrieval_service_url"]
        self.topk = int(config.get("topk", 3))
        self.timeout = float(config.get("timeout", 30))
        self.limit = OpenRequests(
            min(int(config.get("num_workers", 120)), int(config.get("rate_limit", 120)))
        )

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        queries = queries_of(parameters)
        request = {"queries": queries, "topk": self.topk, "return_scores": True}
        async with self.limit.here():
            answer = await post(self.url, request, timeout=self.timeout)
        found = [[each["document"]["contents"] for each in documents] for documents in answer["result"]]
        text = "\n---\n".join(passages(documents) for documents in found)
        total = sum(len(documents) for documents in found)
        metrics = {"query_count": len(queries), "total_results": total}
        return ToolResponse(text=json.dumps({"result": text}, ensure_ascii=False)), 0.0, metrics
