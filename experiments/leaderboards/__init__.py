"""Leaderboards: many caches at several budgets on the same texts and tasks, with intervals, on one page."""
