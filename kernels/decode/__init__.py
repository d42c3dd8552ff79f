"""Few queries against a KV cache, on any architecture from sm_80 on."""
