"""What a running process tells: metrics, health, one line a commit, traces, and the HTTP server for them."""
