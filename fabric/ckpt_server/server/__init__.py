"""The checkpoint server process: slots of shared memory, HTTP, the watch on its trainer. No torch."""
