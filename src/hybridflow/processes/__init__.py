"""Worker processes that run the user's code, and that may be killed with all that it has started."""
