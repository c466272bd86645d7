"""Tests of tasks/novelcraft."""
