"""verl's tool of an MCP server that searches: its results are JSON, of which the model reads the hits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hybridflow.tools.mcp_base_tool import MCPBaseTool


class MCPSearchTool(MCPBaseTool):
    """Answers with the list `results` of each JSON part, and with the text of any other part as it is."""

    def _parse_tool_result(self, content: Sequence[Any]) -> tuple[str, dict[str, Any]]:
        texts = []
        num_results = 0
        for part in content:
            if part.type != "text":
                continue
            try:
                results = json.loads(part.text)["results"]
            except (ValueError, KeyError, TypeError):
                texts.append(part.text)
                continue
            texts.append(json.dumps(results, ensure_ascii=False))
            num_results += len(results)
        return "\n".join(texts), {"query_count": len(texts), "total_results": num_results}
