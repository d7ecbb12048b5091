"""Simulation of recorded steps in smaller budgets."""
