"""Environment checks, benchmarks, profiles, figures and file inspection."""
