"""Waiting on files: claims with a heartbeat, and followers that never compare the clocks of two hosts."""
