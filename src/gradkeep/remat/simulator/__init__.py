"""Simulate recorded steps in smaller budgets."""
