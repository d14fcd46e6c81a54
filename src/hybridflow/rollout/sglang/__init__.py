"""Generation by SGLang's HTTP server. The only door to sglang.

SGLangEngine ──► Server (a `Runner` of rollout/remote), launched or external ──► SGLang's workers, with
`loader.load` and `sampler.install`
"""
