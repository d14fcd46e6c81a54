"""Generation by SGLang's HTTP server. The only door to sglang.

SGLangEngine ──► SGLangServer (an `EngineRunner`), launched or external ──► SGLang's workers, with
`loader.load` and `loader.install`
"""
