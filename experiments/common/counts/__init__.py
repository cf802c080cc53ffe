"""Counts over compiled programs: operations, bytes, and the peaks of chips."""
