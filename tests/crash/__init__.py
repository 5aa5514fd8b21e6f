"""Real processes killed at named steps; the oracle is the deterministic model."""
