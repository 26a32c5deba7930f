"""What a user touches: LLM, AsyncLLM, the command line, and text in and out."""
