"""Generation by vLLM, in this process or by its server. No other package imports vllm.

VLLMEngine ──► Runner (rollout/remote): InProcess (vllm's engine here) or Server (its HTTP server) ──► workers
with `Extension`
"""
