"""Side by side with peers: ratios of medians of CPU time, one thread, variants interleaved."""
