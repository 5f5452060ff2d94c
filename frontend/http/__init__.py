"""The OpenAI-compatible HTTP server: validation, limits and response shapes over one AsyncEngine."""
