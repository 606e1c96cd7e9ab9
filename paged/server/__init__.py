"""An OpenAI-compatible HTTP server in front of engines (extra `serve`)."""
