"""The configuration of a training run: its sections, their checks, and the TOML file."""
