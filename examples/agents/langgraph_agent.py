"""A LangGraph agent: a graph of the model and its tools, unchanged but for the base URL.

pip install langgraph langchain-openai
hybridflow train … actor_rollout_ref.rollout.agent.default_agent_loop=examples/agents/langgraph_agent.py:run
"""

from __future__ import annotations

from typing import Any

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


async def run(base_url: str, row: dict[str, Any]) -> dict[str, float]:
    """Run the graph to its end; the reward is given here, and the number of messages is a metric."""
    model = ChatOpenAI(base_url=base_url, api_key="none", model="any", timeout=600).bind_tools([multiply])

    async def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", ask)
    graph.add_node("tools", ToolNode([multiply]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    state = await graph.compile().ainvoke({"messages": row["raw_prompt"]}, {"recursion_limit": 10})
    answer = str(state["messages"][-1].content)
    right = row["reward_model"]["ground_truth"] in answer.split()
    return {"score": float(right), "num_messages": len(state["messages"])}
