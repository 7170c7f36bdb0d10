"""Hostile input: how long reviews take, and what listeners of operator and launcher hold and delay meanwhile."""
