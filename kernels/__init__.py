"""Device operations, one a file: Triton kernel, torch reference, and the function that picks."""
