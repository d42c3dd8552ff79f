"""Device code of cute_attn in the CuTe DSL, and the plain configs that select it."""
