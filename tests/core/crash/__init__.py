"""Tests that kill real processes at named phases. The deterministic model is the oracle."""
