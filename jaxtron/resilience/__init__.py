"""Ending a run early with its state saved, and ending one whose processes stand still."""
