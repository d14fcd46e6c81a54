"""Generation by vLLM, in this process or by its server. The only door to vllm.

VLLMEngine ──► Runner: InProcess (vllm's engine here) or Server (its HTTP server, launched or external) ──► workers with `Extension`
"""
